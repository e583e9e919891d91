"""The way of somebody else's heads: imported, decoded, trained further, written for an engine."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target, generate
from draftsmith.scripts import export_heads, import_heads
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt
from tests.training.runner import Runner, assert_same


def test_published_heads_are_imported_trained_further_and_exported(train: Runner, tmp_path: Path) -> None:
    place = str(train.defaults["target"])
    target = Target(AutoModelForCausalLM.from_pretrained(place))
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True)
    theirs = tiny_heads("eagle3", target, ttt_steps=2, draft_vocab_size=40, **flags)
    find_format("speculators", "eagle3").write(theirs.config, theirs.state_dict(), target).save(tmp_path)

    imported, served = tmp_path / "imported", tmp_path / "served"
    words = ["--checkpoint", str(tmp_path), "--target", place, "--output", str(imported), "--device", "cpu"]
    import_heads.main(words)
    prompt = random_prompt(9, vocab_size=60)
    heads: list[Any] = [theirs, DraftHeads.from_pretrained(imported, target=target)]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "tree": "dynamic"}
    one, other = (generate(target, each, prompt, **options) for each in heads)
    assert torch.equal(one.sequences, other.sequences)
    assert one.stats.accepted_histogram == other.stats.accepted_histogram

    train(head_type=None, head_overrides=None, init_heads=imported, max_steps=4)
    trained = DraftHeads.from_pretrained(train.output_dir)
    assert not torch.equal(trained.input_norm.weight, theirs.input_norm.weight)
    assert torch.equal(trained.d2t, theirs.d2t)

    train(head_type=None, head_overrides=None, init_heads=tmp_path, max_steps=4)  # as they were published
    assert_same(train.weights(), dict(trained.state_dict()))

    words = ["--heads", str(train.output_dir), "--target", place, "--format", "vllm", "--output", str(served)]
    export_heads.main(words)
    back = DraftHeads.from_pretrained(served, target=target)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


# Heads of a kind that is not of this repository: examples/own_kind.py.


def test_it_trains_and_is_evaluated(own_kind: Any, train: Runner) -> None:
    found = train(head_type="bigram", head_overrides=["rank=16"], learning_rate=0.05, max_steps=40)
    assert found["eval_loss"] < math.log(60), "better than no idea"
    assert found["eval_acceptance_length"] >= 1.0


def test_what_it_says_of_its_steps_must_hold(own_kind: Any, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_kind.BigramHeads, "num_unrolled_steps", 2)
    with pytest.raises(ValueError, match=r"shifts \[2\], and \[2, 3\].*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
    monkeypatch.delattr(own_kind.BigramHeads, "num_unrolled_steps")
    with pytest.raises(TypeError, match=r"BigramHeads.*num_unrolled_steps"):
        train(head_type="bigram", head_overrides=["rank=16"])
