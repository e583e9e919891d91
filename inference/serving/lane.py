"""Lane: rows that share a drafter, a tree and a state, and so every pass. Rows join and leave between steps.

A joining row's prompt is read in a state of its own, so that running rows wait for one chunk at most. Then it joins the
others (`DecodeState.add`). A step serves all rows, whatever their sampling options are: each row keeps its own settings
and seed (`Sampler.join`), so its text is the one it would get by itself.
"""

import time
from collections.abc import Generator

import torch

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.engine import Engine, StepTokens
from draftsmith.inference.learning import TextStates
from draftsmith.inference.prefill import MIN_SHARED, prefill
from draftsmith.inference.prefix_cache import PrefixHit, match
from draftsmith.inference.serving.reply import DraftedStep, Reply, ReplyToken
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import StepOutput

# States in which prompts are read. Each keeps its prompt until it is needed for another one, so that a prompt that
# begins alike reads only the rest; one would forget a conversation whenever another prompt comes in between.
NUM_READERS = 2


class Lane:
    """The rows of one drafter and tree.

    Args:
        decoder: with exact acceptance, whose drafter can copy rows, and without graphs.
        max_rows: the most rows that run at once.
        max_length: the most tokens of a row, prompt included.

    Attributes:
        replies: those that are running.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int, max_length: int) -> None:
        self.step, self.planner, self.learner = decoder.step, decoder.planner, decoder.learner
        if not self.step.rows_may_leave:
            raise ValueError(
                f"rows join and leave a served batch, and {type(decoder.drafter).__name__} cannot copy rows (or the "
                "decoder has graphs): implement Drafter.copy_rows, keep_rows and add_rows, or use another drafter"
            )
        self.max_rows = max_rows
        # A row's last step may go beyond its end.
        sizes = max_length + self.step.num_slots_after + self.step.path_width, max_length + self.step.path_width
        clock = PhaseClock(GenerationStats(), self.step.target.device)
        states = [self.step.new_state(num_rows, *sizes) for num_rows in (max_rows, *[1] * NUM_READERS)]
        self._engine = Engine(self.step, states[0], clock, planner=self.planner, records_probabilities=True)
        self._readers = states[1:]  # the one that was used longest ago first
        self.replies: list[Reply] = []
        self.last_used = time.perf_counter()

    @property
    def num_bytes(self) -> int:
        """Of the target's keys and values, for all rows and prompts."""
        cache = self._engine.state.cache
        planes = [plane for spec in cache.layer_specs if spec for plane in (spec.keys, spec.values)]
        per_slot = sum(plane.num_heads * plane.width * plane.dtype.itemsize for plane in planes)
        return per_slot * cache.capacity * (self.max_rows + NUM_READERS)

    def join(self, reply: Reply) -> Generator[int]:
        """Reads a reply's prompt, emits its first token, and adds the row to the others unless it has ended. Yields the
        size of each chunk after it was read; other rows may join, leave and step in between, one such call at a
        time."""
        reading = self._read(reply)
        while True:
            with self.step.active():  # not while others step
                size = next(reading, None)
            if size is None:
                return
            yield size

    def _read(self, reply: Reply) -> Generator[int]:
        reply.started = time.perf_counter()
        if self.learner is not None and reply.may_learn:
            reply.row.states = TextStates(self.learner.see)
        hit = self._find_hit(reply.prompt)
        state = self._readers.pop(0)
        self._readers.append(state)
        clock = PhaseClock(GenerationStats(), self.step.target.device)
        read = yield from prefill(state, self.step, [reply.row], clock.stats, hit=hit)
        sampler = Sampler.of_request(
            reply.request, reply.row_seed, state.history, vocab_size=self.step.target.vocab_size
        )
        emission = Engine(self.step, state, clock).start(read, sampler)
        for place, _, _, kept in emission.given:  # none of a reply that was cancelled
            reply.publish(self._tokens_of(reply, place, emission.output, kept))
        if not reply.is_over:
            self._engine.add(state, sampler)
            self.replies.append(reply)

    def _find_hit(self, prompt: list[int]) -> PrefixHit | None:
        """The longest beginning of the prompt that is held somewhere, if it saves enough."""
        states = [*([self._engine.state] if self.replies else []), *self._readers]
        room = min(self._readers[0].cache.capacity, self.step.target.max_length or self._readers[0].cache.capacity)
        hits = [match(state, [prompt], room=room, least=MIN_SHARED) for state in states]
        return max((hit for hit in hits if hit is not None), key=lambda hit: hit.num_cached[0], default=None)

    def advance(self) -> None:
        """One step of all rows; those that have ended leave."""
        self.last_used = time.perf_counter()
        replies = {reply.row: reply for reply in self.replies}
        with self.step.active():
            emission = self._engine.advance()
        depths = emission.output.tree.measure_depths()
        for place, row, new, kept in emission.given:
            reply = replies[row]
            reply.stats.count_step(len(new) - 1)
            num_drafted = emission.widths[place] - 1
            reply.stats.num_drafted += num_drafted
            if num_drafted:
                reply.drafts.append(DraftedStep(depths[place], num_drafted, len(new) - 1))
            reply.publish(self._tokens_of(reply, place, emission.output, kept))
        self._forget_ended()

    def _tokens_of(self, reply: Reply, place: int, output: StepOutput, new: StepTokens) -> list[ReplyToken]:
        """A row's tokens, with what the request wants to know of them."""
        told = (new, reply.added, new.depths, new.probabilities)
        if reply.num_top is None or not new:
            return [ReplyToken(*each) for each in zip(*told, strict=True)]
        path = output.accepted.path[place, : len(new)]
        log_probs = output.target.logits[place, path].float().log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(new, device=path.device)[:, None])[:, 0].tolist()
        values, ids = (part.tolist() for part in log_probs.topk(reply.num_top, dim=-1))
        tops = [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
        return [ReplyToken(*each) for each in zip(*told, own, tops, strict=True)]

    def drop_replies(self) -> None:
        """Rows of replies that have been cancelled leave."""
        self._engine.settle_rows()
        self._forget_ended()

    def _forget_ended(self) -> None:
        going = [reply for reply in self.replies if not reply.is_over]
        if len(going) == len(self.replies):
            return
        self.replies = going
        if not going:
            self._engine.state.rows.clear()
