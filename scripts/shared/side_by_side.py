"""Records the same reply decoded plainly and with a drafter: the time of each token, and both speeds."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder

REPEATS = 5  # recordings of each decoder, in turns; the recording of median duration is kept


@dataclass
class Step:
    """One step: seconds since the call, its tokens, and how many of them were drafted."""

    seconds: float
    token_ids: list[int]
    num_drafted: int


@dataclass
class Recording:
    """One reply. seconds: of the whole call, the prompt's pass included."""

    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    acceptance_length: float = 1.0

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


def record(decoder: Decoder, input_ids: Tensor, **options: Any) -> Recording:
    """Decodes once. input_ids: [1, L] int64."""
    start = time.perf_counter()
    stream = decoder.stream(input_ids, torch.ones_like(input_ids), **options)
    steps = [Step(time.perf_counter() - start, list(tokens), tokens.num_drafted) for tokens in stream]
    return Recording(steps, time.perf_counter() - start, stream.output.stats.acceptance_length)


def record_side_by_side(
    plain: Decoder, drafting: Decoder, input_ids: Tensor, *, repeats: int = REPEATS, **options: Any
) -> list[Recording]:
    """One recording of each decoder. Both are warmed up first, then take turns."""
    decoders = (plain, drafting)
    for decoder in decoders:
        for _ in range(2):  # the first call compiles, the second one compiles for other lengths of the cache
            record(decoder, input_ids, **options)
    turns = [[record(decoder, input_ids, **options) for decoder in decoders] for _ in range(repeats)]
    return [sorted(column, key=lambda one: one.seconds)[(repeats - 1) // 2] for column in zip(*turns, strict=True)]
