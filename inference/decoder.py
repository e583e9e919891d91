"""Decoder: one target and one drafter, and the buffers they decode with.

Legend: B batch, L prompt length.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from draftsmith.inference.acceptance.rules import AcceptanceRule, resolve_rule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.tree_cache import TreeCache
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.execution.captured import CapturedExecutor, cuda_graphs
from draftsmith.inference.execution.compiled import CompiledExecutor
from draftsmith.inference.execution.drafting import TreeChoice
from draftsmith.inference.execution.executor import Executor
from draftsmith.inference.execution.step import DecodeStep
from draftsmith.inference.loop import DecodeLoop, GenerationOutput, StepCallback, StepTokens, gather_output
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.planning.memory import memory_file
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.prompts import HeldTexts, PromptReader
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.request import Request
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.target import Target
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

            - "dynamic" (EAGLE-2, the default) or "dynamic:DEPTH,TOP_K,NODES", as "dynamic:5,6,24"
            - "auto": a dynamic tree of the size that decodes fastest, or none, chosen again every few steps
            - "chain" or "chain:LENGTH"
            - "gamma" or "gamma:LENGTH": a chain of the length that decodes fastest, or none
            - a YAML file with a static tree, a list of rank paths, or a `TreePolicy`
        acceptance: "exact" (the default), "rejection" (Leviathan et al.; siblings without replacement),
            "block_verification" (of chains), "typical" (Medusa; lossy), or an `AcceptanceRule`. A greedy target always
            gets "exact". When sampling, "rejection" and "block_verification" keep the target's distribution, but their
            texts depend on the drafts.
        is_coupled: at temperature > 0 and with exact acceptance, let the drafter read the target's own Gumbel noise.
            More drafts are accepted, and the text is the same either way.
        batch_invariant: compute every token's scores in the same way, bit by bit, in passes of any number of tokens and
            rows. Then drafted text equals plain text of this mode in bfloat16 and float16, too. A step takes
            some percent longer (`Target.batch_invariant`).
        is_synchronised: wait for the accelerator at every phase boundary, so that `stats.seconds` holds the true time
            of each phase.
        compile: compile drafting, verification, acceptance and commits with torch.compile. The first steps of a process
            then take a minute or more (`stats.seconds["compile"]`). Compiled numbers are rounded differently from the
            eager model's, so a near-tie may fall the other way. Weights and active adapters are read when a graph is
            made: make a new decoder after a change.
        pack_weights: keep a second copy of linear layers' weights, in the order in which oneDNN's kernels read them
            (float32 and bfloat16 on a CPU). It takes their memory once more. Targets beyond the processor's caches
            gain most (docs/benchmarks, Sizes). Weights are read when the decoder is made.
        graphs: capture drafting, verification, acceptance and commits as CUDA graphs. They run the eager kernels, and
            the third step of each size is the first that is captured. docs/gpu.md says what ran on a GPU. A part that
            cannot be captured runs eagerly, with a warning. It excludes `compile`.

    Raises:
        TypeError: `drafter` is no `Drafter`.
        ValueError: a tree that the drafter or the acceptance rule cannot use, a drafter that does not fit the target,
            weights that cannot be packed, or a target that cannot be batch-invariant.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        drafter: Drafter | None = None,
        *,
        tree: TreeOption = None,
        acceptance: AcceptanceRule | str = "exact",
        is_coupled: bool = True,
        batch_invariant: bool = False,
        is_synchronised: bool = False,
        compile: bool = False,  # noqa: A002
        pack_weights: bool = False,
        graphs: bool = False,
    ) -> None:
        if drafter is not None and not isinstance(drafter, Drafter):
            shown = drafter if isinstance(drafter, (str, os.PathLike)) else type(drafter).__name__
            raise TypeError(
                f"drafter is {shown!r}; a Drafter, or None, is expected: load a folder of heads with "
                "DraftHeads.from_pretrained, wrap a small model in SmallModelDrafter, or subclass Drafter"
            )
        self.target = Target.of(target).with_packed_weights() if pack_weights else Target.of(target)
        if batch_invariant:
            self.target = self.target.batch_invariant()
        self.drafter = None if drafter is None else drafter.for_target(self.target)
        self.policy = _resolve_policy(tree, self.drafter)
        self.is_synchronised = is_synchronised
        rule = resolve_rule(acceptance)
        rule.check(self.policy)
        executor = self._new_executor(compile=compile, graphs=graphs)
        self._step = DecodeStep(
            self.target, self.drafter, self.policy, is_coupled=is_coupled, rule=rule, executor=executor
        )
        self._choice = self._new_choice()
        self._cache: TreeCache | None = None
        self._held: HeldTexts | None = None  # texts of the last call in the cache
        self._is_free = threading.Lock()

    def _new_choice(self) -> TreeChoice:
        if self.policy is None or not self.policy.is_chosen:
            return TreeChoice(self.policy)
        runner, candidates = type(self._step.executor).__name__, self.policy.candidates
        file = memory_file(self.target, self.drafter, candidates, runner, is_coupled=self._step.is_coupled)
        return Planner(candidates, file, node_cost=NODE_COSTS.get(self.target.device.type, NODE_COSTS["cuda"]))

    def _new_executor(self, *, compile: bool, graphs: bool) -> Executor:  # noqa: A002
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
            return CapturedExecutor(cuda_graphs(self.target.device))
        if compile:
            return CompiledExecutor([m for m in (self.target.model, self.drafter) if isinstance(m, nn.Module)])
        return Executor()

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
        """Generates through transformers' own `generate`: its config, processors and stopping criteria mean the same as
        there. The result is always a GenerationOutput, also without `return_dict_in_generate`.

        Args:
            input_ids: [B, L] int64; for an encoder-decoder target, the sources.
            attention_mask: [B, L], 0 on padding, left or right. Without it transformers takes pad tokens for padding,
                but not in sources.
            seed: one integer (row b uses hash(seed, b)), one per row, or None to draw from torch's global generator.
            reuse_cache: skip the beginning of each prompt that the last call of this decoder left in its cache, such as
                the earlier turns of a conversation or common instructions. The text is the same up to rounding, since
                the keys and values may come from a pass over other rows. Rows that finished before others leave
                nothing. Do not use it after a change of weights or adapters.
            streamer: a transformers streamer (batch 1). It gets every emitted token; its `end` is always called, also
                when the call is refused.
            on_step: called after every step (batch 1) with the tokens kept and the number of drafted ones among them.
            tokenizer, stop_strings: as in transformers.
            **generate_kwargs: arguments of transformers' `generate` (max_new_tokens, do_sample, temperature, ...), and
                what a processor returns for images, videos and sounds (pixel_values, ...). Stopping criteria are called
                after every token, with `scores=None`.

        Raises:
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
                generate_kwargs=generate_kwargs,
            )
            if on_step is not None and request.batch_size > 1:
                raise ValueError(f"on_step is called for a batch of 1, and this one has {request.batch_size} rows")
            return self._run(request, seed, clock, reuse_cache=reuse_cache, on_step=on_step)

    def decode(self, request: Request, *, seed: int | Sequence[int] | None = None) -> GenerationOutput:
        """`generate` of a request that is ready (`draftsmith.inference.request`).

        Raises:
            RuntimeError: while this decoder is in the middle of another text.
        """
        with ending(request.streamer), self._take():
            return self._run(request, seed, self._new_clock(), reuse_cache=False)

    def _run(
        self,
        request: Request,
        seed: int | Sequence[int] | None,
        clock: PhaseClock,
        *,
        reuse_cache: bool,
        on_step: StepCallback | None = None,
    ) -> GenerationOutput:
        loop = self._begin(request, seed, clock, reuse_cache=reuse_cache, on_step=on_step)
        if request.streamer is not None:
            request.streamer.put(request.given_ids.cpu())
        with self._holding(loop):
            reader = self._open_prompts(loop, reuse_cache=reuse_cache)
            with self.target.without_autograd(), self._step.executor.active():
                for _ in loop.steps(reader):
                    pass
        clock.pause()
        return gather_output(loop.request, loop.scores, loop.stats)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        reuse_cache: bool = False,
        **options: Any,
    ) -> TokenStream:
        """`generate` of one row, step by step: `for tokens in decoder.stream(...)`, or `async for`. Each step's list of
        tokens also tells which of them were drafted (`StepTokens`).

        Arguments and errors are those of `generate`, without `streamer` and `on_step`. The decoder is busy until the
        stream is read to its end, closed or dropped.
        """
        for name in ("streamer", "on_step"):
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} is for generate(): a stream hands out the tokens itself; leave it out")
        with self._take() as busy:
            clock = self._new_clock()
            own = {name: options.pop(name, None) for name in ("tokenizer", "stop_strings")}
            request = make_request(self.target, input_ids, attention_mask, **own, generate_kwargs=options)
            if request.batch_size > 1:
                raise ValueError(
                    f"a stream has one row, and this call has {request.batch_size} (rows of input_ids, times "
                    "num_return_sequences): stream rows one by one, or generate() them together"
                )
            loop = self._begin(request, seed, clock, reuse_cache=reuse_cache)
            clock.pause()
            release = busy.pop_all().close
        # A stream that is over, and is kept for its output, must not keep the loop's buffers.
        gather = partial(gather_output, loop.request, loop.scores, loop.stats)
        return TokenStream(self._stream_steps(loop, release, reuse_cache=reuse_cache), gather, release)

    def _stream_steps(
        self, loop: DecodeLoop, release: Callable[[], None], *, reuse_cache: bool
    ) -> Iterator[StepTokens]:
        clock = loop.clock
        try:
            with self._holding(loop):
                clock.start()
                running = loop.steps(self._open_prompts(loop, reuse_cache=reuse_cache))
                while True:
                    clock.start()
                    # Inference mode belongs to a thread, so it is entered anew for every step.
                    with self.target.without_autograd(), self._step.executor.active():
                        kept = next(running, None)
                    clock.pause()
                    if kept is None:
                        return
                    yield kept[0]
        finally:
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
        return busy

    @contextmanager
    def _holding(self, loop: DecodeLoop) -> Iterator[None]:
        """Keeps the texts that the loop leaves in the cache for the next call, unless a step was interrupted."""
        try:
            yield
        finally:
            self._held = loop.held_texts()

    def _begin(
        self,
        request: Request,
        seed: int | Sequence[int] | None,
        clock: PhaseClock,
        *,
        reuse_cache: bool,
        on_step: StepCallback | None = None,
    ) -> DecodeLoop:
        if reuse_cache:
            self._check_reuse(request)
        seeds = row_seeds(seed, request.batch_size, self.target.device) if request.do_sample else None
        # A row's last step may go beyond its end, and so may the next one where finished rows stay.
        capacity = self._step.round_capacity(request.max_shown + 2 * self._step.num_depths)
        sampler = Sampler.of_request(request, seeds, capacity=capacity, vocab_size=self.target.vocab_size)
        return DecodeLoop(self._step, request, sampler, self._choice, clock, on_step=on_step)

    def _open_prompts(self, loop: DecodeLoop, *, reuse_cache: bool) -> PromptReader:
        """A reader of the prompts: with the cache to fill, and the beginnings that it holds already. From here on this
        decoder holds no text of an earlier call."""
        request = loop.request
        held, self._held = self._held, None
        capacity = request.max_length + self._step.num_slots_after
        reused = None
        if held is not None and reuse_cache:
            room = min(capacity, self.target.max_length or capacity)
            # A first token is read once, and stays with its row.
            needs_all = self.drafter is not None and self.drafter.reads_first_token
            reused = held.match(request.prompts, room=room, needs_all=needs_all)
        del held  # with its cache, which may have to make room for another
        cache = self._get_cache(request.batch_size, capacity)
        return PromptReader(self._step, cache, request.prompts, request.source, loop.stats, reused, media=request.media)

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
        if self._held is None:
            logger.warning(
                "reuse_cache has nothing to reuse: this decoder holds no text yet (or a step of its last call was "
                "interrupted). Keep one Decoder for a conversation, and see Decoder.holds_text"
            )

    @property
    def step(self) -> DecodeStep:
        """The parts of a step, for loops of their own."""
        return self._step

    @property
    def choice(self) -> TreeChoice:
        """Which tree the next step drafts, for loops of their own."""
        return self._choice

    @property
    def holds_text(self) -> bool:
        """Whether the last call has left something in the cache for `reuse_cache`."""
        return self._held is not None

    def costs(self, num_rows: int = 1, length: int = 256, *, do_sample: bool = False) -> list[float]:
        """What `tree="auto"` has learned of the costs of steps: plain ones first, then those with each candidate, as
        ratios. Before there were such steps they are guesses.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.

        Raises:
            ValueError: for a decoder with a fixed tree.
        """
        if not isinstance(self._choice, Planner):
            raise ValueError(
                "costs are learned with tree='auto' or 'gamma': give one of them; this decoder's tree is a "
                f"{type(self.policy).__name__}"
            )
        return self._choice.costs(num_rows, length, do_sample=do_sample)

    def _get_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """The present cache where it has room, else a new one."""
        cache = self._cache
        has_rows = cache is not None and cache.max_batch_size >= batch_size
        if cache is not None and self._step.executor.has_graphs:  # strides of a larger cache would be another graph
            has_rows = cache.max_batch_size == batch_size
        if cache is None or not has_rows or cache.capacity < capacity:
            self._cache = cache = None  # free the old one first
            self._step.executor.forget()
            self._cache = cache = self._step.new_cache(batch_size, capacity)
        return cache


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """Ends the streamer, also when the call is refused or a step fails: its reader would wait for ever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _resolve_policy(tree: TreeOption, drafter: Drafter | None) -> TreePolicy | None:
    if drafter is None:
        if tree is not None:
            raise ValueError(
                f"tree is {tree!r} but there is no drafter: pass heads, or leave tree out for plain decoding"
            )
        return None
    policy = resolve_policy(tree, drafter.max_depth)
    if drafter.drafts_chains_only and not policy.is_narrow:
        raise ValueError(
            f"tree is {'dynamic, the default' if tree is None else repr(tree)}, and {type(drafter).__name__} "
            "drafts chains only: pass tree='chain', tree='gamma' or tree=chain(n)"
        )
    return policy
