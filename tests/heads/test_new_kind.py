"""A kind that is made up here: one class, one config and one registration are all it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import HEAD_TYPES, DraftHeads, DraftHeadsConfig, DraftStep, create_heads
from draftsmith.heads.modules.layers import DraftCache
from draftsmith.inference import Target, generate
from draftsmith.inference.drafters.base import DraftLogits
from tests.heads.test_overfit import learn
from tests.tiny_targets import random_prompt, tiny_target


class BigramConfig(DraftHeadsConfig):
    model_type = "draftsmith_bigram"
    head_type: ClassVar[str] = "bigram"

    def __init__(self, *, rank: int = 8, **kwargs: Any) -> None:
        self.rank = rank
        super().__init__(**kwargs)


class BigramHeads(DraftHeads):
    """Scores the next token from the last one only; reads no feature of the target."""

    config_class = BigramConfig

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.down = nn.Embedding(config.target_vocab_size, config.rank)
        self.up = nn.Linear(config.rank, config.target_vocab_size)
        self.post_init()

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        ahead = nn.functional.pad(input_ids[:, 1:], (0, 1))
        return [DraftStep(2, self.down(ahead), self.up)]

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None: ...

    def draft_caches(self, state: Any) -> list[DraftCache]:
        return []

    def extend(
        self, state: Any, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is None
        return self.expand(state, next_token_ids.gather(1, (counts - 1).clamp(min=0)[:, None]), counts, 0)

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        return DraftLogits(self.up(self.down(token_ids)))

    @classmethod
    def registered(cls, patch: pytest.MonkeyPatch) -> type[Self]:
        patch.setitem(HEAD_TYPES, "bigram", cls)
        return cls


def test_is_created_trained_saved_loaded_and_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few steps on the target's own text it drafts some of it."""
    kind = BigramHeads.registered(monkeypatch)
    model = tiny_target("llama", vocab_size=40)
    target = Target(model)
    heads = create_heads("bigram", target, rank=16)
    assert type(heads) is kind
    prompt = random_prompt(8, vocab_size=40)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False)
    losses = learn(heads, text, num_steps=30, loss_type="distillation", learning_rate=0.1)
    assert losses[-1] < 0.8 * losses[0]

    heads.save_pretrained(tmp_path)
    loaded = DraftHeads.from_pretrained(tmp_path)
    assert type(loaded) is kind
    assert loaded.config.rank == 16
    assert loaded.feature_layers == ()
    output = generate(target, loaded, prompt, max_new_tokens=100, do_sample=False)
    assert torch.equal(output.sequences, text)
    assert output.stats.acceptance_length > 1.3
