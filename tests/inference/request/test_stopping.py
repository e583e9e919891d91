"""Stopping criteria after every token, against transformers' criteria on the whole text."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StopStringCriteria

from draftsmith.inference.request.stopping import Stopping

CPU = torch.device("cpu")
WORDS = "the singing bird and then the end, and thence a ring a thing it sings and then"


@pytest.mark.parametrize("strings", [["e"], [" the", "ing "], ["and then", "a", "zzzz"]])
def test_stop_strings_end_where_transformers_ends_them(
    strings: list[str], chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = WORDS.split()
    drawn = torch.randint(0, len(words), (300,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = chat_tokenizer(" ".join(words[word] for word in drawn))["input_ids"] + [10**6, 5]
    criterion, calls = StopStringCriteria(chat_tokenizer, strings), []
    expected = [bool(criterion(torch.tensor([tokens[: place + 1]]), None)) for place in range(2, len(tokens))]
    usual = StopStringCriteria.__call__

    def count(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        calls.append(input_ids.shape[1])
        return usual(self, input_ids, scores, **kwargs)

    monkeypatch.setattr(StopStringCriteria, "__call__", count)
    stopping = Stopping([criterion], [tokens[:2]], len(tokens), CPU)
    assert [stopping.ends(0, token) for token in tokens[2:]] == expected
    assert any(expected)
    assert sum(expected) <= len(calls) < len(expected), "tokens that end no stop string need no look"


def test_criteria_of_ones_own_see_one_text_that_grows() -> None:
    seen: list[list[int]] = []
    places = set()

    def criterion(input_ids: Tensor, scores: Any) -> bool:
        seen.append(input_ids[0].tolist())
        places.add(input_ids.data_ptr())
        return input_ids.shape[1] == 5

    stopping = Stopping([criterion], [[7, 8]], 9, CPU)
    assert [stopping.ends(0, token) for token in (1, 2, 3)] == [False, False, True]
    assert seen == [[7, 8, 1], [7, 8, 1, 2], [7, 8, 1, 2, 3]]
    assert len(places) == 1


def test_time_is_over_for_every_row() -> None:
    stopping = Stopping([MaxTimeCriteria(0.0, initial_timestamp=0.0)], [[1], [2]], 4, CPU)
    assert stopping.ends(0, 3)
    assert stopping.ends(1, 3)
    assert not Stopping([MaxTimeCriteria(1e12)], [[1]], 4, CPU).ends(0, 3)
