"""Processors and stopping criteria in batches: each row gets the text it gets by itself, or in transformers' batch."""

import logging
import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from torch import Tensor, nn
from transformers import PrefixConstrainedLogitsProcessor, PreTrainedModel

from draftsmith.inference import NgramDrafter, Target, generate
from draftsmith.inference.request.row_processors import processors_of_row
from tests.params import slow_but
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

PROMPTS = [random_prompt(length, seed=length)[0] for length in (3, 17, 5, 9)]
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
EOS = 8


@cache
def model() -> PreTrainedModel:
    return tiny_target("llama", initializer_range=0.3)


@cache
def target() -> Target:
    return Target(model())


def new_tokens(output: Tensor, length: int) -> list[list[int]]:
    """Behind the prompts, up to the first EOS."""
    rows = output[:, length:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


PENALTIES = {"options0": {"repetition_penalty": 1.8}, "options1": {"repetition_penalty": 1.3, "pad_token_id": EOS}}


@pytest.mark.parametrize(
    ("options", "side"),
    slow_but(
        {"options0-right", "options1-left"},
        {f"{name}-{side}": (options, side) for name, options in PENALTIES.items() for side in ("left", "right")},
    ),
)
def test_padding_is_not_penalised(
    options: dict[str, Any], side: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it is EOS either, as with most Llamas. The oldest transformers penalise it in their batches."""
    options = {**GREEDY, "eos_token_id": EOS, "pad_token_id": 0, **options}
    alone = [new_tokens(model().generate(p[None], **options), len(p))[0] for p in PROMPTS]
    inputs, usual = pad_prompts(PROMPTS, side), pad_prompts(PROMPTS)
    for one in (inputs, usual):
        one["input_ids"].masked_fill_(one["attention_mask"] == 0, options["pad_token_id"])
    expected = new_tokens(model().generate(**usual, **options), inputs["input_ids"].shape[1])
    assert expected == alone or version.parse(transformers.__version__) < version.parse("5.23")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    output = generate(target(), NgramDrafter(), **inputs, **options).sequences
    assert new_tokens(output, inputs["input_ids"].shape[1]) == expected
    assert torch.equal(output[:, : inputs["input_ids"].shape[1]], inputs["input_ids"]), "the prompts come back as given"
    assert any(row[-1] == EOS for row in alone) or options["pad_token_id"] == 0
    assert "right-padding" not in caplog.text


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_be_anything(side: str) -> None:
    inputs = pad_prompts(PROMPTS, side)
    options = {**GREEDY, "repetition_penalty": 1.3}
    expected = generate(target(), None, **inputs, **options).sequences
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    output = generate(target(), None, ids, inputs["attention_mask"], **options).sequences
    width = ids.shape[1]
    assert torch.equal(output[:, width:], expected[:, width:])
    assert torch.equal(output[:, :width], ids)


def test_criteria_may_count_rows() -> None:
    limits = [19, 25, 21, 24]

    def is_long(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([len(row) >= limits[number] for number, row in enumerate(ids)])

    inputs = pad_prompts(PROMPTS)
    options = {**GREEDY, "stopping_criteria": [is_long], "pad_token_id": 0, "eos_token_id": None}
    expected = model().generate(**inputs, **options)
    output = generate(target(), NgramDrafter(), **inputs, **options).sequences
    for row, limit in enumerate(limits):  # without EOS, transformers' rows go on until all have ended
        assert torch.equal(output[row, :limit], expected[row, :limit])
        assert not output[row, limit:].any()
    options["stopping_criteria"] = [lambda ids, scores, **_: ids.shape[1] >= 22]  # one word for all
    assert generate(target(), NgramDrafter(), **inputs, **options).sequences.shape[1] == 22
    options["stopping_criteria"] = [lambda ids, scores, **_: torch.ones(3, dtype=torch.bool)]
    with pytest.raises(ValueError, match="got 4 rows and returned 3"):
        generate(target(), None, **inputs, **options)


class RowSteps:
    """Allows other tokens in each row, and every other time others again: it counts its calls."""

    def __init__(self) -> None:
        self.memory = SimpleNamespace(inner=SimpleNamespace(count=torch.tensor(0)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = int(self.memory.inner.count.add_(1))
        for row in range(len(scores)):
            scores[row, (row + step) % 3 :: 3] = float("-inf")  # in place
        return scores


def test_processors_may_count_rows_and_remember() -> None:
    inputs = pad_prompts(PROMPTS)
    options = {**GREEDY, "eos_token_id": [EOS, 21, 50, 61, 77, 100], "pad_token_id": 0}
    expected = model().generate(**inputs, logits_processor=[RowSteps()], **options)
    output = generate(target(), NgramDrafter(), **inputs, logits_processor=[RowSteps()], **options).sequences
    assert torch.equal(output, expected)


class Asking:
    """Holds what cannot, or should not, be copied."""

    def __init__(self, held: Any) -> None:
        self.held = {"somewhere": [held]}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:1]


def test_models_are_shared_and_what_cannot_be_copied_is_refused() -> None:
    layer, processor = nn.Linear(2, 2), Asking(None)
    (own,) = processors_of_row([Asking(layer)], 1, 3)
    assert own.processor.held["somewhere"][0] is layer
    with pytest.raises(ValueError, match=r"Asking may keep .* copying failed: "):
        processors_of_row([Asking(threading.Lock())], 0, 2)
    inputs = pad_prompts(PROMPTS)
    with pytest.raises(ValueError, match=rf"Asking got .* \(4, {VOCAB_SIZE}\) .* \(1, "):
        generate(target(), None, **inputs, logits_processor=[processor], **GREEDY)


class Counting(nn.Module):
    """A processor that is a module, and another's state."""

    def __init__(self, memory: dict[str, int]) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.memory["calls"] = self.memory.get("calls", 0) + 1
        return scores


class Reading(Counting):
    def forward(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(self.memory["calls"] % VOCAB_SIZE), float("-inf"))


def test_processors_share_their_memory_within_a_row() -> None:
    memory: dict[str, int] = {}
    rows = [processors_of_row([Counting(memory), Reading(memory)], row, 2) for row in range(2)]
    ids, scores = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, VOCAB_SIZE)
    for number in (1, 2):
        for count, read in rows:
            count(ids, scores)
            assert read(ids, scores)[0].isinf().nonzero().tolist() == [[number]]
    assert not memory


def test_criteria_may_remember() -> None:
    class Sticky:
        done: Any = False

        def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
            self.done = self.done | (ids[:, -1] == 94)
            return torch.as_tensor(self.done)

    inputs = pad_prompts(PROMPTS)
    options = {**GREEDY, "pad_token_id": 0, "eos_token_id": 1}
    assert model().generate(**inputs, **options)[0, 19] == 94
    expected = model().generate(**inputs, **options, stopping_criteria=[Sticky()])
    output = generate(target(), NgramDrafter(), **inputs, **options, stopping_criteria=[Sticky()]).sequences
    assert torch.equal(output, expected)


def test_subclasses_of_transformers_own_are_shown_the_batch() -> None:
    class Prefix(PrefixConstrainedLogitsProcessor):
        pass

    processor = Prefix(lambda row, ids: [row + 2], num_beams=1)
    ids, scores = torch.tensor([[3, 4, 5]]), torch.ones(1, 8)
    for row in range(3):
        (own,) = processors_of_row([processor], row, 3)
        assert own(ids, scores)[0].isfinite().nonzero().tolist() == [[row + 2]]
