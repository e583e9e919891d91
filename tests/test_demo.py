"""`make demo` with tiny budgets, and its parts."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.training.conversation_cases import sharegpt, write

sys.path.insert(0, str(REPOSITORY / "examples"))

import demo

from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.options.run_options import RunOptions, check_options

QUESTIONS = ["What do you like about autumn?", "Tell me a story.", "Where do swallows go?", "Thank you!"]
HEADS = REPOSITORY / "examples" / "heads" / "eagle3"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture
def args(tmp_path: Path) -> demo.DemoArguments:
    turns = [sharegpt(text, f"You ask: {text}") for text in QUESTIONS * 4]
    conversations = write(tmp_path / "conversations.jsonl", turns)
    return demo.DemoArguments(
        train_options=[
            f"dataset={conversations}",
            "time_budget=none",
            "max_steps=2",
            "per_device_train_batch_size=2",
            "max_eval_samples=2",
            "num_eval_prompts=1",
            "eval_max_new_tokens=4",
        ],
        max_new_tokens=12,
        repeats=1,
        compile=False,
    )


def run(args: demo.DemoArguments) -> str:
    console = Console(file=io.StringIO(), width=400)
    demo.run(args, console)
    return console.file.getvalue()


def test_the_training_command_is_one_that_the_trainer_takes() -> None:
    command = demo.train_command(demo.DemoArguments())
    start = command.index("train") + 1
    options = RunOptions(*parse_arguments([*command[start:], "--use_cpu", "true"]))
    check_options(options)
    assert options.run.time_budget == demo.DemoArguments().time_budget
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert any(options.training.output_dir.startswith(line.strip("/")) for line in ignored if line)


@pytest.mark.parametrize(
    ("option", "message"), [("--time_budget=soon", "time_budget 'soon'"), ("--tree=dynamc", "tree is 'dynamc'")]
)
def test_wrong_options_end_it_before_training(option: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(sys, "argv", ["demo.py", option])
    with pytest.raises(SystemExit) as exit_:
        demo.main()
    assert str(exit_.value.code).startswith("demo.py: ")
    assert message in str(exit_.value.code)


def test_replies_stand_side_by_side(args: demo.DemoArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the heads that were trained, and of n-grams where the model's heads are absent."""
    monkeypatch.setattr(demo, "train", lambda *_: None)
    monkeypatch.setattr(demo, "HEADS", HEADS)
    args.model, args.model_heads = str(CHAT_TARGET), "nowhere"
    first, second = run(args).split("SmolLM2-135M-Instruct")
    assert demo.CHAT_QUESTION in first
    assert demo.QUESTION in second
    assert "n-grams" in second
    for half in (first, second):
        titles, *rows = [line[1:-1].replace("┃", "│").split("│") for line in half.splitlines() if line[:1] in {*"│┃"}]
        assert "plain decoding: " in titles[0]
        assert "tokens per pass: " in titles[1]
        assert rows
        for plain, drafted in rows:
            assert drafted.replace("[", "").replace("]", "").strip() == plain.strip()


@pytest.mark.parametrize(("tree", "is_told"), [("auto", True), ("chain:3", False)])
def test_it_says_why_nothing_was_drafted(
    tree: str,
    is_told: bool,
    args: demo.DemoArguments,
    monkeypatch: pytest.MonkeyPatch,
    chat_target: Any,
    chat_tokenizer: Any,
) -> None:
    plain = demo.Recording(seconds=1.0)
    monkeypatch.setattr(demo, "record_side_by_side", lambda *_, **__: (plain, plain))
    console = Console(file=io.StringIO(), width=400)
    args.tree = tree
    ngrams = ("n-grams", demo.NgramDrafter())
    demo.show_reply("Hello", ngrams, chat_tokenizer, demo.Target.of(chat_target), args, console)
    assert ("chain:3" in console.file.getvalue()) == is_told


@pytest.mark.ci
@pytest.mark.slow
def test_from_training_to_the_end_without_the_package_index(
    args: demo.DemoArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(demo, "HEADS", tmp_path / "heads")
    args.model = str(tmp_path / "model")
    printed = run(args)
    assert (tmp_path / "heads" / "model.safetensors").is_file()
    assert "$ draftsmith train --config configs/train/" in printed
    assert demo.CHAT_QUESTION in printed
    assert demo.QUESTION not in printed
    assert "without the package index" in printed
