"""examples/chat-13m/train.py: short runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.inference.targets.layer_groups import find_group_size
from tests.conftest import REPOSITORY
from tests.training.runner import save_chat_target, write_conversations


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_target", REPOSITORY / "examples/chat-13m/train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_short_run_writes_a_model(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_chat_target(tmp_path / "target")
    conversations = write_conversations(tmp_path / "conversations.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "one", "turns": ["word1 word2"]}) + "\n")
    options = {"model": target, "dataset": conversations, "eval_dataset": conversations, "prompts": prompts}
    options |= {"output_dir": tmp_path / "out", "row_length": 72, "max_steps": 2}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
    program.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "repeated 4-grams at T = 0:" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


def test_tied_layers_stay_tied(program: ModuleType, tmp_path: Path) -> None:
    """Checkpoints and the result hold every layer, and the groups are equal after the steps."""
    target = save_chat_target(tmp_path / "target")
    conversations = write_conversations(tmp_path / "conversations.jsonl")
    options = {"model": target, "dataset": conversations, "prompts": REPOSITORY / "examples/prompts.jsonl"}
    options |= {"output_dir": tmp_path / "out", "row_length": 72, "max_steps": 2, "tied_group_size": 2, "save_steps": 1}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "repeated_4grams", lambda *_: 0.0)
        program.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    before = AutoModelForCausalLM.from_pretrained(target).model.layers
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert find_group_size(model.model.layers) == 2
        assert not torch.equal(model.model.layers[0].mlp.up_proj.weight.float(), before[0].mlp.up_proj.weight.float())


def test_repeated_tokens_end_an_earlier_4_gram(program: ModuleType) -> None:
    """In each text by itself; 4-grams with special tokens do not count."""
    texts = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 4], [5, 0, 7, 8, 9, 5, 0, 7, 8, 9, 4]])
    others = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 9000], [5, 6, 7, 4104, 9, 5, 6, 8, 8, 9, 4]])
    for some, expected in ((texts, [[8, 9], []]), (others, [[8, 9], []])):
        assert [row.nonzero().flatten().tolist() for row in program.find_repeated(some, [0])] == expected


def test_unlikelihood_lowers_repeated_tokens(program: ModuleType) -> None:
    logits = torch.zeros(1, 4, 8, requires_grad=True)
    program.score_repetitions(
        logits, torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, False, False, True]])
    ).backward()
    assert logits.grad is not None
    assert logits.grad[0, 2, 4] > 0
    assert not logits.grad[0, [0, 1, 3]].any()


def test_a_run_learns_from_its_own_texts(program: ModuleType, tmp_path: Path) -> None:
    target = save_chat_target(tmp_path / "target")
    options = {"model": target, "dataset": write_conversations(tmp_path / "conversations.jsonl"), "row_length": 72}
    options |= {"output_dir": tmp_path / "out", "max_steps": 2, "unlikelihood": 1.0, "own_texts": 3}
    options |= {"own_texts_steps": 1, "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 2}
    scored: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        score = program.score_repetitions
        patch.setattr(
            program,
            "score_repetitions",
            lambda *args: scored.append((args[1].shape, args[2][:, :64].any())) or score(*args),
        )
        patch.setattr(program, "repeated_4grams", lambda *_: 0.0)
        program.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    assert scored == [((2, 64 + 128), False)] * 2


def test_refusals(program: ModuleType) -> None:
    with pytest.raises(ValueError, match="give rows of 2 tokens or more"):
        program.TargetArguments(dataset="x", own_texts=0)
    with pytest.raises(ValueError, match="leave one out"):
        program.TargetArguments(dataset="x", compile_layers=True, tied_group_size=4)
