"""examples/chat-13m/train.py: short runs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.inference.targets.layer_groups import find_group_size
from tests.conftest import REPOSITORY
from tests.training.conversation_cases import write
from tests.training.runner import save_chat_target, words_of, write_conversations


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_target", REPOSITORY / "examples/chat-13m/train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    found = {"model": save_chat_target(tmp_path / "target"), "output_dir": tmp_path / "out"}
    found["dataset"] = write_conversations(tmp_path / "conversations.jsonl")
    found["prompts"] = write(tmp_path / "prompts.jsonl", [{"id": "one", "turns": ["word1 word2"]}])
    size = {"row_length": 72, "max_steps": 2, "per_device_train_batch_size": 2}
    return {**found, **size, "use_cpu": True, "bf16": False, "report_to": "none"}


def test_a_short_run_writes_a_model(
    program: ModuleType, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(words_of(**options, eval_dataset=options["dataset"]))
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "repeated 4-grams at T = 0:" in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


def test_tied_layers_stay_tied(
    program: ModuleType, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and the result hold every layer, and the groups are equal after the steps."""
    monkeypatch.setattr(program, "repeated_4grams", lambda *_: 0.0)
    program.main(words_of(**options, tied_group_size=2, save_steps=1))
    before = AutoModelForCausalLM.from_pretrained(options["model"]).model.layers
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert find_group_size(model.model.layers) == 2
        assert not torch.equal(model.model.layers[0].mlp.up_proj.weight.float(), before[0].mlp.up_proj.weight.float())
