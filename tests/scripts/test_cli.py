"""`draftsmith NAME`: every program under one command, its help, and errors of one line."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from draftsmith.inference.targets import files
from draftsmith.scripts import cli
from draftsmith.scripts.shared.model_loading import check_device, check_folder
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.test_releases import find_pin


@pytest.fixture(autouse=True)
def _restore_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_help_lists_every_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.PROGRAMS:
        assert f"\n  {name} " in text
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_a_near_program_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bnech"]) == 2
    assert "'bnech': did you mean bench" in capsys.readouterr().err


def test_the_release() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "draftsmith", "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["draftsmith", version("draftsmith")]


def compute_help(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `--help` of a program prints without the file."""
    sys.argv = [f"draftsmith {name}", "--help"]
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(cli.PROGRAMS[name][0]).main()
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_the_help_of_each_program_is_one_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`WRITE_HELP=1 pytest tests/scripts/test_cli.py -k one_screen` writes the files after options have changed."""
    if name == "train" and version("transformers") != find_pin():
        pytest.skip("its help has texts of transformers, which change with the release")
    text, file = compute_help(name, capsys), cli.HELP / f"{name}.txt"
    if os.environ.get("WRITE_HELP"):
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text
    assert text.startswith(f"usage: draftsmith {name} ")
    assert "\nexamples:\n  " in text
    assert len(text.splitlines()) <= 46
    module = importlib.import_module(cli.PROGRAMS[name][0])
    for option in " ".join(getattr(module, "GROUPS", {}).values()).replace("served_by", "for").split():
        assert f"--{option} " in text or f"--[no_]{option} " in text, "GROUPS names an option that is not there"
    options = [word for line in text.splitlines() for word in line.split()[:1] if word.startswith("--")]
    assert options
    assert not [option for option in options if "-" in option[2:]], "options are shown with underscores"


def test_help_imports_nothing_heavy() -> None:
    """Not even what the program needs: help is there before an extra is installed, and at once."""
    code = (
        "import sys; from draftsmith.scripts import cli\n"
        "for name in cli.PROGRAMS: assert cli.main([name, '--help']) == 0\n"
        "sys.exit(' '.join({'torch', 'transformers', 'rich', 'fastapi', 'datasets'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TARGET = ["--target", str(CHAT_TARGET)]
PROMPTS = ["--prompts", str(REPOSITORY / "examples" / "prompts.jsonl")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", *TARGET, "--prompt", "Hi", "--device", "cuda:99"], "--device cuda:99"),
        (["chat", *TARGET, "--prompt", "Hi", "--device", "banana"], "--device banana"),
        (["chat", "--target", "./nowhere", "--prompt", "Hi"], "./nowhere"),
        (["chat", *TARGET, "--heads", "examples/nowhere", "--prompt", "Hi"], "examples/nowhere"),
        (["chat", *TARGET, "--max-new-token", "3"], "'--max_new_token'|'--max-new-token'.*--max_new_tokens"),
        (["chat", *TARGET, "--max_new_tokens", "three"], "--max_new_tokens.*'three'"),
        (["chat"], "--target"),
        (["bench", *TARGET, "--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl"),
        (["chat", *TARGET, "--heads", "examples/heads/eagle4", "--prompt", "Hi"], "examples/heads/eagle4"),
        (
            ["export", *TARGET, "--heads", "HEADS", "--format", "sglan", "--output", "OUT"],
            "--format 'sglan': .*mean sglang",
        ),
        (["train", *TARGET, "--dataset", "d.jsonl", "--head_type", "eagl3"], "'eagl3'; did you mean eagle3"),
        (["train", *TARGET, "--dataset", "examples/nowhere", "--head_type", "mtp"], "examples/nowhere does not exist"),
        (["train", "--target", "examples/nowhere", "--dataset", "d.jsonl"], "examples/nowhere"),
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


@pytest.mark.parametrize("words", [["chat", "--ngrams"], ["bench", *PROMPTS]])
def test_the_forms_of_a_tree_are_listed_one_a_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, *TARGET, "--tree", "banana"])
    first, *forms = str(ended.value.code).splitlines()
    assert "'banana'" in first
    assert "auto" in [form.split()[0] for form in forms]


@pytest.mark.parametrize("proxies", [{}, {"https": "http://proxy"}])
def test_without_the_hubs_address_its_cache_is_read(proxies: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_address(*words: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", find_no_address)
    monkeypatch.setattr(files, "getproxies", lambda: proxies)
    files.settle_connection.cache_clear()
    check_folder("organisation/model")
    assert (not proxies) == constants.HF_HUB_OFFLINE
    files.settle_connection.cache_clear()


def test_ctrl_c_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(importlib, "import_module", interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *TARGET])
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL, "a second one ends at once"
    assert ended.value.code == 130
    (line,) = capsys.readouterr().err.split("\n", 1)[1].splitlines()
    assert line.endswith(f". Again: draftsmith bench --target {CHAT_TARGET}")


def test_names_of_the_hub_are_left_to_transformers() -> None:
    check_folder("Qwen/Qwen3-8B")
    check_folder("gpt2")
    with pytest.raises(ValueError, match="no such folder"):
        check_folder("examples/heads/nowhere")
    assert check_device("cpu") == "cpu"
    assert check_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
