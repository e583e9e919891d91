"""drafters.py from its options to its table, and what it does not measure twice."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from draftsmith.heads import HEAD_TYPES, create_heads
from draftsmith.inference import DynamicTree, Target
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.benchmarks import drafters
from draftsmith.scripts.benchmarks.drafters import DraftersArguments, find_means, make_grid
from draftsmith.scripts.measuring.contenders import NGRAMS
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.model_loading import fit_tree

pytestmark = pytest.mark.usefixtures("known_hardware")


@pytest.fixture(scope="module")
def heads_folder(small_chat: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained Medusa heads of one level, and EAGLE-3 heads with a training record."""
    torch.manual_seed(0)
    folder, target = tmp_path_factory.mktemp("heads"), Target(AutoModelForCausalLM.from_pretrained(small_chat).eval())
    create_heads("medusa", target, num_heads=1).save_pretrained(folder / "medusa")
    create_heads("eagle3", target).save_pretrained(folder / "eagle3")
    (folder / "eagle3" / "training_record.json").write_text(json.dumps({"training": {"tokens": 3_000_000}}))
    return folder


def measure_table(target: str, folder: Path, prompts: Path, output: Path, **options: Any) -> Grid:
    settings: dict[str, Any] = {"temperature": [0.0, 1.0], "max_new_tokens": 6, "repeats": 1, **options}
    args = DraftersArguments(
        heads=[str(folder / name) for name in ("medusa", "eagle3")],
        target=target,
        prompts=[str(prompts)],
        output=str(output),
        device="cpu",
        tree="dynamic:2,2,6",
        compile=False,
        **settings,
    )
    return drafters.run(args, Console(file=io.StringIO(), width=200))


@pytest.mark.ci
@pytest.mark.slow
def test_one_table_of_all_drafters(
    small_chat: str, heads_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out" / "table"
    grid = measure_table(small_chat, heads_folder, prompts, output)
    lines = {line[0]: line[1:] for line in grid.cells}
    assert set(lines) == {NGRAMS, "medusa", "eagle3", TRANSFORMERS, "transformers prompt look-up", PLAIN}
    assert list(lines)[-1] == PLAIN, "baselines come last"
    parameters = sum(one.numel() for one in HEAD_TYPES["eagle3"].from_pretrained(heads_folder / "eagle3").parameters())
    assert lines["eagle3"][:2] == [f"{parameters / 1e6:.2f} M", "3.0 M"]
    assert lines["medusa"][1] == lines[PLAIN][0] == "–"
    assert lines[PLAIN][2] == "1.00"
    assert lines[PLAIN][4] == lines[PLAIN][8] == "1.00", "the only plain decoding is the fastest"
    assert all(lines[name][5] == lines[name][9] == "3/3" for name in (NGRAMS, "medusa", "eagle3"))
    content = json.loads(output.with_suffix(".json").read_text())
    trees = {row["name"]: row["tree"] for row in content["reports"][0]["rows"]}
    assert (trees["eagle3"], trees["medusa"]) == ("dynamic:2,2,6", "dynamic:1,3,6")
    page = output.with_suffix(".md").read_text()
    assert grid.to_markdown() in page
    assert "3 of prompts.jsonl; up to 6 tokens" in page

    monkeypatch.setattr(drafters, "load_subject", lambda *_, **__: pytest.fail("there is nothing to measure"))
    assert measure_table(small_chat, heads_folder, prompts, output).cells == grid.cells
    with pytest.raises(ValueError, match=r"under other conditions \(max_new_tokens 6 there, 7 now\)"):
        measure_table(small_chat, heads_folder, prompts, output, max_new_tokens=7)
    with pytest.raises(pytest.fail.Exception, match="nothing to measure"):
        measure_table(small_chat, heads_folder, prompts, output, overwrite=True)


def make_content() -> dict[str, Any]:
    """MTP heads and plain decoding on two files at T = 0; the heads did not run on the second file at T = 1."""
    reports = []
    for temperature, file, length, speed in (
        (0, "a", 4.0, 3.0),
        (0, "b", 3.0, 2.0),
        (1, "a", 2.5, 2.0),
        (1, "b", 1, 1),
    ):
        step = {"draft": length, "verify": 4.0, "step": length + 5}
        row = {"num_parameters": 0, "problem": "", "num_identical": 1, "num_compared": 2}
        rows = [
            {**row, "name": "mtp", "acceptance_length": length, "over_transformers": speed, "over_plain": speed / 2}
            | {"step_milliseconds": step, "problem": "no room" if (temperature, file) == (1, "b") else ""},
            {**row, "name": PLAIN, "acceptance_length": 1.0, "over_transformers": 2.0, "over_plain": 1.0}
            | {"step_milliseconds": None},
        ]
        reports.append({"environment": {"prompts": file, "temperature": float(temperature)}, "rows": rows})
    return {"conditions": {"heads": {"mtp": {"training_tokens": None}}}, "reports": reports}


def test_means_of_all_files() -> None:
    content = make_content()
    assert set(find_means(content, 1.0)) == {PLAIN}, "a mean of some files is no mean of all"
    grid = make_grid(content)
    assert grid.cells == [
        ["mtp", "–", "–", "3.50", "2.50", "1.25", "2/4", "–", "–", "–", "–", "3.5", "4.0", "8.5"],
        [PLAIN, "–", "–", "1.00", "2.00", "1.00", "2/4", "1.00", "2.00", "1.00", "2/4", "–", "–", "–"],
    ]
    assert grid.notes[1:] == ["mtp did not run: no room"]


@pytest.mark.parametrize(
    ("tree", "max_depth", "fitted"),
    [
        ("dynamic:4,4,16", None, "dynamic:4,4,16"),
        ("dynamic:4,4,16", 4, "dynamic:4,4,16"),
        ("dynamic:4,4,16", 3, "dynamic:3,4,16"),
        ("dynamic:4,4,16", 1, "dynamic:1,8,16"),
        ("dynamic", 4, "dynamic:4,8,32"),
        ("chain:7", 4, "chain:4"),
        ("chain", 2, "chain"),
        ("auto", 2, "auto"),
        ("configs/trees/some.yaml", 1, "configs/trees/some.yaml"),
    ],
)
def test_trees_are_cut_to_a_depth_and_keep_their_nodes(tree: str, max_depth: int | None, fitted: str) -> None:
    assert fit_tree(tree, max_depth) == fitted
    if tree.startswith("dynamic"):
        policy, cut = resolve_policy(tree, None), resolve_policy(fitted, None)
        assert isinstance(cut, DynamicTree)
        assert cut.num_nodes == policy.num_nodes


def test_wrong_options(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no config.json or no \*.safetensors"):
        drafters.describe_heads(tmp_path)
    with pytest.raises(ValueError, match="got --repeats 0: give at least 1"):
        DraftersArguments(heads=["h"], prompts=[str(prompts)], repeats=0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="examples/heads has no heads"):
        DraftersArguments(prompts=[str(prompts)])
