"""Held-out prompts decoded with the trained heads: which tokens of the replies were drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from inference import Decoder, GenerationStats
from inference.streaming.detokenizer import IncrementalDetokenizer
from training.run.evaluation import AcceptanceMeter
from training.run.whole_heads import whole_heads


@dataclass(frozen=True)
class Piece:
    """Text of one or more tokens that were all drafted and accepted, or all the target's own."""

    text: str
    is_drafted: bool


@dataclass(frozen=True)
class Example:
    """A prompt, and the reply that was decoded greedily."""

    prompt: str
    pieces: list[Piece]
    acceptance_length: float


def decode_examples(meter: AcceptanceMeter, tokenizer: Any, count: int) -> tuple[list[Example], GenerationStats]:
    """Decodes the first so many of the meter's prompts; returns them and what was counted over all of them. Every
    process does the same, so that targets that are split over them can be read."""
    decoder = Decoder(meter.target, whole_heads(meter.heads))
    examples, total = [], GenerationStats()
    for prompt in meter.prompts[:count]:
        collector = _Collector(tokenizer)
        input_ids = torch.tensor([prompt], device=meter.target.device)
        stats = decoder.generate(
            input_ids,
            torch.ones_like(input_ids),
            max_new_tokens=meter.max_new_tokens,
            do_sample=False,
            on_step=collector,
        ).stats
        text = str(tokenizer.decode(prompt, skip_special_tokens=False))
        examples.append(Example(text, collector.finish(), stats.acceptance_length))
        total += stats
    return examples, total


class _Collector:
    """An `on_step` callback that keeps the pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self.pieces: list[Piece] = []
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def __call__(self, token_ids: list[int], num_drafted: int) -> None:
        for index, token_id in enumerate(token_ids):
            self._add(self._detokenizer.add(token_id), is_drafted=index < num_drafted)

    def finish(self) -> list[Piece]:
        self._add(self._detokenizer.flush(), is_drafted=False)
        return self.pieces

    def _add(self, text: str, *, is_drafted: bool) -> None:
        if text and self.pieces and self.pieces[-1].is_drafted == is_drafted:
            self.pieces[-1] = Piece(self.pieces[-1].text + text, is_drafted)
        elif text:
            self.pieces.append(Piece(text, is_drafted))
