"""drafter_table.py from its options to its files, and what it does not measure twice."""

from __future__ import annotations

import copy
import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import HfArgumentParser, PreTrainedModel

from heads import HEAD_TYPES, create_heads
from inference import DynamicTree, Target
from scripts.benchmarks import drafter_table, matrix
from scripts.benchmarks.contenders import NGRAMS
from scripts.benchmarks.drafter_portions import DrafterInfo, Portions, describe_drafter, fingerprint_files, read_reports
from scripts.benchmarks.drafter_published import PUBLISHED
from scripts.benchmarks.drafter_render import mean_grid
from scripts.benchmarks.drafter_results import Results
from scripts.benchmarks.drafter_table import TableArguments
from scripts.benchmarks.readme_results import drafters_table
from scripts.benchmarks.roofline import Hardware
from scripts.benchmarks.rows import Row
from scripts.model_loading import fit_tree, parse_tree
from tests.conftest import CHAT_TARGET, REPOSITORY

TRAINING = {"seconds": 120.0, "threads": 2, "steps": 10, "tokens": 3_000_000, "epochs": 1.0}


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do is another test's business."""
    monkeypatch.setattr(matrix, "measure_hardware", lambda target: Hardware(10.0, 100.0))


@pytest.fixture(scope="module")
def heads_folder(chat_target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained Medusa heads of one level, and EAGLE-3 heads with a training record."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    create_heads("medusa", Target(chat_target), num_heads=1).save_pretrained(folder / "medusa")
    create_heads("eagle3", Target(chat_target)).save_pretrained(folder / "eagle3")
    (folder / "eagle3" / "training_record.json").write_text(json.dumps({"training": TRAINING}))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "turns": [f"Count to {n}"]}) + "\n" for n in range(2)))
    return path


def measure_table(folder: Path, names: str, prompts: Path, tmp_path: Path, **options: Any) -> tuple[Results, str]:
    console = Console(file=io.StringIO(), width=200)
    settings: dict[str, Any] = {"temperature": [0.0], "max_new_tokens": 6, "repeats": 1, "compile": False, **options}
    args = TableArguments(
        heads=[str(folder / name) for name in names.split()],
        target=str(CHAT_TARGET),
        prompts=[str(prompts)],
        json=str(tmp_path / "out" / "table.json"),
        device="cpu",
        tree="dynamic:2,2,6",
        **settings,
    )
    results = drafter_table.run(args, console)
    return results, console.file.getvalue()  # type: ignore[attr-defined]


def test_one_table_of_all_drafters(heads_folder: Path, prompts: Path, tmp_path: Path) -> None:
    files = {"markdown": str(tmp_path / "out" / "table.md"), "plot": str(tmp_path / "out" / "table.png")}
    results, printed = measure_table(heads_folder, "medusa eagle3", prompts, tmp_path, temperature=[0.0, 1.0], **files)
    assert set(results.drafters) == {NGRAMS, "medusa", "eagle3"}
    assert list(results.titles.values()) == ["prompts, T=0", "prompts, T=1"]
    assert results.trees == {
        **dict.fromkeys(results.others, ""),
        NGRAMS: "dynamic:2,2,6",
        "eagle3": "dynamic:2,2,6",
        "medusa": "dynamic:1,3,6",
    }
    for name in results.drafters:
        for cell in results.cells[name].values():
            assert (cell.row.num_identical, cell.row.num_compared) == (2, 2)
            assert cell.row.nodes_per_step == 6
            assert cell.over_plain is not None
            assert cell.row.over_plain == pytest.approx(cell.over_plain[0]), "eager beside eager plain decoding"
    page = Path(files["markdown"]).read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in reversed(page.splitlines())}
    parameters = sum(one.numel() for one in HEAD_TYPES["eagle3"].from_pretrained(heads_folder / "eagle3").parameters())
    assert rows["eagle3"][1:5] == [f"{parameters / 1e6:.2f} M", "3.00 M", "2 min, 2 threads", "dynamic:2,2,6"]
    assert rows["medusa"][2:4] == ["–", "–"]
    assert rows[NGRAMS][1] == "none"
    for text in ("As published", "6.62, 5.51× (EAGLE-3)", "Acceptance by depth, T=0", "| 2/2 |", "transformers 5"):
        assert text in page
    assert "Acceptance by depth" in printed
    assert Path(files["plot"]).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["table.json", "table.md", "table.png"]


@pytest.mark.slow
def test_portions_are_not_measured_again(
    heads_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []
    measure = drafter_table.measure_combination

    def count(subject: Any, *args: Any, **options: Any) -> Any:
        measured.append(list(subject.drafters))
        return measure(subject, *args, **options)

    monkeypatch.setattr(drafter_table, "measure_combination", count)
    folder = tmp_path / "heads"
    shutil.copytree(heads_folder, folder)
    prompts.write_text(prompts.read_text().splitlines()[0] + "\n")
    measure_table(folder, "medusa", prompts, tmp_path)
    assert measured == [[NGRAMS, "medusa"]]
    results, _ = measure_table(folder, "medusa eagle3", prompts, tmp_path)
    assert measured.pop() == ["eagle3"], "heads that came later are measured alone"
    assert set(results.drafters) == {NGRAMS, "medusa", "eagle3"}
    monkeypatch.setattr(drafter_table, "load_subject", lambda *_, **__: pytest.fail("there is nothing to measure"))
    again, _ = measure_table(folder, "eagle3", prompts, tmp_path)
    assert again.reports == json.loads(json.dumps(results.reports)), "those not asked for now stay in the table"
    monkeypatch.undo()

    with pytest.raises(ValueError, match=r"under other conditions \(max_new_tokens 6 there, 7 now\)"):
        measure_table(folder, "medusa", prompts, tmp_path, max_new_tokens=7)
    config = folder / "medusa" / "config.json"
    config.write_text(config.read_text() + "\n")
    results, printed = measure_table(folder, "medusa eagle3", prompts, tmp_path)
    assert "medusa, T = 0 on" in printed
    assert [list(report["environment"]["drafters"]) for report in results.reports] == [[NGRAMS], ["eagle3"], ["medusa"]]
    results, _ = measure_table(folder, "medusa", prompts, tmp_path, overwrite=True, max_new_tokens=7)
    assert len(results.reports) == 1


def test_changed_prompts_are_measured_again(prompts: Path) -> None:
    drafter = DrafterInfo("medusa", "heads/medusa", "abc", 1, {})
    environment = {
        "conditions": {"seed": 0},
        "prompts": str(prompts),
        "prompts_fingerprint": fingerprint_files([prompts]),
        "temperature": 0.0,
        "drafters": {"medusa": {"fingerprint": "abc"}},
    }
    report = {"environment": environment, "rows": [], "runs": {}}

    def portions() -> Portions:
        reports = [copy.deepcopy(report)]
        return Portions(reports, conditions={"seed": 0}, drafters={"medusa": drafter}, prompts=[str(prompts)])

    assert portions().missing(str(prompts), 0.0) == []
    assert portions().missing(str(prompts), 1.0) == ["medusa"]
    prompts.write_text(json.dumps({"id": "sea", "turns": ["The sea"]}) + "\n")
    assert portions().missing(str(prompts), 0.0) == ["medusa"]
    assert portions().dropped == [f"T = 0 on {prompts}: these prompts have changed"]


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
    policy, cut = parse_tree(tree), parse_tree(fitted)
    if isinstance(policy, DynamicTree):
        assert isinstance(cut, DynamicTree)
        assert cut.num_nodes == policy.num_nodes


def test_every_published_kind_is_one_of_ours() -> None:
    assert {one.kind for one in PUBLISHED} <= set(HEAD_TYPES)
    ranked = [one for one in PUBLISHED if one.is_ranked]
    assert len({(one.setting, one.source, one.temperature) for one in ranked}) == 1
    assert len({one.kind for one in ranked}) == len(ranked)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json or no \*.safetensors"):
        describe_drafter(str(tmp_path))
    assert read_reports(tmp_path / "none.json") == []
    reports = [{"environment": {"target": "t"}, "rows": [], "runs": {}}]
    with pytest.raises(ValueError, match="holds reports of another program"):
        Portions(reports, conditions={}, drafters={}, prompts=[])


def test_options(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    parser = HfArgumentParser(TableArguments)
    (args,) = parser.parse_args_into_dataclasses(["--no_compile", "--temperature", "1"])
    assert (args.compile, args.temperature) == (False, [1.0])
    assert {"examples/heads/eagle3", "examples/heads/medusa"} <= set(args.heads)
    monkeypatch.chdir(prompts.parent)
    with pytest.raises(ValueError, match="no heads below examples/heads"):
        TableArguments(prompts=[str(prompts)])
    with pytest.raises(ValueError, match="got --repeats 0: give at least 1"):
        parser.parse_args_into_dataclasses(["--repeats", "0", "--prompts", str(prompts)])


def hand_made_results(*, is_whole: bool) -> Results:
    """One drafter and plain decoding on two files at T = 0 and 1; without the last portion if not whole."""
    info = {"kind": "mtp", "path": "p", "fingerprint": "f", "num_parameters": 870_000, "training": TRAINING}
    reports = []
    for temperature, file, length, speed in (
        (0, "a", 4.0, 3.0),
        (0, "b", 3.0, 2.0),
        (1, "a", 2.5, 2.0),
        (1, "b", 1.5, 1),
    ):
        times = {"draft": length, "verify": 4.0, "step": length + 5}
        rows = [
            Row("mtp, compiled", acceptance_length=length, over_transformers=speed, step_milliseconds=times),
            Row("transformers generate", over_transformers=1.0),
        ]
        environment = {"prompts_fingerprint": file, "prompts": f"{file}.jsonl", "temperature": float(temperature)}
        reports.append(
            {
                "environment": {**environment, "drafters": {"mtp": info}},
                "rows": [asdict(row) for row in rows],
                "runs": {},
            }
        )
    return Results(reports if is_whole else reports[:-1])


def test_means_of_all_files() -> None:
    grid = mean_grid(hand_made_results(is_whole=True))
    assert grid.columns == ["", "T=0", "T=1", "draft, ms", "verify, ms", "step, ms"]
    assert grid.cells == [
        ["mtp", "3.50, 2.50×", "2.00, 1.50×", "3.5", "4.0", "8.5"],
        ["transformers generate", "1.00, 1.00×", "1.00, 1.00×", "–", "–", "–"],
    ]


def test_the_readme_shows_each_greedy_file_and_the_mean_of_the_sampled_ones() -> None:
    assert drafters_table(hand_made_results(is_whole=True)) == [
        "| drafter | parameters | trained on | a, T=0 | b, T=0 | all of them, T=1 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| mtp | 0.87 M | 3.0 M tokens | 4.00, 3.00× | 3.00, 2.00× | 2.00, 1.50× |",
        "| transformers generate | – | – | 1.00, 1.00× | 1.00, 1.00× | 1.00, 1.00× |",
    ]
    partial = drafters_table(hand_made_results(is_whole=False))
    assert partial[2].endswith("| 4.00, 3.00× | 3.00, 2.00× | – |"), "a mean of some files is no mean of all"
