"""ablation.py: it trains and measures each configuration once, and compares them in one table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from draftsmith.inference import GenerationStats
from draftsmith.scripts.benchmarks.training import ablation
from draftsmith.scripts.benchmarks.training.ablation import AblationArguments, summarize
from tests.conftest import CHAT_TARGET, REPOSITORY

CONFIGS = [str(REPOSITORY / "configs" / "ablation" / f"{name}.yaml") for name in ("eagle3", "hass")]


def measure_again(tmp_path: Path, configs: list[str], max_steps: str) -> dict[str, dict[str, object]]:
    args = AblationArguments(
        configs=configs,
        dataset=str(REPOSITORY / "examples" / "conversations.jsonl.gz"),
        target=str(CHAT_TARGET),
        prompts=[str(REPOSITORY / "examples" / "prompts.jsonl"), str(tmp_path / "more.jsonl")],
        tree=["chain:2", "dynamic:2,2,4"],
        num_prompts=2,
        max_new_tokens=6,
        temperature=[0.0],
        batch_size=2,
        output=str(tmp_path / "out"),
    )
    options = ["--max_samples", "8", "--max_steps", max_steps, "--per_device_train_batch_size", "1"]
    return ablation.run(args, options, Console(file=io.StringIO()))


@pytest.mark.slow
def test_finished_runs_are_not_trained_again(
    chat_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.jsonl").write_text('{"turns": ["Name three rivers."]}\n{"turns": ["Say hello."]}\n')
    first = measure_again(tmp_path, CONFIGS[:1], "1")
    with pytest.raises(ChildProcessError, match=r"hass: the training ended with 1, see .*training\.log"):
        measure_again(tmp_path, CONFIGS[1:], "nothing")
    with pytest.raises(ValueError, match=r"eagle3 has heads of .*_steps 1 .* not of .*_steps 2 .*--output"):
        measure_again(tmp_path, CONFIGS, "2")
    both = measure_again(tmp_path, CONFIGS, "1")
    assert both["eagle3"] == first["eagle3"]
    page = (tmp_path / "out" / "ablation.md").read_text()
    assert all(page.count(f"| {name} | 0.00 M | 0 min |") == 1 for name in ("eagle3", "hass"))
    assert json.loads((tmp_path / "out" / "ablation.json").read_text())["results"] == both


def test_means_of_files_and_of_all_texts() -> None:
    def stats(*accepted: int) -> GenerationStats:
        counted = GenerationStats()
        for one in accepted:
            counted.count_step(one - 1)
        return counted

    found = summarize({"one": [stats(2, 2, 2), stats(2)], "two": [stats(4), stats(4, 3)]})
    assert [one["acceptance_length"] for one in found["files"].values()] == [2.0, pytest.approx(11 / 3)]
    assert found["acceptance_length"] == pytest.approx((2 + 11 / 3) / 2)
    assert found["micro"]["acceptance_length"] == pytest.approx(19 / 7)
    assert found["files"]["one"]["standard_error"] == 0
    assert found["standard_error"] == pytest.approx(found["files"]["two"]["standard_error"] / 2)
    assert summarize({"one": [stats(2)]})["standard_error"] is None


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match=r"--configs no\.yaml does not exist"):
        AblationArguments(configs=["no.yaml"])
    with pytest.raises(ValueError, match="each name once"):
        AblationArguments(configs=["a/one.yaml", "b/one.yaml"])
    with pytest.raises(ValueError, match="give each file's name once"):
        AblationArguments(prompts=["a/one.jsonl", "b/one.jsonl"])
