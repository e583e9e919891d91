"""Decoder: one target and one drafter, and the buffers they decode with.

Legend: B batch, L prompt length.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from inference.acceptance.exact import Sampler
from inference.acceptance.rules import AcceptanceRule, resolve_rule
from inference.cache.tree_cache import TreeCache
from inference.drafters.base import Drafter
from inference.execution.step import DecodeStep
from inference.loop import DecodeLoop, GenerationOutput, StepCallback, gather_output, rows_may_leave
from inference.noise import row_seeds
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_measurement import find_costs
from inference.planning.cost_model import BatchCosts, CostModel
from inference.planning.drafting import AdaptiveDrafting, Drafting, FixedDrafting
from inference.planning.tree_planner import TreePlanner
from inference.prompts import HeldTexts, PromptReader, ReadPrompts, leave_room
from inference.request.generate_arguments import make_request
from inference.request.processors import PREFIX_FREE
from inference.request.request import Request
from inference.stats import GenerationStats, PhaseClock
from inference.streaming.token_stream import TokenStream
from inference.targets.target import Target
from inference.trees.policy import TreePolicy, resolve_policy


class Decoder:
    """Decodes with one target and one drafter; keeps its buffers from call to call.

    One text (or batch) at a time: threads take a decoder each. Decoders of the same target and heads share their
    weights, and may run at the same time.

    Args:
        target: a frozen causal LM or encoder-decoder model of transformers, or a `Target`.
        drafter: trained heads, any other `Drafter`, or None for plain decoding on the same stack.
        tree: "dynamic" (EAGLE-2, the default), "auto" (EAGLE-2's kind, of the size that pays, chosen at every
            step), "chain", "gamma" (a chain of the length that pays, chosen likewise), a tree file, a list of rank
            paths, or a `TreePolicy`.
        acceptance: "exact" (the default), "rejection" (Leviathan et al.; siblings without replacement),
            "block_verification" (of chains), "typical" (Medusa; lossy), or an `AcceptanceRule`. For a greedy target all
            are the first one. Sampled, "rejection" and "block_verification" keep the target's distribution, but their
            texts depend on what is drafted.
        is_coupled: at temperature > 0 and with exact acceptance, let the drafter read the target's own Gumbel noise
            (more is accepted; the text is the same either way).
        is_synchronised: wait for the accelerator at every phase boundary, so that `stats.seconds` splits time truly.
        compile: compile drafting, verification, acceptance and commits with torch.compile. The first steps of a process
            then take tens of seconds (`stats.seconds["compile"]`); numbers are rounded differently than in the eager
            model, so near-ties may fall otherwise. Weights, and which adapters are switched on, are read when a graph
            is made: make a new decoder after a change.

    With exact acceptance the text depends on the target and the seed alone: not on the drafter, the tree or the other
    rows of the batch.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        drafter: Drafter | None = None,
        *,
        tree: TreePolicy | str | Sequence[Sequence[int]] | None = None,
        acceptance: AcceptanceRule | str = "exact",
        is_coupled: bool = True,
        is_synchronised: bool = False,
        compile: bool = False,  # noqa: A002
    ) -> None:
        if isinstance(drafter, (str, os.PathLike)):
            raise TypeError(
                f"drafter is {drafter!r}; a drafter, or None, is expected: load a folder of heads with "
                "heads.DraftHeads.from_pretrained"
            )
        self.target = Target.of(target)
        drafter = self.drafter = drafter if drafter is None else drafter.for_target(self.target)
        self.is_coupled = is_coupled
        self.is_synchronised = is_synchronised
        self.policy: TreePolicy | None = None
        if drafter is not None:
            self.policy = resolve_policy(tree, drafter.max_depth)
            if drafter.drafts_chains_only and not self.policy.is_narrow:
                raise ValueError(
                    f"tree is {'dynamic, the default' if tree is None else repr(tree)}, and {type(drafter).__name__} "
                    "drafts chains only: pass tree='chain', tree='gamma' or tree=chain(n)"
                )
        elif tree is not None:
            raise ValueError(
                f"tree is {tree!r} but there is no drafter: pass heads, or leave tree out for plain decoding"
            )
        rule = resolve_rule(acceptance)
        rule.check(self.policy)
        self._step = DecodeStep(self.target, drafter, self.policy, is_coupled=is_coupled, compile=compile, rule=rule)
        self._cache: TreeCache | None = None
        self._held: HeldTexts | None = None  # what the last call has left in the cache
        self._is_free = threading.Lock()
        self._costs: dict[tuple[Any, ...], CostModel] = {}  # by batch size and way to draw
        self._planner: TreePlanner | None = None
        if isinstance(self.policy, AutoTree):
            self._planner = TreePlanner(self.policy)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        reuse_cache: bool = False,
        streamer: Any = None,
        on_step: StepCallback | None = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> GenerationOutput:
        """Generates through transformers' own `generate`: its config, processors and stopping criteria mean what they
        do there.

        Args:
            input_ids: [B, L] int64; for an encoder-decoder target, the sources.
            attention_mask: [B, L], 0 on padding, left or right; without it transformers takes pad tokens for padding,
                but not in sources.
            seed: one integer (row b uses hash(seed, b)), one per row, or None to draw from torch's global generator.
            reuse_cache: do not read again what this decoder's last call has left in its cache of the prompts'
                beginnings: a conversation goes on, or every row begins with the same instructions. The text is the
                same up to rounding (its keys and values may come from a pass over other rows). Of rows that ended
                before others nothing is left. Whoever changes weights or adapters in between leaves it out.
            streamer: a transformers streamer (batch 1); receives every token as it is emitted, and its end also when
                a step fails.
            on_step: called after every step of a batch of 1 with the tokens kept and how many of them were drafted.
            tokenizer, stop_strings: as in transformers; `token_healing` needs the tokenizer, too.
            **generate_kwargs: those of transformers' `generate` (max_new_tokens, do_sample, temperature, ...); the
                result is a `GenerationOutput` whatever `return_dict_in_generate` says. Stopping criteria are asked
                behind every token, with `scores=None`.

        Raises:
            ValueError: for an empty or too long prompt, ids the target does not have, beams, and options this loop
                does not have, each with the cure; when no token can be picked (NaN, or everything is forbidden).
            RuntimeError: while this decoder is in the middle of another text.
        """
        stats = GenerationStats()
        with self._alone():
            clock = self._new_clock(stats)
            request = make_request(
                self.target,
                input_ids,
                attention_mask,
                streamer=streamer,
                tokenizer=tokenizer,
                stop_strings=stop_strings,
                generate_kwargs=generate_kwargs,
            )
            if on_step is not None and request.batch_size > 1:
                raise ValueError(f"on_step is called for a batch of 1, and this one has {request.batch_size} rows")
            loop = self._begin(request, seed, stats, clock, reuse_cache=reuse_cache, on_step=on_step)
            with (
                _streaming(streamer, request),
                self._holding(loop),
                self.target.without_autograd(),
                self._step.active(),
            ):
                for _ in loop.steps():
                    pass
            clock.pause()
        return loop.output()

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        reuse_cache: bool = False,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> TokenStream:
        """`generate` of one row, step by step: `for tokens in decoder.stream(...)`, or `async for`.

        Arguments and errors are those of `generate`. The decoder is taken until the stream is read to its end, closed
        or dropped.
        """
        for name in ("streamer", "on_step"):
            if generate_kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} is for generate(): a stream hands out the tokens itself; leave it out")
        if input_ids.dim() == 2 and input_ids.shape[0] > 1:
            raise ValueError(
                f"a stream has one row, and input_ids has {input_ids.shape[0]}: stream rows one by one, or generate() "
                "them together"
            )
        stats = GenerationStats()
        release = self._take()
        try:
            clock = self._new_clock(stats)
            request = make_request(
                self.target,
                input_ids,
                attention_mask,
                tokenizer=tokenizer,
                stop_strings=stop_strings,
                generate_kwargs=generate_kwargs,
            )
            if request.batch_size > 1:
                raise ValueError(
                    f"a stream has one row, and num_return_sequences makes {request.batch_size}: leave it out"
                )
            loop = self._begin(request, seed, stats, clock, reuse_cache=reuse_cache)
            clock.pause()
        except BaseException:
            release()
            raise

        def steps() -> Iterator[list[int]]:
            try:
                with self._holding(loop):
                    running = loop.steps()
                    while True:
                        clock.start()
                        kept = self._advance(running)
                        clock.pause()
                        if kept is None:
                            return
                        yield kept[0]
            finally:
                release()

        # A stream that is over, and is kept for its output, must not keep the loop's buffers.
        return TokenStream(steps(), partial(gather_output, loop.request, loop.scores, loop.stats), release)

    def _new_clock(self, stats: GenerationStats) -> PhaseClock:
        return PhaseClock(stats, self.target.device, is_synchronised=self.is_synchronised)

    def _take(self) -> Callable[[], None]:
        """Makes this decoder busy; returns what ends that, and may be called more than once."""
        if not self._is_free.acquire(blocking=False):
            raise RuntimeError(
                "this Decoder is in the middle of another text (in another thread, or of a stream that was neither "
                "read to its end nor closed), and its cache belongs to that: close() the stream, or make another "
                "Decoder of the same Target and heads, which shares their weights"
            )
        return _once(self._is_free.release)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        release = self._take()
        try:
            yield
        finally:
            release()

    @contextmanager
    def _holding(self, loop: DecodeLoop) -> Iterator[None]:
        """What the loop leaves behind is there for the next call, unless a step was interrupted."""
        self._held = None
        try:
            yield
        finally:
            self._held = loop.held_texts()

    def _advance(self, steps: Iterator[list[list[int]]]) -> list[list[int]] | None:
        """One step. Inference mode belongs to a thread, so it is entered anew for every step."""
        with self.target.without_autograd(), self._step.active():
            return next(steps, None)

    def _begin(
        self,
        request: Request,
        seed: int | Sequence[int] | None,
        stats: GenerationStats,
        clock: PhaseClock,
        *,
        reuse_cache: bool,
        on_step: StepCallback | None = None,
    ) -> DecodeLoop:
        step, prompts = self._step, request.prompts
        held, self._held = self._held, None
        if reuse_cache and request.source is not None:
            raise ValueError(
                f"reuse_cache is for prompts, and {type(self.target.model).__name__} reads a source anew: leave it out"
            )
        if reuse_cache and self.drafter is not None and not self.drafter.can_copy_rows:
            raise ValueError(
                f"reuse_cache needs a drafter that can go on from an earlier text, and {type(self.drafter).__name__} "
                "cannot copy rows (Drafter.copy_rows): add it, or leave reuse_cache out"
            )
        rows, kept = held.match(prompts) if held is not None and reuse_cache else ([], [])
        capacity = request.max_length + step.num_slots_behind
        if kept:
            kept = leave_room(kept, prompts, min(capacity, self.target.max_length or capacity))
        # A first token is read once, and stays with its row.
        is_held = any(kept) and (min(kept) > 0 or not (self.drafter is not None and self.drafter.reads_first_token))
        if held is None or not is_held:
            held = None  # with its cache, which may have to make room for another
            cache = self._get_cache(request.batch_size, capacity)

            def read_prompts(reader: PromptReader, cache: TreeCache) -> tuple[ReadPrompts, Any]:
                return reader.read(cache, prompts, request.source)

        else:
            is_in_place = rows == list(range(held.cache.batch_size)) and held.cache.capacity >= capacity
            cache = held.cache if is_in_place else self._step.new_cache(request.batch_size, capacity)
            self._cache = cache

            def read_prompts(reader: PromptReader, cache: TreeCache) -> tuple[ReadPrompts, Any]:
                nonlocal held
                assert held is not None
                state = reader.take_over(held, cache, rows, kept)
                held = None  # what it held is in the new cache and state, and is let go
                return reader.read_rest(cache, state, prompts, kept), state

        clock.start()
        sampler = Sampler(
            request.processors,
            do_sample=request.do_sample,
            row_seeds=row_seeds(seed, request.batch_size, self.target.device) if request.do_sample else None,
            eos_token_ids=request.eos_token_ids,
            keeps_scores=request.keeps_scores,
        )
        return DecodeLoop(
            step,
            request,
            sampler,
            cache,
            stats,
            clock,
            begin_drafting=self._begin_drafting,
            read_prompts=read_prompts,
            on_step=on_step,
        )

    def costs(self, batch_size: int = 1, *, do_sample: bool = False, processors: Sequence[Any] = ()) -> CostModel:
        """What `tree="auto"` decides with: measured when first asked for, then kept in a file (`cost_model.py`).

        Args:
            processors: logits processors of transformers; those that read the prefix are left out.

        Raises:
            ValueError: for a decoder with another tree.
        """
        if not isinstance(self.policy, AutoTree):
            raise ValueError(f"costs are measured for tree='auto', and this decoder's tree is {self.policy!r}")
        processors = [processor for processor in processors if type(processor) in PREFIX_FREE]
        key = (batch_size, do_sample, *map(type, processors))
        if key not in self._costs:
            seeds = row_seeds(0, batch_size, self.target.device) if do_sample else None
            sampler = Sampler(processors, do_sample=do_sample, row_seeds=seeds)
            with self.target.without_autograd(), self._step.active():
                self._costs[key] = find_costs(self._step, self.policy, batch_size, sampler)
        return self._costs[key]

    def _begin_drafting(self, cache: TreeCache, sampler: Sampler, state: Any) -> Drafting:
        if self._planner is None or not isinstance(self.policy, AutoTree):
            return FixedDrafting(self._step, state)
        # Rows that leave leave one row at last; what lies between is interpolated.
        batch_sizes = {cache.batch_size, 1} if rows_may_leave(self._step) else {cache.batch_size}
        costs = {
            size: self.costs(size, do_sample=sampler.do_sample, processors=sampler.processors) for size in batch_sizes
        }
        return AdaptiveDrafting(self._step, self.policy, self._planner, BatchCosts(costs), state, cache.batch_size)

    def _get_cache(self, batch_size: int, capacity: int) -> TreeCache:
        cache = self._cache
        if cache is None or cache.max_batch_size != batch_size or cache.capacity < capacity:
            self._cache = cache = None  # free the old one first
            self._cache = cache = self._step.new_cache(batch_size, capacity)
        return cache


@contextmanager
def _streaming(streamer: Any, request: Request) -> Iterator[None]:
    """Gives the streamer the prompt; ends it also when a step fails, or who reads from it would wait for ever."""
    if streamer is None:
        yield
        return
    streamer.put(request.given_ids.cpu())
    try:
        yield
    except BaseException:
        if not request.is_finished:
            streamer.end()
        raise


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call` at its first call, and does nothing at the others."""
    waiting = [call]

    def call_first() -> None:
        if waiting:
            waiting.pop()()

    return call_first
