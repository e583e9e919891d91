"""Logits processors after their way to a server."""

import json
from typing import Any

import numpy
import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

from draftsmith.inference.distributed.processor_json import KNOWN, decode_processors, encode_processors

CPU = torch.device("cpu")
VOCAB, LENGTH = 12, 6
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (5,),
    "TopPLogitsWarper": (0.8,),
    "MinPLogitsWarper": (0.4,),
    "TopHLogitsWarper": (0.4,),
    "TypicalLogitsWarper": (0.5,),
    "EpsilonLogitsWarper": (0.1,),
    "EtaLogitsWarper": (0.1,),
    "SuppressTokensLogitsProcessor": ([3, 5],),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "RepetitionPenaltyLogitsProcessor": (1.3, 2),
    "NoRepeatNGramLogitsProcessor": (2,),
    "SequenceBiasLogitsProcessor": ({(3,): 1.5, (5, 4): -float("inf"), (numpy.int64(6),): 2.0},),
    "NoBadWordsLogitsProcessor": ([[1], [5, 4], [2]], 2),
    "MinLengthLogitsProcessor": (9, [2, 3]),
    "MinNewTokensLengthLogitsProcessor": (3, 5, torch.tensor([2, 3])),
    "ForcedBOSTokenLogitsProcessor": (3,),
    "ForcedEOSTokenLogitsProcessor": (LENGTH + 1, [2, 3]),
}
IDLE = {"InfNanRemoveLogitsProcessor"}  # below, scores have neither


def send(*processors: Any) -> list[Any]:
    return decode_processors(encode_processors(processors), CPU)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_class_gives_the_same_scores(name: str) -> None:
    """Before and after it was called: some prepare tensors in their first call."""
    processor = KNOWN[name](*ARGUMENTS[name])
    text = torch.tensor([[1, 3, 5, 4, 3, 5]]) if name != "ForcedBOSTokenLogitsProcessor" else torch.tensor([[1]])
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        (received,) = send(processor)
        assert type(received) is type(processor)
        assert vars(received).keys() == vars(processor).keys()
        expected = processor(text, scores.clone())
        assert torch.equal(received(text, scores.clone()), expected)
    assert name in IDLE or not torch.equal(expected, scores)


def test_values_keep_their_types() -> None:
    values: tuple[Any, ...] = (1, 1.0, True, None, "é", float("inf"), [1, [2]], (1, (2,)), {1, 2}, {(1, 2): [{}]}, [])
    tensors = (
        torch.tensor(0.1),
        torch.tensor([[True]]),
        torch.zeros(2, 0, dtype=torch.int32),
        torch.randn(2).bfloat16(),
    )
    sent = KNOWN["TopKLogitsWarper"](1)
    sent.values, sent.tensors = values, tensors
    (received,) = send(sent)
    assert repr(received.values) == repr(values)
    for one, other in zip(received.tensors, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_tensors_go_to_the_servers_own_device() -> None:
    """Rank 0's may be on a GPU that is not the server's."""
    text = encode_processors([stock.MinLengthLogitsProcessor(7, 2)])
    assert decode_processors(text, torch.device("meta"))[0].eos_token_id.is_meta


def test_the_docstrings_example() -> None:
    attributes = {"min_length": 7, "eos_token_id": ["tensor", ["int64", [1], [2]]]}
    text = encode_processors([stock.MinLengthLogitsProcessor(7, 2)])
    assert json.loads(text) == [["MinLengthLogitsProcessor", attributes]]


def test_processors_that_are_not_sent() -> None:
    class TopKLogitsWarper(LogitsProcessor):  # a namesake
        pass

    class Keeping(stock.TopKLogitsWarper):
        pass

    with pytest.raises(ValueError, match="Keeping, TopKLogitsWarper may keep"):
        encode_processors([Keeping(3), TopKLogitsWarper(), stock.TopKLogitsWarper(3)])
    odd = stock.TopKLogitsWarper(3)
    odd.top_k = [object()]
    with pytest.raises(ValueError, match=r"TopKLogitsWarper\.top_k .* type object"):
        encode_processors([odd])


def test_a_class_that_this_side_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NewLogitsProcessor.*same transformers"):
        decode_processors('[["NewLogitsProcessor", {}]]', CPU)
