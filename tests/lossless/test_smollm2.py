"""SmolLM2-135M-Instruct, where it is installed (`make smollm2`): text in float32 is transformers', with random heads of
few tokens; and heads train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.request.chat_template import encode_prompt
from draftsmith.scripts.shared.model_loading import load_target
from tests.conftest import REPOSITORY
from tests.scripted_drafter import ScriptedDrafter
from tests.training.runner import Runner, write_conversations

PLACE = Path(os.environ.get("SMOLLM2", REPOSITORY / "outputs" / "smollm2-135m"))
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Write a line of Python.")

pytestmark = pytest.mark.skipif(
    not PLACE.is_dir(), reason=f"{PLACE} is absent: `make smollm2` makes it, and SMOLLM2 may name another folder"
)


@cache
def loaded() -> tuple[Target, Any]:
    return load_target(str(PLACE), dtype="float32")


def make_drafter(texts: Sequence[torch.Tensor]) -> MergedDrafter:
    """Untrained heads of few tokens, and the expected texts [T] among decoys."""
    target, _ = loaded()
    heads = create_heads("mtp", target).eval().limit_vocabulary(8192, torch.arange(target.vocab_size))
    return MergedDrafter(ScriptedDrafter([*texts], target.vocab_size, feature_layers=(2,)), heads)


@pytest.mark.parametrize("tree", ["chain:3", "dynamic:3,8,24"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}])
def test_one_text(tree: str, options: dict[str, Any]) -> None:
    target, tokenizer = loaded()
    prompt = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": QUESTIONS[0]}])])
    if options["do_sample"]:
        expected = Decoder(target).generate(prompt, max_new_tokens=16, **options).sequences
    else:
        expected = target.model.generate(prompt, max_new_tokens=16, **options)
    output = Decoder(target, make_drafter(expected), tree=tree).generate(prompt, max_new_tokens=16, **options)
    assert torch.equal(output.sequences, expected)
    assert output.stats.acceptance_length > 1.2


def test_a_batch_of_four() -> None:
    target, tokenizer = loaded()
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    expected = target.model.generate(**batch, max_new_tokens=12, do_sample=False)
    texts = [text[(mask == 0).sum() :] for text, mask in zip(expected, batch["attention_mask"], strict=True)]
    decoder = Decoder(target, make_drafter(texts), tree="chain:3")
    found = decoder.generate(batch["input_ids"], batch["attention_mask"], max_new_tokens=12, do_sample=False)
    assert torch.equal(found.sequences, expected)


def test_three_steps_of_training(tmp_path: Path) -> None:
    train = Runner(PLACE, write_conversations(tmp_path / "c.jsonl"), tmp_path / "heads")
    train(head_overrides=["ttt_steps=2"], max_steps=3, num_eval_prompts=0, target_dtype="float32")
    heads = DraftHeads.from_pretrained(tmp_path / "heads")
    assert heads.config.draft_vocab_size == 8192
    assert heads.token_counts is not None
