"""Messages as bytes: what comes out is what went in, and nothing but known classes is read."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from transformers.generation import logits_process as stock

from draftsmith.inference.distributed.messages import Answer, Prompt, Task, pack, unpack
from draftsmith.inference.request.processors import OccurrencePenaltiesLogitsProcessor

CPU, VOCAB = torch.device("cpu"), 8
PROCESSORS: tuple[Any, ...] = (
    stock.TopPLogitsWarper(0.8),
    stock.SuppressTokensLogitsProcessor([3, 5]),
    stock.RepetitionPenaltyLogitsProcessor(1.3, 2),
    stock.SequenceBiasLogitsProcessor({(3,): 1.5, (5, 4): -float("inf"), (numpy.int64(6),): 2.0}),
    stock.MinNewTokensLengthLogitsProcessor(3, 5, torch.tensor([2, 3])),
    OccurrencePenaltiesLogitsProcessor(presence=0.7, frequency=-1.5, prompt_length=2),
)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: type(one).__name__)
def test_processors_give_the_same_scores(processor: Any) -> None:
    """Before and after they were called: some prepare tensors in their first call."""
    text, scores = torch.tensor([[1, 3, 5, 4, 3, 5]]), torch.randn(1, VOCAB)
    for _ in range(2):
        received: Any = unpack(pack(Prompt([1], [1], 1, None, (processor,))), CPU)
        expected = processor(text, scores.clone())
        assert torch.equal(received.processors[0](text, scores.clone()), expected)


def test_tensors_go_to_the_receivers_own_device() -> None:
    for features in (torch.randn(2, 3).bfloat16(), torch.zeros(2, 0), torch.tensor([[True]])):
        answer = Answer(1, 5, [7, 8], features)
        received: Any = unpack(pack(answer), CPU)
        assert torch.equal(received.features, features)
        assert received.features.dtype == features.dtype
        assert unpack(pack(answer), torch.device("meta")).features.is_meta  # type: ignore[union-attr]
    assert unpack(pack(Task(1, 4, 5, [7, 8])), CPU) == Task(1, 4, 5, [7, 8])


UNKNOWN = b'["Shell", [["command", "true"]]]'


@pytest.mark.parametrize(
    "data", [b"", b"no message", pack(Task(1, 2, 3, []))[:-3], len(UNKNOWN).to_bytes(8, "little") + UNKNOWN]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message cannot be read"):
        unpack(data, CPU)
