"""ablation.py: the data sets, a run from its configuration to its result, and the page."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from heads import create_heads
from inference import Target
from scripts.benchmarks import ablation_data
from scripts.benchmarks.ablation import AblationArguments
from scripts.benchmarks.ablation_data import DataPlan, prepare_data
from scripts.benchmarks.ablation_measure import MeasureArguments, measure, ratio_error
from scripts.benchmarks.ablation_render import read_page, write_page
from scripts.benchmarks.ablation_runs import CONFIGS, LABELS, REFERENCE, TABLES, Programs, Run
from tests.conftest import CHAT_TARGET, REPOSITORY
from training.data.chat_tokens import tokenize_conversation


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def converse(name: str, writer: str, num_turns: int) -> dict[str, Any]:
    turns = []
    for turn in range(num_turns):
        turns.append({"from": "human", "value": f"Prompt {turn} of {name}, please?"})
        turns.append(
            {"from": "gpt", "value": f"This is what {writer} says of {name}. " * (2 if writer == "Ann" else 1)}
        )
    return {"id": name, "conversations": turns}


class TestData:
    @pytest.fixture
    def plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataPlan:
        """Six conversations of three turns, and replies to five of them, of two turns and in another order."""
        people = [converse(f"c{i}", "Ann", 3) for i in range(6)]
        replies = [converse(f"c{i}", "the target", 2) for i in (4, 2, 0, 5, 1)]
        monkeypatch.setattr(ablation_data, "_regenerate", lambda plan, output: write_lines(output, replies))
        return DataPlan(
            folder=tmp_path / "out",
            conversations=write_lines(tmp_path / "people.jsonl", people),
            replies=None,
            target=str(CHAT_TARGET),
            budget=160,
            max_length=60,
            num_conversations=6,
            seed=0,
        )

    def test_both_sets_answer_the_same_prompts_in_one_order_up_to_the_budget(self, plan: DataPlan) -> None:
        tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
        record = prepare_data(plan)
        sets = {name: read_lines(plan.folder / f"{name}.jsonl.gz") for name in ("regenerated", "human")}
        prompts = {
            name: [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows]
            for name, rows in sets.items()
        }
        shorter = min(map(len, prompts.values()))
        assert prompts["human"][:shorter] == prompts["regenerated"][:shorter]
        assert prompts["regenerated"][0][0] == "Prompt 0 of c4, please?"
        assert all(len(row["messages"]) == 4 for rows in sets.values() for row in rows)
        assert "Ann" in sets["human"][0]["messages"][1]["content"]
        for name, rows in sets.items():
            lengths = [len(tokenize_conversation(row["messages"], tokenizer)[0][:60]) for row in rows]
            masks = [sum(tokenize_conversation(row["messages"], tokenizer)[1][:60]) for row in rows]
            counted = {"conversations": len(rows), "tokens": sum(lengths), "trained_tokens": sum(masks)}
            assert record["sets"][name] == counted
            assert 160 - 60 < sum(lengths) <= 160
        assert prepare_data(replace(plan, conversations=None)) == record, "made once"
        other = replace(plan, folder=plan.folder.with_name("other"), replies=plan.folder / "replies.jsonl.gz")
        assert prepare_data(other) == record, "of replies that were there"

    def test_of_another_budget_are_not_mixed_up(self, plan: DataPlan) -> None:
        prepare_data(plan)
        with pytest.raises(ValueError, match=r"holds an ablation with .*160.* and .*150.* is asked for: give another"):
            prepare_data(replace(plan, budget=150))

    def test_need_people(self, plan: DataPlan) -> None:
        with pytest.raises(ValueError, match="has no data yet: give --conversations FILE"):
            prepare_data(replace(plan, conversations=None))

    def test_need_as_many_tokens_as_the_budget(self, plan: DataPlan) -> None:
        with pytest.raises(ValueError, match=r"5 conversations hold .* the budget is 5,000: give more --num_conv"):
            prepare_data(replace(plan, budget=5000))

    def test_replies_to_other_prompts(self, plan: DataPlan, tmp_path: Path) -> None:
        other = write_lines(tmp_path / "other.jsonl", [converse("c4", "Ann", 3)])
        with pytest.raises(ValueError, match=r"has the conversation 'c2', which .*other\.jsonl lacks"):
            prepare_data(replace(plan, conversations=other))


class TestRuns:
    def test_every_configuration_has_a_label_and_a_place_in_a_table(self) -> None:
        names = {path.name.removesuffix(".yaml") for path in CONFIGS.iterdir()}
        assert names == set(LABELS)
        assert {name for labels in TABLES.values() for name in labels} == names

    def test_they_differ_in_what_they_compare_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Same target, rows, order, seed and optimizer."""
        monkeypatch.chdir(REPOSITORY)
        reference = Run(REFERENCE, Path("out")).settings()
        for name in LABELS:
            run = Run(name, Path("out"))
            settings = run.settings()
            changed = {key for key in settings.keys() | reference.keys() if settings.get(key) != reference.get(key)}
            assert changed <= {"head_type", "head_overrides", "loss_type", "depth_weights", "dataset", "features"}, name
            num_changes = {REFERENCE: 0, "hass": 3, "eagle": 2, "eagle3-human": 2}.get(name, 1)
            assert len(changed) == num_changes
            data = "human" if name == "eagle3-human" else "regenerated"
            assert run.dataset == Path("out") / f"{data}.jsonl.gz"
            assert run.features == Path("out") / f"features-{data}"

    def test_a_result_of_other_settings_is_not_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(REPOSITORY)
        run = Run("hass", tmp_path)
        options = {"tree": "dynamic", "num_prompts": 3}
        assert run.read_result(options) is None
        run.folder.mkdir()
        run.result.write_text(json.dumps({"settings": run.settings(), "options": options}))
        assert run.read_result(options) is not None
        with pytest.raises(ValueError, match=r"measured with \{'tree': 'dynamic'\}, and \{'tree': 'chain'\} is asked"):
            run.read_result(options | {"tree": "chain"})
        run.result.write_text(json.dumps({"settings": {**run.settings(), "seed": 1}}))
        with pytest.raises(ValueError, match=r"was made with other settings than hass.yaml now has: remove the folder"):
            run.read_result(options)

    def test_a_program_that_fails_says_where_to_look(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"nowhere.py ended with 2: see .*its\.log"):
            Programs(1).run("scripts/nowhere.py", log=tmp_path / "its.log")
        assert "No such file" in (tmp_path / "its.log").read_text()

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"only": ["eagl"]}, "got --only eagl; did you mean eagle"), ({"jobs": 0}, "got --jobs 0: give at least 1")],
    )
    def test_wrong_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            AblationArguments(**options)


def test_measurements_compare_with_plain_decoding(chat_target: PreTrainedModel, tmp_path: Path) -> None:
    """Untrained heads accept little, and write what the target writes."""
    torch.manual_seed(0)
    create_heads("medusa", Target(chat_target), num_heads=2).save_pretrained(tmp_path / "heads")
    options: dict[str, Any] = {"prompts": str(REPOSITORY / "examples/prompts.jsonl"), "json": ""}
    options |= {"target": str(CHAT_TARGET), "num_prompts": 2, "max_new_tokens": 12, "tree": "chain:2"}
    plain = measure(MeasureArguments(**options))
    texts = tmp_path / "plain.json"
    texts.write_text(json.dumps(plain))
    measured = measure(MeasureArguments(**options, heads=str(tmp_path / "heads"), texts=str(texts)))
    assert measured["environment"]["num_prompts"] == 2
    for temperature in ("0", "1"):
        found = measured["temperatures"][temperature]
        assert found["identical"] == 2
        # Without the prefill's, and with what a text's last step emitted beyond its end.
        num_tokens = sum(len(text) - 1 for text in plain["temperatures"][temperature]["texts"])
        assert 0 <= round(found["acceptance_length"] * found["verify_steps"]) - num_tokens <= 2 * 2
    plain["temperatures"]["1"]["texts"][0][3] += 1
    texts.write_text(json.dumps(plain))
    measured = measure(MeasureArguments(**options, heads=str(tmp_path / "heads"), texts=str(texts)))
    assert [measured["temperatures"][temperature]["identical"] for temperature in ("0", "1")] == [2, 1]


def test_standard_errors() -> None:
    assert ratio_error([5.0], [2]) is None
    assert ratio_error([6.0, 6.0, 6.0], [2, 2, 2]) == 0
    assert ratio_error([20, 30], [10, 10]) == pytest.approx(0.5)  # of the mean of 2 and 3


def fake_result(name: str, length: float) -> dict[str, Any]:
    measured = {
        "acceptance_length": length,
        "standard_error": 0.0312,
        "acceptance_by_depth": [0.5, 0.25],
        "verify_steps": 9,
        "identical": 3,
    }
    environment = {"target": "t", "dtype": "float32", "tree": "chain:2", "num_prompts": 3, "prompts": "p.jsonl"}
    environment |= {"max_new_tokens": 8, "cpu": "c", "cpu_flags": ["amx"], "threads": 1, "torch": "2", "commit": "abc"}
    return {
        "name": name,
        "settings": {"num_train_epochs": 2},
        "training": {"tokens": 2_990_000, "seconds": 1800.0},
        "curve": [{"tokens": 1e6 * step, "loss": 3.0 / step, "top1_depth1": 0.1 * step} for step in (1, 2, 3)],
        "environment": {**environment, "transformers": "5"},
        "temperatures": {"0": measured, "1": {**measured, "acceptance_length": length - 0.1}},
    }


def test_the_page_holds_what_is_finished(tmp_path: Path) -> None:
    data = {
        "budget": 1_500_000,
        "max_length": 384,
        "sets": {"regenerated": {"conversations": 9, "tokens": 2_999_000, "trained_tokens": 1_500_000}},
    }
    results = {"eagle3": fake_result("eagle3", 2.5), "loss-topk": fake_result("loss-topk", 2.41)}
    write_page(tmp_path / "page", data, results, ["HASS"])
    page = (tmp_path / "page.md").read_text()
    row = "2.99 M | 30 min | 2.50 ± 0.03 | 2.40 ± 0.03 | 0.50 | 0.25 | 3/3, 3/3 |"
    assert page.count(f"| [`distillation` (EAGLE-3's own)](../../configs/ablation/eagle3.yaml) | {row}") == 1
    assert "[the target]" not in page, "there is nothing yet to compare it with"
    assert "loss-topk.yaml) | 2.99 M | 30 min | 2.41 ± 0.03 | 2.31 ± 0.03 |" in page
    assert "Not in these tables: HASS." in page
    assert "Every run trains 2 epochs of 1.5 million tokens" in page
    assert "regenerated: 9 conversations, 2,999,000 tokens, 1,500,000 of them the assistant's" in page
    for picture in ("lengths", "depths", "training", "losses"):
        assert f"](page-{picture}.png)" in page
        assert (tmp_path / f"page-{picture}.png").stat().st_size > 5000
    assert json.loads((tmp_path / "page.json").read_text())["results"] == results
    write_page(tmp_path / "alone", data, {"hass": results["eagle3"]}, [])
    assert f"| [HASS](../../configs/ablation/hass.yaml) | {row}" in (tmp_path / "alone.md").read_text()


def test_what_the_page_holds_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    data = {"budget": 1_200_000, "max_length": 384, "target": "t", "sets": {}}
    runs = {name: Run(name, tmp_path) for name in ("eagle3", "hass", "eagle")}
    options = {"tree": "chain:2"}
    results = {name: fake_result(name, 2.5) | {"options": options} for name in ("eagle3", "hass", "gone")}
    results["eagle3"]["settings"] = runs["eagle3"].settings()
    results["hass"]["settings"] = runs["hass"].settings() | {"seed": 1}
    assert read_page(tmp_path / "page", data, runs, options) == {}
    write_page(tmp_path / "page", data, {name: results[name] for name in ("eagle3", "hass")}, [])
    (tmp_path / "page.json").write_text(json.dumps({"data": data, "results": results}))
    assert read_page(tmp_path / "page", data, runs, options) == {"eagle3": results["eagle3"]}
    assert read_page(tmp_path / "page", data, runs, {"tree": "dynamic"}) == {}
    assert read_page(tmp_path / "page", data | {"budget": 8000}, runs, options) == {}


@pytest.mark.slow
def test_the_whole_of_it_and_going_on(tmp_path: Path) -> None:
    """Replies, two runs and their page; a second call does what is missing and nothing else."""
    output, page = tmp_path / "out", tmp_path / "page"
    command = [
        sys.executable,
        str(REPOSITORY / "scripts/benchmarks/ablation.py"),
        "--output",
        str(output),
        "--page",
        str(page),
    ]
    command += ["--budget", "4000", "--num_prompts", "2", "--max_new_tokens", "16", "--only", "eagle3", "eagle3-human"]
    people = ["--conversations", "examples/conversations.jsonl.gz", "--num_conversations", "32"]
    broken = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert broken.returncode
    assert broken.stderr.startswith("ablation.py: ")
    assert "give --conversations FILE" in broken.stderr
    done = subprocess.run([*command[:-1], *people], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = (output / "eagle3" / "result.json").read_text()
    assert json.loads(first)["curve"] == [] or json.loads(first)["training"]["tokens"] > 1500
    assert "people" not in page.with_suffix(".md").read_text().partition("Who wrote")[2].partition("**The papers")[0]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "eagle3:" not in done.stdout
    assert "eagle3-human: acceptance length" in done.stdout
    assert (output / "eagle3" / "result.json").read_text() == first
    assert "[people]" in page.with_suffix(".md").read_text()
