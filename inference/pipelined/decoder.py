"""PipelinedDecoder: decodes with a model whose groups of layers share their weights (SPEED, arXiv 2310.12072).

In such a model the token at position p can be in one group of layers while its successors are in earlier groups, and
one pass over the shared weights moves them all on. The successor is not known before p has left the last group, so it
is predicted from what leaves the first group. A prediction that the last group does not confirm is dropped with
everything after it. So the text is the target's own, and a step reads the weights of one group instead of all.

This is a loop of its own: what is verified here is in flight within the model, and a token tree is not.

Legend: B texts, G groups of K layers, T tokens of a segment, D hidden, V target vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.noise import gumbel_noise, row_seeds
from draftsmith.inference.pipelined.texts_in_flight import TextInFlight
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.processors import PREFIX_FREE
from draftsmith.inference.request.request import Request
from draftsmith.inference.streaming.streamers import ending
from draftsmith.inference.targets.layer_groups import LayerGroups
from draftsmith.inference.targets.target import Target

SEGMENTS_PER_GROUP = 4  # of a prompt: the groups are then idle for a fifth of its passes
LONGEST_SEGMENT = 512


@dataclass
class PipelineStats:
    """Counts of a call.

    Attributes:
        num_groups: G. Plain decoding of a token passes over the shared weights G times.
        num_passes: passes over the shared weights, those of the prompts included. A pass serves all texts.
        num_prompt_passes: the passes until every text had its first token.
        num_new_tokens: tokens returned, of all texts together.
        num_confirmed: predicted tokens that the last group confirmed.
        num_refuted: predicted tokens that it did not confirm; everything younger was dropped.
        num_dropped: tokens that had passed a group or more for nothing.
        seconds: wall-clock time.
    """

    num_groups: int
    num_passes: int = 0
    num_prompt_passes: int = 0
    num_new_tokens: int = 0
    num_confirmed: int = 0
    num_refuted: int = 0
    num_dropped: int = 0
    seconds: float = 0.0
    batch_size: int = 1

    @property
    def passes_per_token(self) -> float:
        """Passes for a token behind the first, of a batch of one; plain decoding needs G."""
        return (self.num_passes - self.num_prompt_passes) / max(1, self.num_new_tokens - self.batch_size)


@dataclass
class PipelinedOutput(ModelOutput):
    """sequences: [B, L + new] int64 as transformers' generate returns them. stats: the counts of the call."""

    sequences: Tensor
    stats: PipelineStats = field(default=None)  # type: ignore[assignment]


class PipelinedDecoder:
    """Decodes with a causal LM whose layers repeat (`tie_layers`). The text is the model's own, greedy and sampled.

    Args:
        target: a model of transformers, or a `Target`.

    Raises:
        ValueError: the layers do not repeat, or depend on their place.
    """

    def __init__(self, target: Target | nn.Module) -> None:
        self.target = Target.of(target)
        self.groups = LayerGroups(self.target)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> PipelinedOutput:
        """Arguments as for `Decoder.generate`.

        Raises:
            ValueError: as `Decoder.generate`; logits processors that read the text, such as a repetition penalty.
        """
        with ending(streamer):
            request = make_request(self.target, input_ids, attention_mask, streamer=streamer, **options)
            request.check_plain("pipelined decoding")
            if names := sorted({type(one).__name__ for one in request.processors if type(one) not in PREFIX_FREE}):
                raise ValueError(
                    f"{', '.join(names)} reads the text, and here several tokens of the text are predicted at once: "
                    "leave the option out, or decode with Decoder"
                )
            seeds = row_seeds(seed, request.batch_size, self.target.device) if request.do_sample else None
            sampler = Sampler(request.processors, do_sample=request.do_sample, row_seeds=seeds)
            started = time.perf_counter()
            if streamer is not None:
                streamer.put(request.given_ids.cpu())
            with self.target.without_autograd():
                stats = self._decode(request, sampler)
            stats.seconds = time.perf_counter() - started
            stats.num_new_tokens = request.num_new_tokens
            return PipelinedOutput(request.sequences(), stats)

    def _decode(self, request: Request, sampler: Sampler) -> PipelineStats:
        num_groups, device = self.groups.num_groups, self.target.device
        prompts = request.prompts
        longest = max(map(len, prompts))
        size = min(LONGEST_SEGMENT, -(-longest // (SEGMENTS_PER_GROUP * num_groups)))
        texts = [TextInFlight(prompt, num_groups, size) for prompt in prompts]
        stats = PipelineStats(num_groups, batch_size=len(texts))
        cache = self.groups.new_cache(len(texts) * num_groups, request.max_length + num_groups + size)
        left = torch.zeros((len(texts), num_groups, 1, self.target.hidden_size), dtype=self.target.dtype, device=device)
        longest = 0
        while not request.is_finished:
            running = [text for text, row in zip(texts, request.rows, strict=True) if not row.is_finished]
            counts = [[0 if s is None else len(s.token_ids) for s in text.groups] for text in texts]
            width = max(map(max, counts))
            left = self._run(texts, left, width, cache, longest)
            in_place = torch.tensor(counts, device=device)
            predicted, own = self._pick(sampler, texts, left, in_place)
            stats.num_passes += 1
            stats.num_prompt_passes += any(text.known == len(p) for text, p in zip(texts, prompts, strict=True))
            cache.advance(in_place.flatten())
            longest = max(longest, *(one.end for text in running for one in text.groups if one is not None))
            self._move(request, texts, predicted, own, cache, stats)
        for text in texts:
            stats.num_confirmed += text.num_confirmed
            stats.num_dropped += text.num_dropped
        return stats

    def _run(self, texts: list[TextInFlight], left: Tensor, width: int, cache: Any, longest: int) -> Tensor:
        """Runs all groups on their segments: [B, G, T, D], what leaves each, from what left each in the pass before."""
        rows = [[0] * width if t.groups[0] is None else [*t.groups[0].token_ids] for t in texts]
        entering = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.target.device)
        moved = nn.functional.pad(left[:, :-1], (0, 0, 0, max(0, width - left.shape[2])))[:, :, :width]
        hidden = torch.cat([self.groups.embed(entering)[:, None], moved], dim=1)
        return self.groups.run(hidden.flatten(0, 1), cache, longest).view(hidden.shape)

    def _pick(
        self, sampler: Sampler, texts: list[TextInFlight], left: Tensor, counts: Tensor
    ) -> tuple[list[int], list[int]]:
        """Each text's predicted next token behind the first group, and the target's own behind the last one. The noise
        belongs to the position, so a prediction is drawn with the noise of the token that it predicts."""
        ends = (counts - 1).clamp(min=0)[:, :, None, None].expand(-1, -1, 1, left.shape[-1])
        newest = left.gather(2, ends)[:, [0, -1], 0]  # [B, 2, D]
        logits = self.groups.score(newest)
        positions = [[0 if one is None else one.end for one in (t.groups[0], t.groups[-1])] for t in texts]
        scores = sampler.process(logits.flatten(0, 1)).view(logits.shape)
        noise = None
        if sampler.row_seeds is not None:
            noise = gumbel_noise(sampler.row_seeds, torch.tensor(positions, device=left.device), scores.shape[-1])
        picked = pick_token(scores, noise)
        predicted, own = picked.T.tolist()
        return predicted, own

    def _move(
        self,
        request: Request,
        texts: list[TextInFlight],
        predicted: list[int],
        own: list[int],
        cache: Any,
        stats: PipelineStats,
    ) -> None:
        """Moves all texts on, emits their tokens, and forgets the keys of dropped ones."""
        void_from = [cache.capacity] * len(texts)
        for number, (text, row) in enumerate(zip(texts, request.rows, strict=True)):
            if row.is_finished:
                continue
            emits = text.may_emit
            # A prediction is no token where scores are NaN; the target's own is refused by `emit`.
            if text.move(max(predicted[number], 0), own[number]):
                stats.num_refuted += 1
                void_from[number] = text.known - 1
            if emits:
                row.emit([own[number]])
                row.check()
            if row.is_finished:
                text.groups = [None] * len(text.groups)
        if min(void_from) < cache.capacity:
            limits = torch.tensor(void_from, device=cache.lengths.device).repeat_interleave(self.groups.num_groups)
            cache.lengths.copy_(torch.minimum(cache.lengths, limits))
