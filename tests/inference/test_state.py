"""DecodeState: what drafters and processors see of it, whatever they keep themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Decoder, Drafter, DraftLogits, chain
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Reading(Drafter):
    """Keeps no state; notes what it is given, and drafts nonsense."""

    max_depth = 1

    def __init__(self) -> None:
        self.read: list[int] = []

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None:
        return None

    def extend(
        self, state: None, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        self.read += next_token_ids[0, : counts[0]].tolist()
        return DraftLogits(torch.zeros(len(counts), 1, VOCAB_SIZE))

    def expand(self, state: None, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        raise AssertionError("a chain of one token has no second level")


def test_a_drafter_without_a_state_reads_every_token() -> None:
    drafter, prompt = Reading(), random_prompt(7)
    text = Decoder(tiny_target("llama"), drafter, tree=chain(1)).generate(prompt, **GREEDY).sequences[0].tolist()
    assert len(drafter.read) > 20
    assert drafter.read == text[1 : 1 + len(drafter.read)]


class Counting:
    """A processor that keeps a state."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores

    def __deepcopy__(self, _: Any) -> Counting:
        COPIES.append(Counting())
        return COPIES[-1]


COPIES: list[Counting] = []


@pytest.mark.parametrize("drafter", [None, Reading()], ids=["rows leave", "rows stay"])
def test_processors_are_not_asked_about_rows_that_have_ended(drafter: Drafter | None) -> None:
    """Each row's copy sees every token of its text once."""
    COPIES.clear()
    prompts = pad_prompts([random_prompt(6, seed=1), random_prompt(6, seed=2)])
    decoder = Decoder(tiny_target("llama"), drafter, tree=None if drafter is None else chain(1))
    ends = [
        lambda ids, _: torch.tensor(
            [ids.shape[1] >= 9 and bool((ids[0, :6] == row).all()) for row in prompts["input_ids"]][:1]
        )
    ]
    output = decoder.generate(**prompts, **GREEDY, logits_processor=[Counting()], stopping_criteria=ends)
    new = [[length - 6 for length in copy.lengths] for copy in COPIES]
    assert new == [[*range(3)], [*range(20)]]
    assert output.sequences.shape[1] == 26
