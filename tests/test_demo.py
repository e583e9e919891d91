"""`make demo` with tiny budgets, and its parts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import HfArgumentParser, PreTrainedModel

from tests.conftest import CHAT_TARGET, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))

import demo

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.training.options.command_line import parse_arguments

QUESTIONS = ["What do you like about autumn?", "Tell me a story.", "Where do swallows go?", "Thank you!"]


@pytest.fixture
def args(tmp_path: Path) -> demo.DemoArguments:
    conversations, prompts = tmp_path / "conversations.jsonl", tmp_path / "prompts.jsonl"
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": f"You ask: {text}"}] for text in QUESTIONS * 4]
    conversations.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))
    prompts.write_text("".join(json.dumps({"id": text[:4], "turns": [text]}) + "\n" for text in QUESTIONS))
    return demo.DemoArguments(
        target=str(CHAT_TARGET),
        conversations=str(conversations),
        prompts=str(prompts),
        output=str(tmp_path / "output"),
        max_steps=2,
        train_options=[
            "per_device_train_batch_size=2",
            "max_eval_samples=2",
            "num_eval_prompts=1",
            "eval_max_new_tokens=4",
        ],
        num_prompts=2,
        max_new_tokens=6,
        repeats=1,
        threads=1,
        compile=False,
    )


def test_recipes_are_of_known_kinds() -> None:
    """Not of all: each adds minutes to the demo."""
    assert {"medusa", "eagle3"} <= set(demo.find_recipes()) <= set(HEAD_TYPES)


def test_the_training_command_is_one_that_the_trainer_takes(
    args: demo.DemoArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    for kind, recipe in demo.find_recipes().items():
        command = demo.train_command(recipe, Path("examples/output/trained") / kind, args)
        model, data, training, *_ = parse_arguments(command[1:])
        assert model.head_type == kind
        assert (data.dataset, data.max_eval_samples) == ([args.conversations], 2)
        assert (training.max_steps, training.output_dir) == (2, f"examples/output/trained/{kind}")


def test_defaults_need_no_option_and_no_file_of_the_user() -> None:
    (defaults,) = HfArgumentParser(demo.DemoArguments).parse_args_into_dataclasses([])
    for path in (defaults.target, defaults.conversations, defaults.prompts):
        assert (REPOSITORY / path).exists(), f"{path} is not in the repository"
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert f"/{defaults.output}/" in ignored


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--num_prompts=0", "--num_prompts 0"),
        ("--repeats=0", "--repeats 0"),
        ("--max_new_tokens=0", "--max_new_tokens 0"),
        ("--max_steps=0", "--max_steps 0"),
        ("--threads=0", "--threads 0"),
        ("--train_options=foo", "--train_options 'foo'"),
        ("--tree=dynamc", "tree is 'dynamc'"),
        ("--prompts=nowhere.jsonl", "--prompts nowhere.jsonl"),
        ("--max_new_tokens=1024", "1024 tokens"),
    ],
)
def test_wrong_options_end_it_before_training(option: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(sys, "argv", ["demo.py", option])
    with pytest.raises(SystemExit) as exit_:
        demo.main()
    assert str(exit_.value.code).startswith("demo.py: ")
    assert message in str(exit_.value.code)


def test_the_sample_stands_side_by_side(
    chat_target: PreTrainedModel, chat_tokenizer: Any, args: demo.DemoArguments
) -> None:
    args.max_new_tokens, args.tree, args.compile, args.repeats = 24, "chain", False, 1
    console = Console(file=io.StringIO(), width=400)
    demo.show_sample("n-grams", NgramDrafter(), chat_tokenizer, Target(chat_target), args, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert demo.SAMPLE in text
    assert "plain decoding: " in text
    assert "n-grams, the same text: " in text
    [row] = [line for line in text.splitlines() if "Tom Brady" in line]
    plain, drafted = (cell.strip() for cell in row.strip("│").split("│"))
    assert drafted.replace("[", "").replace("]", "") == plain


@pytest.mark.ci
@pytest.mark.slow
def test_demo_from_training_to_report(args: demo.DemoArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    console = Console(file=io.StringIO(), width=150)
    rows = demo.run(args, console)
    output = Path(args.output)
    fresh = {f"{kind}, trained here" for kind in demo.find_recipes()}
    assert fresh <= {row.name for row in rows}
    assert all(row.num_identical == row.num_compared == 2 for row in rows)
    (report,) = json.loads((output / "report.json").read_text())["reports"]
    assert set(report["environment"]["training_seconds"]) == set(demo.find_recipes())
    assert [row["name"] for row in report["rows"]] == [row.name for row in rows]
    assert (output / "plot.png").read_bytes().startswith(b"\x89PNG")
    for kind in demo.find_recipes():
        assert (output / "trained" / kind / "model.safetensors").is_file()
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "$ draftsmith train --config configs/train/" in printed
    assert "Fastest drafter: " in printed
