"""ablation.py: it trains and measures each configuration once, and compares them in one table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from scripts.benchmarks import ablation
from scripts.benchmarks.ablation import AblationArguments
from tests.conftest import CHAT_TARGET, REPOSITORY

CONFIGS = [str(REPOSITORY / "configs" / "ablation" / f"{name}.yaml") for name in ("eagle3", "hass")]


def measure_again(tmp_path: Path, configs: list[str], max_steps: str) -> dict[str, dict[str, object]]:
    args = AblationArguments(
        configs=configs,
        dataset=str(REPOSITORY / "examples" / "conversations.jsonl.gz"),
        target=str(CHAT_TARGET),
        prompts=str(REPOSITORY / "examples" / "prompts.jsonl"),
        num_prompts=2,
        max_new_tokens=6,
        temperature=[0.0],
        output=str(tmp_path / "out"),
    )
    options = ["--max_samples", "8", "--max_steps", max_steps, "--per_device_train_batch_size", "1"]
    return ablation.run(args, options, Console(file=io.StringIO()))


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(
    chat_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = measure_again(tmp_path, CONFIGS[:1], "1")
    with pytest.raises(ChildProcessError, match=r"hass: the training ended with 1, see .*training\.log"):
        measure_again(tmp_path, CONFIGS, "nothing")
    both = measure_again(tmp_path, CONFIGS, "1")
    assert both["eagle3"] == first["eagle3"]
    page = (tmp_path / "out" / "ablation.md").read_text()
    assert all(page.count(f"| {name} | 0.00 M | 0 min |") == 1 for name in ("eagle3", "hass"))
    assert json.loads((tmp_path / "out" / "ablation.json").read_text())["results"] == both


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match=r"--configs no\.yaml does not exist"):
        AblationArguments(configs=["no.yaml"])
    with pytest.raises(ValueError, match="each name once"):
        AblationArguments(configs=["a/one.yaml", "b/one.yaml"])
