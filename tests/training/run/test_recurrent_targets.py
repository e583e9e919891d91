"""Heads train above targets with recurrent layers, on packed rows, and decode with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from tests.tiny_targets import RECURRENT_FAMILIES, attention_implementations, tiny_target
from tests.training.runner import Runner, assert_greedy_text_is_the_targets, save_word_tokenizer

pytestmark = pytest.mark.skipif(not RECURRENT_FAMILIES, reason="this release of transformers has no cache for states")


@pytest.mark.parametrize(
    ("family", "head_type"),
    [
        ("qwen3_5", "eagle3"),
        pytest.param("mamba2", "mtp", marks=pytest.mark.slow),
        pytest.param("lfm2", "medusa", marks=pytest.mark.slow),
    ],
)
def test_heads_train(family: str, head_type: str, conversations: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    tiny_target(family, vocab_size=60, initializer_range=0.2).save_pretrained(folder)
    save_word_tokenizer(folder)
    train = Runner(folder, conversations, tmp_path / "heads")
    options = {"head_type": head_type, "packing": True, "attn_implementation": attention_implementations(family)[0]}
    options["head_overrides"] = "draft_vocab_size=40" if head_type == "eagle3" else None
    first, last = (train(**options, max_steps=steps) for steps in (1, 30))
    assert last["eval_loss"] < 0.95 * first["eval_loss"]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert_greedy_text_is_the_targets(Target(model), DraftHeads.from_pretrained(train.output_dir))
