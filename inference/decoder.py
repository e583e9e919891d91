"""Decoder: one target and one drafter, and the buffers they decode with.

Legend: B batch, L prompt length.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from draftsmith.inference.acceptance.rules import EXACT, AcceptanceRule, resolve_rule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.emitted_scores import EmittedScores
from draftsmith.inference.engine import Engine, GenerationOutput, StepTokens
from draftsmith.inference.learning import Learner, TextStates
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.openmp import release_workers
from draftsmith.inference.planning.memory import memory_file
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.prefill import finish, prefill
from draftsmith.inference.prefix_cache import PrefixHit, match
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.request import Request
from draftsmith.inference.runners.compiled import compiled_runner
from draftsmith.inference.runners.cuda_graphs import graph_runner
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Runner, Step
from draftsmith.inference.streaming.streamers import ending
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.probing.invariance import check_compiling
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.options import TreeOption, resolve_policy
from draftsmith.inference.trees.policy import TreePolicy

logger = logging.getLogger(__name__)

NODE_COSTS = {"cpu": 0.05, "cuda": 0.003}  # a first guess of what a node takes, in plain steps


class Decoder:
    """Decodes with one target and one drafter, and keeps its buffers from call to call.

    A decoder decodes one text (or batch) at a time: give each thread its own. Decoders of the same target and heads
    share their weights and may run at the same time.

    With exact acceptance the text depends on the target and the seed only: not on the drafter, the tree or the other
    rows of the batch.

    Args:
        target: a frozen causal LM or encoder-decoder model of transformers, or a `Target`.
        drafter: trained heads, any other `Drafter`, or None for plain decoding on the same stack. Heads of another
            dtype than the target's draft with a copy in its dtype, made when the decoder is.
        tree: which drafts are verified:

            - "auto" (the default): a dynamic tree of the size that decodes fastest, or none, chosen every few steps
            - "dynamic" (EAGLE-2) or "dynamic:DEPTH,TOP_K,NODES", as "dynamic:5,6,24"
            - "chain" or "chain:LENGTH"
            - "gamma" or "gamma:LENGTH": a chain of the length that decodes fastest, or none
            - a YAML file with a static tree, a list of rank paths, or a `TreePolicy`
        acceptance: "exact" (the default), "rejection" (Leviathan et al.; siblings without replacement), "typical"
            (Medusa; lossy), or an `AcceptanceRule`. A greedy target always gets "exact". When sampling, "rejection"
            keeps the target's distribution, but its texts depend on the drafts.
        is_coupled: at temperature > 0 and with exact acceptance, let the drafter read the target's own Gumbel noise.
            More drafts are accepted, and the text is the same either way.
        batch_invariant: compute every token's scores in the same way, bit by bit, in passes of any number of tokens and
            rows. Then drafted text equals plain text of this mode in bfloat16 and float16, too. A step takes some
            percent longer. None: in these dtypes on a CPU in eager steps, where it can be proved
            (`Target.prefer_batch_invariant`); a `Target` in this mode stays in it.
        is_synchronised: wait for the accelerator at every phase boundary, so that `stats.seconds` holds the true time
            of each phase.
        compile: compile drafting, verification, acceptance and commits with torch.compile. The first steps of a process
            then take a minute or more (`stats.seconds["compile"]`). Compiled numbers are rounded differently from the
            eager model's, so a near-tie may fall the other way. Weights and active adapters are read when a graph is
            made: make a new decoder after a change. A compiled decoder of the same target instead of True: its graphs
            of the target, which take longest to make, serve this one, too, unless the two need other hidden states.
        pack_weights: keep a second copy of linear layers' weights, in the order in which oneDNN's kernels read them
            (float32 and bfloat16 on a CPU). It takes their memory once more. Targets beyond the processor's caches
            gain most (docs/decoding.md). Weights are read when the decoder is made.
        graphs: capture drafting, verification, acceptance and commits as CUDA graphs. They run the eager kernels, and
            the second step of each size is captured. docs/gpu.md says what ran on a GPU. A part that
            cannot be captured runs eagerly, with a warning. It excludes `compile`.
        learner: improves the heads with the texts that are decoded (`draftsmith.OnlineLearner`). The text stays the
            same: acceptance must be exact. All decoders of these heads must run in one thread.

    Attributes:
        planner: chooses the trees; None with a fixed one.
        step: the parts of a step, for loops of their own.

    Raises:
        TypeError: `drafter` is no `Drafter`, `learner` no `Learner`, or a switch neither True nor False.
        ValueError: a tree that the drafter or the acceptance rule cannot use, a drafter that does not fit the target,
            weights that cannot be packed, or a target that cannot be batch-invariant.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        drafter: Drafter | None = None,
        *,
        tree: TreeOption | None = None,
        acceptance: AcceptanceRule | str = "exact",
        is_coupled: bool = True,
        batch_invariant: bool | None = None,
        is_synchronised: bool = False,
        compile: bool | Decoder = False,  # noqa: A002
        pack_weights: bool = False,
        graphs: bool = False,
        learner: Learner | None = None,
    ) -> None:
        if drafter is not None and not isinstance(drafter, Drafter):
            shown = drafter if isinstance(drafter, (str, os.PathLike)) else type(drafter).__name__
            raise TypeError(
                f"drafter is {shown!r}; a Drafter, or None, is expected: load a folder of heads with "
                "DraftHeads.from_pretrained, wrap a small model in SmallModelDrafter, or subclass Drafter"
            )
        if learner is not None and not isinstance(learner, Learner):
            raise TypeError(f"learner is {learner!r}; a draftsmith.OnlineLearner, another Learner, or None is expected")
        _check_switches(is_coupled=is_coupled, batch_invariant=batch_invariant, is_synchronised=is_synchronised)
        _check_switches(pack_weights=pack_weights, graphs=graphs, compile=compile)
        self.target = Target.of(target).with_packed_weights() if pack_weights else Target.of(target)
        if batch_invariant:
            self.target = self.target.batch_invariant()
        elif batch_invariant is None and not compile:
            self.target = self.target.prefer_batch_invariant(warns=drafter is not None)
        if compile and self.target.is_batch_invariant:
            check_compiling(self.target)
        self.drafter = None if drafter is None else drafter.for_target(self.target)
        rule = resolve_rule(acceptance)
        self.policy = _resolve_policy(tree, self.target, self.drafter, rule)
        self.is_synchronised = is_synchronised
        rule.check(self.policy)
        self.learner = learner
        runner = self._choose_runner(compile=compile, graphs=graphs)
        self.step = Step(self.target, self.drafter, self.policy, is_coupled=is_coupled, rule=rule, runner=runner)
        if learner is not None and rule is not EXACT:
            raise ValueError(
                f"acceptance is {acceptance!r}, and there is a learner: only with exact acceptance texts do not depend "
                "on the heads; leave one of them out"
            )
        if learner is not None and tuple(learner.feature_layers) != tuple(self.step.feature_layers):
            raise ValueError(
                f"the learner's heads read the states {learner.feature_layers}, and this decoder's drafter "
                f"{tuple(self.step.feature_layers)}: give the heads that learn as the drafter"
            )
        self.planner = self._new_planner()
        self._state: DecodeState | None = None  # kept between calls; with the texts of the last one, if it is whole
        self._is_free = threading.Lock()
        release_workers()  # those that loaded the target; the texts may be decoded in another thread

    def _new_planner(self) -> Planner | None:
        if not isinstance(self.policy, CandidateTrees):
            return None
        self.policy.make_table(self.target.device)
        if _is_split(self.target):
            raise ValueError(
                "tree='auto' and 'gamma' choose by each process's own clock, and processes that split a target by "
                "tensor parallelism must verify the same tree: give a fixed one, such as tree='chain:3'"
            )
        step, trees = self.step, (*self.policy.candidates, *self.step.batch_trees)
        file = memory_file(self.target, self.drafter, trees, step.runner.name, is_coupled=step.is_coupled)
        return Planner(trees, file, node_cost=NODE_COSTS.get(self.target.device.type, NODE_COSTS["cuda"]))

    def _choose_runner(self, *, compile: bool | Decoder, graphs: bool) -> Runner:  # noqa: A002
        beside = compile.step if isinstance(compile, Decoder) else None
        if beside is not None and (beside.target is not self.target or beside.runner.name != "compiled"):
            found = "another target (or mode of it)" if beside.target is not self.target else "eager steps"
            raise ValueError(
                f"compile is a decoder with {found}: give a compiled decoder, and its `target` as the target"
            )
        if graphs and compile:
            raise ValueError(
                "compile and graphs are both true: compiled functions cannot be captured here; choose one of them"
            )
        for name, is_on in (("graphs", graphs), ("compile", compile)):
            if is_on:
                self.target.refuse_recurrent(
                    f"{name} is not possible: a graph would hold the states of one step", f"leave {name} out"
                )
        if graphs and self.target.device.type != "cuda":
            raise ValueError(f"graphs is true, and the target is on {self.target.device}: CUDA graphs need a GPU")
        if graphs:
            return graph_runner(self.target.device)
        if compile:
            modules = [m for m in (self.target.model, self.drafter) if isinstance(m, nn.Module)]
            return compiled_runner(modules, drafter_changes=self.learner is not None, beside=beside)
        return Runner()

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        reuse_cache: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> GenerationOutput:
        """Generates through transformers' own `generate`: its config, processors and stopping criteria mean the same as
        there. The result is always a GenerationOutput, also without `return_dict_in_generate`.

        Args:
            input_ids: [B, L] int64; for an encoder-decoder target, the sources. `inputs` is the same.
            attention_mask: [B, L], 0 on padding, left or right. Without it transformers takes pad tokens for padding,
                but not in sources.
            seed: one integer (row b uses hash(seed, b)), one per row, or None to draw from torch's global generator.
            reuse_cache: skip the beginning of each prompt that the last call of this decoder left in its cache, such as
                the earlier turns of a conversation or common instructions. The text is the same up to rounding, since
                the keys and values may come from a pass over other rows. Rows that finished before others leave
                nothing. Do not use it after a change of weights or adapters.
            streamer: a transformers streamer (batch 1). It gets every emitted token; its `end` is always called, also
                when the call is refused.
            tokenizer, stop_strings: as in transformers.
            **generate_kwargs: arguments of transformers' `generate` (max_new_tokens, do_sample, temperature, ...), and
                what a processor returns for images, videos and sounds (pixel_values, ...). Stopping criteria are called
                after every token, with `scores=None`.

        Raises:
            TypeError: ids or a mask that are no tensors, and other arguments of a wrong type.
            ValueError: for an empty or too long prompt, ids the target does not have, beams, and options this loop
                does not have, each with the cure; when no token can be picked (NaN, or everything is forbidden).
            RuntimeError: while this decoder is in the middle of another text.
        """
        with ending(streamer), self._take():
            clock = self._new_clock()
            request = make_request(
                self.target,
                input_ids,
                attention_mask,
                streamer=streamer,
                tokenizer=tokenizer,
                stop_strings=stop_strings,
                **generate_kwargs,
            )
            return self._run(request, seed, clock, reuse_cache=reuse_cache)

    def decode(self, request: Request, *, seed: int | Sequence[int] | None = None) -> GenerationOutput:
        """`generate` of a request that is ready (`draftsmith.inference.request`)."""
        with ending(request.streamer), self._take():
            return self._run(request, seed, self._new_clock(), reuse_cache=False)

    def _run(
        self,
        request: Request,
        seed: int | Sequence[int] | None,
        clock: PhaseClock,
        *,
        reuse_cache: bool,
    ) -> GenerationOutput:
        seeds = self._draw_seeds(request, seed, reuse_cache=reuse_cache)
        scores = EmittedScores(request)
        if request.streamer is not None:
            request.streamer.put(request.given_ids.cpu())
        with self.target.without_autograd(), self.step.active():
            for _ in self._begin(request, seeds, clock, scores, reuse_cache=reuse_cache):
                pass
        clock.pause()
        return gather_output(request, scores, clock.stats)

    def _begin(
        self,
        request: Request,
        seeds: Tensor | None,
        clock: PhaseClock,
        scores: EmittedScores,
        *,
        reuse_cache: bool,
        records_probabilities: bool = False,
    ) -> Iterator[list[StepTokens]]:
        """Reads the prompts; the steps of the call, as in `Engine.run`."""
        if self.learner is not None:
            self.learner.swap()
            for row in request.rows:
                row.states = TextStates(self.learner.see)
        clock.start()
        state, hit = self._get_state(request, reuse_cache=reuse_cache)
        engine = Engine(self.step, state, clock, planner=self.planner, records_probabilities=records_probabilities)
        reading = prefill(
            state,
            self.step,
            request.rows,
            clock.stats,
            source=request.source,
            media=request.media,
            hit=hit,
            may_wait=self.planner is not None,
        )
        del hit  # with an earlier call's cache
        read = finish(reading)
        del reading
        clock.stop("prefill")
        sampler = Sampler.of_request(request, seeds, state.history, vocab_size=self.target.vocab_size)
        keeps_scores = request.keeps_scores or request.keeps_logits
        return engine.run(read, sampler, scores if keeps_scores else None)

    def stream(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        reuse_cache: bool = False,
        **options: Any,
    ) -> TokenStream:
        """`generate` of one row, step by step: `for tokens in decoder.stream(...)`, or `async for`. Each step's list of
        tokens also tells which of them were drafted (`StepTokens`).

        Arguments and errors are those of `generate`, without `streamer`. The decoder is busy until the stream is read
        to its end, closed or dropped.
        """
        if options.pop("streamer", None) is not None:
            raise ValueError("streamer is for generate(): a stream hands out the tokens itself; leave it out")
        with self._take() as busy:
            clock = self._new_clock()
            request = make_request(self.target, input_ids, attention_mask, **options)
            if request.batch_size > 1:
                raise ValueError(
                    f"a stream has one row, and this call has {request.batch_size} (rows of input_ids, times "
                    "num_return_sequences): stream rows one by one, or generate() them together"
                )
            seeds = self._draw_seeds(request, seed, reuse_cache=reuse_cache)
            scores = EmittedScores(request)
            clock.pause()
            release = busy.pop_all().close
        # A stream that is over, and is kept for its output, must not keep the engine's buffers.
        gather = partial(gather_output, request, scores, clock.stats)
        begin = partial(self._begin, request, seeds, clock, scores, reuse_cache=reuse_cache, records_probabilities=True)
        return TokenStream(self._stream_steps(request, begin, clock, release), gather, release)

    def _stream_steps(
        self,
        request: Request,
        begin: Callable[[], Iterator[list[StepTokens]]],
        clock: PhaseClock,
        release: Callable[[], None],
    ) -> Iterator[StepTokens]:
        steps: Iterator[list[StepTokens]] | None = None
        try:
            while True:
                clock.start()
                # Inference mode belongs to a thread, so it is entered anew for every step.
                with self.target.without_autograd(), self.step.active():
                    steps = begin() if steps is None else steps
                    kept = next(steps, None)
                clock.pause()
                if kept is None:
                    return
                yield kept[0]
        finally:
            request.rows[0].end()
            release()

    def _new_clock(self) -> PhaseClock:
        return PhaseClock(GenerationStats(), self.target.device, is_synchronised=self.is_synchronised)

    def _take(self) -> ExitStack:
        """Makes this decoder busy until the stack is closed, which may happen more than once."""
        if not self._is_free.acquire(blocking=False):
            raise RuntimeError(
                "this Decoder is in the middle of another text (in another thread, or of a stream that was neither "
                "read to its end nor closed), and its cache belongs to that: close() the stream, or make another "
                "Decoder of the same Target and heads, which shares their weights"
            )
        busy = ExitStack()
        busy.callback(self._is_free.release)
        busy.callback(release_workers)
        if (learner := self.learner) is not None:
            learner.num_decoding += 1
            busy.callback(lambda: setattr(learner, "num_decoding", learner.num_decoding - 1))
        return busy

    def _draw_seeds(self, request: Request, seed: int | Sequence[int] | None, *, reuse_cache: bool) -> Tensor | None:
        """Refuses what cannot be decoded; the rows' seeds."""
        _check_switches(reuse_cache=reuse_cache)
        if reuse_cache:
            self._check_reuse(request)
        return row_seeds(seed, request.batch_size, self.target.device) if request.do_sample else None

    def _get_state(self, request: Request, *, reuse_cache: bool) -> tuple[DecodeState, PrefixHit | None]:
        """A state with room for the call, the present one where it is large enough; and the part of the prompts that
        the last call has left. From here on this decoder holds no text of an earlier call."""
        state, step = self._state, self.step
        num_slots = request.max_length + step.num_slots_after
        hit = None
        if state is not None and reuse_cache:
            room = min(num_slots, self.target.max_length or num_slots)
            # A first token is read once, and stays with its row.
            needs_all = self.drafter is not None and self.drafter.reads_first_token
            hit = match(state, request.prompts, room=room, needs_all=needs_all)
        if state is not None:
            most = state.cache.max_batch_size
            # With fixed shapes, strides of a larger cache would be another graph.
            has_rows = most == request.batch_size if step.runner.has_fixed_rows else most >= request.batch_size
            # A row's last step may go beyond its end, and so may the next one where finished rows stay.
            num_tokens = request.max_padded + 2 * step.path_width
            if not has_rows or state.cache.capacity < num_slots or state.capacity < num_tokens:
                self._state = state = None  # free the old one first
                step.runner.forget()
        if state is None:
            self._state = state = step.new_state(request.batch_size, num_slots, request.max_padded + step.path_width)
        return state, hit

    def _check_reuse(self, request: Request) -> None:
        if request.source is not None:
            raise ValueError(
                f"reuse_cache is for prompts, and {type(self.target.model).__name__} reads a source anew: leave it out"
            )
        if request.media is not None:
            raise ValueError(
                "reuse_cache compares token ids, which do not tell one image or sound from another: leave it out"
            )
        if self.drafter is not None and not self.drafter.can_copy_rows:
            raise ValueError(
                f"reuse_cache needs a drafter that can go on from an earlier text, and {type(self.drafter).__name__} "
                "cannot copy rows: implement Drafter.copy_rows, or leave reuse_cache out"
            )
        if not self.holds_text:
            logger.warning(
                "reuse_cache has nothing to reuse: this decoder holds no text yet (or a step of its last call was "
                "interrupted). Keep one Decoder for a conversation, and see Decoder.holds_text"
            )

    @property
    def holds_text(self) -> bool:
        """Whether the last call has left something in the cache for `reuse_cache`."""
        return self._state is not None and self._state.is_whole

    def costs(self, num_rows: int = 1, length: int = 256, *, do_sample: bool = False) -> list[float]:
        """What `tree="auto"` has learned of the costs of steps: plain ones first, then those with each candidate, as
        ratios. Before there were such steps they are guesses.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.

        Raises:
            ValueError: for a decoder with a fixed tree, or without a drafter.
        """
        if self.planner is None:
            found = "has no drafter" if self.policy is None else f"has a {type(self.policy).__name__}"
            raise ValueError(f"costs are learned with a drafter and tree='auto' or 'gamma'; this decoder {found}")
        return self.planner.costs(num_rows, length, do_sample=do_sample)


def _check_switches(**switches: object) -> None:
    for name, value in switches.items():
        also = {"compile": ", or a compiled Decoder,", "batch_invariant": ", or None,"}.get(name, "")
        other = {"compile": isinstance(value, Decoder), "batch_invariant": value is None}.get(name, False)
        if not (isinstance(value, bool) or other):
            raise TypeError(f"{name} is {value!r}; True or False{also} is expected")


def gather_output(request: Request, scores: EmittedScores, stats: GenerationStats) -> GenerationOutput:
    """The output so far."""
    stats.num_new_tokens = request.num_new_tokens
    stats.steps = [row.steps[1:] for row in request.rows]
    return GenerationOutput(request.sequences(), stats, scores.scores(), scores.logits())


def _resolve_policy(
    tree: TreeOption | None, target: Target, drafter: Drafter | None, rule: AcceptanceRule
) -> TreePolicy | None:
    if drafter is None:
        if tree is not None:
            raise ValueError(
                f"tree is {tree!r} but there is no drafter: pass heads, or leave tree out for plain decoding"
            )
        return None
    if tree is None:
        tree = _default_tree(target, drafter, rule)
    policy = resolve_policy(tree, drafter.max_depth)
    if drafter.drafts_chains_only and not policy.is_narrow:
        raise ValueError(
            f"tree is {tree!r}, and {type(drafter).__name__} drafts chains only: pass tree='chain', tree='gamma' or "
            "tree=chain(n)"
        )
    return policy


def _default_tree(target: Target, drafter: Drafter, rule: AcceptanceRule) -> str:
    """The size that decodes fastest here; a fixed one where texts, or other processes, would depend on the choice."""
    is_fixed = _is_split(target) or not rule.may_couple
    if drafter.drafts_chains_only or rule.draws_drafts:
        return "chain" if is_fixed else "gamma"
    return "dynamic" if is_fixed else "auto"


def _is_split(target: Target) -> bool:
    """Whether several processes hold parts of every layer (tensor parallelism)."""
    return (getattr(target.model, "_tp_size", None) or 1) > 1
