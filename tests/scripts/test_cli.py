"""`draftsmith NAME`: every program under one command, its help, and errors of one line."""

from __future__ import annotations

import importlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.scripts import cli
from draftsmith.scripts.shared.model_loading import check_device, check_folder
from tests.conftest import CHAT_TARGET, REPOSITORY


@pytest.fixture(autouse=True)
def _restore_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")


def test_the_help_lists_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.PROGRAMS:
        assert f"\n  {name} " in text
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_an_unknown_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bnech"]) == 2
    assert "'bnech'" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_the_help_of_each_program_is_one_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: draftsmith {name} ")
    assert "\nexamples:\n  " in text
    assert len(text.splitlines()) <= 46
    module = importlib.import_module(cli.PROGRAMS[name][0])
    for option in " ".join(getattr(module, "GROUPS", {}).values()).split():
        assert f"--{option} " in text or f"--[no_]{option} " in text, "GROUPS names an option that is not there"
    options = [word for line in text.splitlines() for word in line.split()[:1] if word.startswith("--")]
    assert options
    assert not [option for option in options if "-" in option[2:]], "options are spelled with underscores"


TARGET = ["--target", str(CHAT_TARGET)]
PROMPTS = ["--prompts", str(REPOSITORY / "examples" / "prompts.jsonl")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", *TARGET, "--prompt", "Hi", "--device", "cuda:99"], "--device cuda:99"),
        (["chat", *TARGET, "--prompt", "Hi", "--device", "banana"], "--device banana"),
        (["chat", *TARGET, "--prompt", "Hi", "--ngrams", "--tree", "banana"], "tree.*'banana'"),
        (["chat", "--target", "./nowhere", "--prompt", "Hi"], "./nowhere"),
        (["chat", *TARGET, "--heads", "examples/nowhere", "--prompt", "Hi"], "examples/nowhere"),
        (["chat", *TARGET, "--max-new-tokens", "3"], "'--max-new-tokens'.*--max_new_tokens"),
        (["chat", *TARGET, "--max_new_tokens", "three"], "--max_new_tokens.*'three'"),
        (["chat"], "--target"),
        (["bench", *TARGET, "--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl"),
        (["bench", *TARGET, *PROMPTS, "--tree", "banana"], "tree.*'banana'"),
        (["data", *TARGET, "--prompts", "nowhere.jsonl", "--output", "OUT"], "nowhere.jsonl"),
        (["train", *TARGET, "--dataset", "nowhere.jsonl", "--head_type", "medusa"], "nowhere.jsonl"),
        (["inspect", *TARGET, "--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_input_ends_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        cli.main([str(tmp_path / "out.jsonl") if word == "OUT" else word for word in words])
    line = str(ended.value.code)
    assert re.search(message, line)
    assert "\n" not in line


def test_names_of_the_hub_are_left_to_transformers() -> None:
    check_folder("Qwen/Qwen3-8B")
    check_folder("gpt2")
    with pytest.raises(ValueError, match="no such folder"):
        check_folder("examples/heads/nowhere")
    assert check_device("cpu") == "cpu"
    assert check_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
