"""OnlineLearner: draft heads that learn from the texts of a decoder or server, beside it.

The verify passes give the states of every committed token: the training data of heads, on the traffic that matters. So
a step of learning runs the heads and the LM head, and never the target (OSD, arXiv 2310.07177, trains a small model on
the tokens that were wrong; here all of a reply's tokens are learned from).
"""

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from draftsmith.heads import DraftHeads
from draftsmith.heads.modules.host_tensors import OnHost
from draftsmith.heads.modules.vocabulary import keep_rows
from draftsmith.inference.learning import Learner, LearningProgress, SeenText, Trial
from draftsmith.inference.openmp import release_workers
from draftsmith.inference.targets.model_config import has_fast_bfloat16
from draftsmith.inference.targets.target import Target
from draftsmith.training.learning.buffer import TextBatch, TextBuffer, join_texts
from draftsmith.training.learning.state import LearnerState, fingerprint, read_state, write_state
from draftsmith.training.learning.trial import measure_acceptance
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.run.optimizer import MuonWithAdamW

logger = logging.getLogger(__name__)

WARMUP_STEPS = 10  # after a start, until the learning rate is the whole one
MOST_PROMPT = 64  # tokens of a prompt that are kept: heads learn from replies, and a prompt's end tells them enough
MOST_DEPTHS = 4  # of EAGLE's that learn: with new texts deeper drafts are seldom reached, and take half the time
TRIAL_RATIO = 3  # tokens that are learned between two trials, for each token of a trial: a fifth of the time is trials'
PATIENCE = 3  # trials in a row without a gain, after which what was learned is dropped
MAX_PASSES = 4  # over what was read; then learning waits for new texts
MAX_TRIALS = 1000  # that are remembered
TRIAL_TOKENS = 2048  # of a trial, at most
VOCABULARY_TOKENS = 4096  # of replies, between two looks at the draft vocabulary: at first,
MOST_TOKENS = 65_536  # and at most
MOST_MISSED = 0.01  # of the replies' tokens, that a draft vocabulary may lack
WAIT_SECONDS = 0.05


class OnlineLearner(Learner):
    """Learns while a `Decoder` or a server decodes; give it to those, and `start` it, or call `learn` and `compare`.

        with OnlineLearner(target, heads) as learner:
            decoder = Decoder(target, heads, learner=learner)

    A copy of the heads takes optimizer steps in a thread of its own. Every minute or so the copy is compared with the
    weights in use, on texts that were held back. If it is better, it is used from the next step on; if it is not,
    three times in a row, learning begins again from the weights in use. Where the texts have become others, and the
    weights that the heads began with are better than both, those are used again. The decoded text does not depend on
    the heads, so it never changes.

    Args:
        target: as it was before its weights were packed.
        heads: those that draft. Their weights change in place.
        share: of the time, that learning may take while texts are decoded; otherwise it takes all, until it has gone
            four times over what was read.
        num_bytes: of states of decoded texts, in memory only.
        folder: where the weights in use, the optimizer and counters are kept, and taken from at the start; None =
            nowhere. No text is ever written, only how often the texts have each token.
        trial_seconds: between two comparisons.
        tokens_per_step: tokens of a step of learning.
        muon_learning_rate, learning_rate: of hidden matrices, and of all other weights (`MuonWithAdamW`).

    Attributes:
        buffer: the texts.
        trials: the newest comparisons, in their order.

    Raises:
        ValueError: heads that do not fit the target, a target whose scores cannot be computed from its states, or a
            folder with other heads.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        heads: DraftHeads,
        *,
        share: float = 0.1,
        num_bytes: int = 512 << 20,
        folder: Path | str | None = None,
        trial_seconds: float = 60.0,
        tokens_per_step: int = 512,
        muon_learning_rate: float = 0.03,
        learning_rate: float = 3e-4,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"got share {share}: give more than 0 and at most 1")
        for name, value in (("num_bytes", num_bytes), ("tokens_per_step", tokens_per_step)):
            if value < 1:
                raise ValueError(f"got {name} {value}: give at least 1")
        if trial_seconds < 0:
            raise ValueError(f"got trial_seconds {trial_seconds}: give at least 0")
        self.target = Target.of(target)
        if self.target.is_packed:
            raise ValueError("got a target with packed weights, through which no gradient passes: give the plain one")
        if self.target.capabilities.scale_logits is None:
            raise ValueError(
                f"{type(self.target.model).__name__} computes logits from more than its last states, so its heads "
                "cannot learn while decoding: train them (draftsmith train)"
            )
        self.heads, self.share, self.folder = heads, share, None if folder is None else Path(folder)
        self.feature_layers = heads.feature_layers
        self.trial_seconds, self.tokens_per_step = trial_seconds, tokens_per_step
        self.buffer = TextBuffer(num_bytes)
        self.trials: deque[Trial] = deque(maxlen=MAX_TRIALS)
        self.num_learned = 0
        self._student = copy.deepcopy(heads).float().bind(self.target).eval()  # eval: no dropout
        self._student.requires_grad_(requires_grad=True)
        self._student.learn_draft_vocabulary()
        if getattr(self._student.config, "ttt_steps", 0) > MOST_DEPTHS:
            self._student.config.ttt_steps = MOST_DEPTHS
        self._new_optimizer = partial(MuonWithAdamW, muon_learning_rate=muon_learning_rate, learning_rate=learning_rate)
        self._generator = torch.Generator().manual_seed(0)
        self._lock = threading.Lock()  # of the buffer
        self._better: deque[dict[str, Tensor]] = deque(maxlen=1)  # to be used from the next step on
        self._has_failed = False
        self._num_trials = self._num_swaps = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_failed = 0
        self._seen = torch.zeros(self.target.vocab_size, dtype=torch.double)  # how often replies had each token
        self._next_look = VOCABULARY_TOKENS
        self._last_trial = time.perf_counter(), 0  # when, and after how many learned tokens
        self._before = 0, 0, 0  # texts, tokens and learned tokens of earlier runs
        self._begin()

    def _begin(self) -> None:
        """Goes on where an earlier run has ended, if the folder has one."""
        self._first = self._student.copy_weights()
        state = None if self.folder is None else read_state(self.folder, self.heads)
        self._origin = fingerprint(self.heads) if state is None else state.origin
        if state is not None:
            self.heads.write_weights(state.in_use)
            self._student.write_weights(state.in_use)
        self._in_use = self._student.copy_weights()
        self._counts = self._student.token_counts
        self._restart_optimizer()
        if state is None:
            return
        parameters = dict(self._student.named_parameters())
        for name, value in state.optimizer.items():
            parameter, _, kind = name.rpartition("/")
            self._optimizer.state[parameters[parameter]][kind] = value.to(self.target.device)
        counters = state.counters
        self._before = counters["num_texts"], counters["num_tokens"], counters["num_learned"]
        self._num_trials, self._num_swaps = counters["num_trials"], counters["num_swaps"]
        self.trials.extend(Trial(**trial) for trial in counters["trials"])

    # Decoding's side.

    def see(self, text: SeenText) -> None:
        """Takes a text that has ended."""
        if self._has_failed:
            return
        same = tuple(self.feature_layers) == (self.target.num_layers,)  # then the features are the last states
        cut = max(0, text.num_prompt - MOST_PROMPT)
        features = text.features[cut:].to("cpu", copy=cut > 0)  # a view would keep the whole prompt
        last = features if same else text.last_hidden[cut:].to("cpu", copy=cut > 0)
        ids, num_prompt = text.token_ids[cut:], text.num_prompt - cut
        replied = torch.tensor(ids[num_prompt:], dtype=torch.long)
        with self._lock:
            self.buffer.add(SeenText(ids, num_prompt, features, last))
            self._seen += torch.bincount(replied, minlength=len(self._seen))

    def swap(self) -> None:
        """Puts better weights into the heads, if there are."""
        if self._better:
            self.heads.write_weights(self._better.pop())

    # Learning's side.

    def start(self) -> None:
        """Learns in a thread until `stop`."""
        if self._thread is not None:
            raise RuntimeError("this learner has been started: stop it first")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="draftsmith-learner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and keeps what was learned."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.save()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def learn(self, num_steps: int = 1) -> float:
        """Takes so many steps; returns the mean loss, 0 without a text to learn from."""
        losses = [self._take_step() for _ in range(num_steps if self.buffer.num_trainable else 0)]
        return sum(losses) / max(1, len(losses))

    @property
    def has_work(self) -> bool:
        """Whether there is something left to learn."""
        return self.buffer.num_trainable > 0 and self.num_learned < MAX_PASSES * self.buffer.num_read

    def work(self) -> None:
        """Takes a step, and compares weights where it is time to."""
        self._take_step()
        seconds, learned = self._last_trial
        texts = self._held_back()
        least = TRIAL_RATIO * sum(len(text.token_ids) for text in texts)
        is_late = time.perf_counter() - seconds >= self.trial_seconds
        if texts and is_late and self.num_learned - learned >= max(least, TRIAL_RATIO * self.tokens_per_step):
            self.compare()
            try:
                self.save()
            except OSError as error:
                logger.warning("what was learned could not be written: %s. Learning goes on", error)

    def compare(self) -> Trial | None:
        """Compares the learned weights, and the first ones, with those in use on the texts that were held back; None =
        there are none. Better ones are used after the next `swap`; after three trials in a row without a gain the
        learned ones are dropped."""
        texts = self._held_back()
        if not texts:
            return None
        batch = join_texts(texts, self.target.device)
        learned = self._student.copy_weights()
        before, after, first = (self._measure(batch, weights) for weights in (self._in_use, learned, self._first))
        self._student.write_weights(learned)
        so_far = self.progress
        counts = so_far.num_texts, so_far.num_tokens, so_far.num_learned
        is_swapped, is_undone = after > before and after >= first, first > max(before, after)
        trial = Trial(time.time(), *counts, before, after, first, is_swapped, is_undone)
        self.trials.append(trial)
        what = "the learned" if is_swapped else "the first" if is_undone else "the same"
        logger.info(
            "after %d tokens %s weights are in use (acceptance length in use %.3f, learned %.3f, first %.3f)",
            *(trial.num_tokens, what, before, after, first),
        )
        self._last_trial = time.perf_counter(), self.num_learned
        self._num_trials, self._num_swaps = self._num_trials + 1, self._num_swaps + (is_swapped or is_undone)
        self._num_failed = 0 if is_swapped or is_undone else self._num_failed + 1
        if is_swapped or is_undone:
            self._in_use = self._first if is_undone else learned
            if self.target.device.type == "cuda":
                torch.cuda.current_stream(self.target.device).synchronize()  # decoding reads them on its own stream
            self._better.append(self._in_use)
        if is_undone or self._num_failed == PATIENCE:
            self._num_failed = self._next_look = 0
            self._student.write_weights(self._in_use)
            self._restart_optimizer()
        return trial

    @property
    def progress(self) -> LearningProgress:
        """What was learned so far, earlier runs included. For any thread."""
        texts, tokens, learned = self._before
        buffer = self.buffer
        counts = texts + buffer.num_texts, tokens + buffer.num_tokens, learned + self.num_learned
        return LearningProgress(*counts, self._num_trials, self._num_swaps, tuple(self.trials))

    def save(self) -> None:
        """Writes the weights in use, the optimizer and the counters to the folder, if there is one: whole, or not at
        all."""
        if self.folder is None:
            return
        own = self._student.copy_weights()
        is_same = all(torch.equal(own[n], self._in_use[n]) for n in self._student.vocabulary_buffers if n in own)
        moments = {
            f"{name}/{kind}": value
            for name, parameter in self._student.named_parameters()
            if is_same or "lm_head" not in name.split(".")
            for kind, value in self._optimizer.state.get(parameter, {}).items()
        }
        write_state(self.folder, self.heads, LearnerState(self._in_use, moments, asdict(self.progress), self._origin))

    def _run(self) -> None:
        device = self.target.device
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            while not self._stopping.wait(0 if self.has_work else WAIT_SECONDS):
                if not self.has_work:
                    continue
                begin, busy = time.perf_counter(), time.thread_time()
                try:
                    self.work()
                    release_workers()
                except Exception:  # decoding goes on without
                    self._has_failed = True
                    logger.exception("learning ends: a step failed. Decoding goes on with the weights in use")
                    return
                self._rest(begin + (time.thread_time() - busy) / self.share)

    def _rest(self, until: float) -> None:
        """Waits while texts are decoded, until this moment."""
        while self.num_decoding and (left := until - time.perf_counter()) > 0:
            if self._stopping.wait(min(left, WAIT_SECONDS)):
                return

    def _follow_texts(self) -> None:
        """Lets the student draft other tokens if the texts have many that it does not draft."""
        with self._lock:
            total = int(self._seen.sum())
            if total < self._next_look:
                return
            seen = self._seen.clone()
            self._seen /= 2  # older texts count less
        self._next_look = total // 2 + max(VOCABULARY_TOKENS, min(total, MOST_TOKENS))
        if (drafted := self._student.find_drafted(self.target)) is None:
            return
        missed = 1 - float(seen[drafted.cpu()].sum() / seen.sum().clamp(min=1))
        if missed <= MOST_MISSED:
            return
        if self._counts is None:  # not known: every seen token before those of the first vocabulary
            counts = (2 * seen).ceil().long()
            counts[drafted.cpu()] += 1
        else:
            old = self._counts.cpu()
            counts = old + (seen * max(1.0, int(old.sum()) / total)).round().long()
        before = self._student.own_token_ids
        self._student.choose_vocabulary(counts)
        if before is not None:
            self._keep_moments(before, self._student.own_token_ids)
        logger.info(
            "%.0f%% of the texts' tokens were not in the draft vocabulary, which follows them now", 100 * missed
        )

    def _keep_moments(self, before: Tensor, after: Tensor) -> None:
        """Of the LM head's rows, which belong to other tokens now."""
        for name, weight in self._student.named_parameters():
            if "lm_head" in name.split("."):
                moments = self._optimizer.state.get(weight, {})
                for kind, values in moments.items():
                    if values.ndim:  # not the number of steps
                        moments[kind] = keep_rows(values, before, after, torch.zeros_like(values))

    def _held_back(self) -> list[SeenText]:
        with self._lock:
            return self.buffer.held_back(TRIAL_TOKENS)

    def _forward(self, batch: TextBatch, loss_fn: Callable[..., Any] | None) -> Any:
        """The student's pass over a batch."""
        seeds = torch.randint(-(2**63), 2**63 - 1, batch.loss_mask.shape, generator=self._generator)
        arguments = {
            "loss_fn": loss_fn,
            "loss_mask": OnHost(batch.loss_mask),
            "document_ids": OnHost(batch.document_ids),
            "token_seeds": OnHost(seeds),
        }
        return self._student(batch.features, batch.input_ids, **arguments)

    def _take_step(self) -> float:
        self._follow_texts()
        with self._lock:
            texts = self.buffer.sample(self.tokens_per_step)
        batch = join_texts(texts, self.target.device)
        mask = OnHost(batch.loss_mask)
        loss_type, heads = self._student.default_loss, self._student
        teacher = compute_teacher(
            self.target, batch.last_hidden, batch.input_ids, mask, heads.draft_token_ids, loss_type=loss_type
        )
        loss_fn = partial(
            draft_loss,
            teacher=teacher,
            loss_mask=mask,
            loss_type=loss_type,
            step_decay=heads.default_step_decay,
            depth_weights=heads.default_depth_weights,
        )
        with torch.enable_grad():
            with self._autocast():
                loss = self._forward(batch, loss_fn).loss
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        if torch.isfinite(norm):  # a target may give states that are not
            with self._autocast():  # Muon's products
                self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad()
        self.num_learned += batch.input_ids.numel()
        return float(loss.detach())

    def _measure(self, batch: TextBatch, weights: Mapping[str, Tensor]) -> float:
        """The student's acceptance length with these weights, which it keeps."""
        self._student.write_weights(weights)
        with torch.no_grad(), self._autocast():
            steps = self._forward(batch, None)
            serves_all = self._student.runs_target_layers
            return measure_acceptance(steps, batch, self._student.draft_token_ids, serves_all_depths=serves_all)

    def _autocast(self) -> torch.autocast:
        """Products in bfloat16, with a target that computes in it. Weights stay float32."""
        device = self.target.device.type
        is_fast = device != "cpu" or has_fast_bfloat16()
        return torch.autocast(device, torch.bfloat16, enabled=is_fast and self.target.dtype == torch.bfloat16)

    def _restart_optimizer(self) -> None:
        self._optimizer = self._new_optimizer(self._student.named_parameters())
        self._schedule = LinearLR(self._optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS - 1)
