"""DecodeState: what drafters and processors see of it, whatever they keep themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder, Drafter, DraftLogits, chain
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

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
