"""DistributedDecoder: rank 0 of distributed speculative inference."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Self

from torch import Tensor, nn

from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.coordinator import Coordinator
from draftsmith.inference.distributed.drafting import ChainDrafting
from draftsmith.inference.distributed.gloo_link import GlooLink
from draftsmith.inference.distributed.messages import Greeting, Prompt
from draftsmith.inference.distributed.timeline import Timeline
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.engine import GenerationOutput, StepTokens
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.prefill import finish, prefill
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.request import Request
from draftsmith.inference.request.row import Row
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Step
from draftsmith.inference.streaming.streamers import ending
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.static import chain as chain_policy


class DistributedDecoder:
    """Drafts on rank 0 while the other ranks verify. Texts are those of `generate(target, None, ...)`.

        with DistributedDecoder(model, drafter) as decoder:   # on rank 0; the other ranks: serve_target(model)
            output = decoder.generate(input_ids, max_new_tokens=64)

    Rank 0 holds the target too: heads use its embedding and LM head, and it reads each prompt for the drafter.
    Acceptance is exact. Texts are decoded one at a time.

    Args:
        target: a frozen causal LM of transformers, or a `Target`.
        drafter: any `Drafter`.
        lookahead: drafts that wait before a free server verifies them; None = chosen from measured times.
        max_ahead: the most drafts after the committed text. The drafter's buffers hold twice as many.
        timeout: seconds to wait for a server's answer.
        link: another decoder's `link`, whose servers then serve both, one text at a time; None = make one.

    Raises:
        TypeError: `drafter` is no `Drafter`.
        ValueError: numbers below 1, an encoder-decoder target, a drafter that does not fit the target, no servers, or
            servers with another model.
        RuntimeError, TimeoutError: a server has died or does not answer.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        drafter: Drafter,
        *,
        lookahead: int | None = None,
        max_ahead: int = 32,
        timeout: float = 300.0,
        link: GlooLink | None = None,
    ) -> None:
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafter is {type(drafter).__name__}; a Drafter is expected, since rank 0 drafts")
        if max_ahead < 1 or (lookahead is not None and lookahead < 1):
            raise ValueError(f"lookahead is {lookahead} and max_ahead {max_ahead}: give 1 or more drafts")
        self.target = Target.of(target).prefer_batch_invariant(warns=False)
        if self.target.is_encoder_decoder:
            raise ValueError(
                f"{type(self.target.model).__name__} is an encoder-decoder model, and servers are given no sources: "
                "use generate"
            )
        self.target.refuse_recurrent("servers cannot cut their caches back to any length", "use generate")
        self.drafter = drafter.for_target(self.target)
        depth = 2 * max_ahead if self.drafter.max_depth is None else min(2 * max_ahead, self.drafter.max_depth)
        self._step = Step(self.target, self.drafter, chain_policy(depth))
        self.link = link or GlooLink(Greeting.of_target(self.target), timeout=timeout)
        self._coordinator = Coordinator(self.link, lookahead=lookahead, max_ahead=max_ahead, timeout=timeout)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> GenerationOutput:
        """Decodes one text. Arguments and errors are those of `Decoder.generate`.

        In the stats a verify step is a round: the drafts that were accepted one after the other, and the target's own
        token. `timeline` has the rest.

        Raises:
            ValueError: also for several rows, `output_scores`, `output_logits`, and processors that keep a state.
            RuntimeError, TimeoutError: a server has died or does not answer.
        """
        with ending(streamer):
            stream = self.stream(input_ids, attention_mask, seed=seed, streamer=streamer, **options)
            for _ in stream:
                pass
            return stream.output

    def stream(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> TokenStream:
        """`generate`, read while it is decoded, as `Decoder.stream`. Each list has the tokens that one answer commits;
        a depth is a draft's place among them, and drafters' probabilities are not known (NaN).

        Read the stream to its end, or close it, before the next call.
        """
        request = make_request(self.target, input_ids, attention_mask, **options)
        request.check_plain("distributed decoding")
        if request.batch_size > 1:
            raise ValueError(f"texts are decoded one at a time, and this call has {request.batch_size} rows")
        seeds = row_seeds(seed, 1, self.target.device).tolist() if request.do_sample else [None]
        prompt = Prompt.of_request(request, seeds[0], self.drafter.feature_layers)
        clock = PhaseClock(GenerationStats(), self.target.device)
        clock.pause()
        steps = self._stream_steps(self._steps(request, prompt, clock), clock)
        return TokenStream(steps, lambda: GenerationOutput(request.sequences(), clock.stats), lambda: None)

    def _stream_steps(self, steps: Iterator[StepTokens], clock: PhaseClock) -> Iterator[StepTokens]:
        with closing(steps):  # type: ignore[type-var]  # a generator
            while True:
                clock.start()
                with self.target.without_autograd():
                    kept = next(steps, None)
                clock.pause()
                if kept is None:
                    return
                yield kept

    def _steps(self, request: Request, prompt: Prompt, clock: PhaseClock) -> Iterator[StepTokens]:
        """Yields what the prompt and each answer commit."""
        (row,) = request.rows
        if request.streamer is not None:
            request.streamer.put(request.given_ids.cpu())
        state = self._step.new_state(1, request.max_length + self._step.num_slots_after, request.max_padded)
        sampler = prompt.make_sampler(self.target, state.cache.capacity)
        self._coordinator.begin(prompt)
        read = finish(prefill(state, self._step, request.rows, clock.stats))
        first = self._step.first(state, read, sampler)
        clock.stop("prefill")
        new = StepTokens(first.emitted[0, :1].tolist())
        kept = new.cut(self._emit(row, new))
        chain = DraftChain(row.text)
        if read.features is not None:
            chain.features[chain.root - 1] = read.features[0, 0]
        drafting = ChainDrafting(self._step, sampler, state, len(prompt.token_ids))
        del read, first
        try:
            yield kept
            if row.is_finished:
                return
            for committed in self._coordinator.run(chain, drafting.draft, request.max_length):
                has_own = chain.num_accepted == 0  # the round has ended
                step = StepTokens(committed, [math.nan] * (len(committed) - has_own))
                yield step.cut(self._emit(row, committed))
                if row.is_finished:
                    return
        finally:
            self._count(clock.stats, request, chain)

    @staticmethod
    def _emit(row: Row, tokens: Sequence[int]) -> int:
        num_kept = row.emit(tokens)
        row.check()
        return num_kept

    def _count(self, stats: GenerationStats, request: Request, chain: DraftChain) -> None:
        for accepted in chain.round_lengths:
            stats.count_step(accepted)
        stats.steps = [[1 + accepted for accepted in chain.round_lengths]]
        stats.num_new_tokens = request.num_new_tokens
        stats.num_drafted = self.timeline.num_drafted
        stats.num_verify_passes = len(self.timeline.verifications)
        stats.num_target_forwards += stats.num_verify_passes
        stats.seconds["draft"] = self.timeline.draft_seconds

    @property
    def timeline(self) -> Timeline:
        """Who verified what and when, in the last call."""
        return self._coordinator.timeline

    def close(self) -> None:
        """Ends the servers' `serve_target`, also for other decoders with this link."""
        self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
