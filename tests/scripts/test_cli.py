"""`draftsmith NAME`: every program under one command, its help, and errors of one line."""

import importlib
import io
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
from huggingface_hub import constants

from draftsmith.inference.targets import files
from draftsmith.scripts import cli
from draftsmith.scripts.shared.model_loading import check_folder
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


THERE, ABSENT = f"--target {CHAT_TARGET}", "--target ./absent"
BENCH = f"bench {ABSENT} --prompts examples/prompts.jsonl"
DATA = f"data {ABSENT} --output OUT"
NO_SIZE = "--draft_vocab_data a.jsonl without --draft_vocab_size"
NO_HEADS = "--draft_vocab_size 512 without --heads"
NOPE = "there is no file or folder nope here, and no repository of that name could be read from the hub. Check the "
# Command -> what it says. Options are checked before a target is looked for.
WRONG_INPUT = {
    f"chat {THERE} --prompt Hi --device cuda:99": "--device cuda:99",
    f"chat {THERE} --heads examples/nowhere --prompt Hi": "examples/nowhere",
    f"chat {THERE} --max-new-token 3": "'--max_new_token'|'--max-new-token'.*--max_new_tokens",
    f"export {THERE} --heads HEADS --format sglan --output OUT": "--format 'sglan': .*mean sglang",
    f"train {THERE} --dataset d.jsonl --head_type eagl3": "'eagl3'; did you mean eagle3",
    f"inspect {THERE} --dataset nowhere.jsonl": "nowhere.jsonl",
    f"inspect {THERE} --dataset=": "dataset is '', which names nothing",
    "chat --target= --prompt Hi": "got ''",
    f"chat {ABSENT} --prompt=": "got --prompt ''",
    "chat --target nope --prompt Hi": NOPE,
    f"chat {THERE} --prompt Hi --drafter_model nope": NOPE,
    f"chat {THERE} --prompt Hi --heads nope": NOPE,
    f"{BENCH.replace(ABSENT, THERE)} --assistant nope": NOPE,
    f"inspect {THERE} --dataset nope": NOPE,
    "data --target nope --prompts examples/prompts.jsonl --output outputs/nope.jsonl": NOPE,
    "features --target nope --head_type medusa --dataset examples --output_dir outputs/nope": NOPE,
    **{f"train --target nope --dataset examples {heads}": NOPE for heads in ("", "--head_type medusa")},
    f"chat {THERE} --heads= --prompt Hi": "got ''",
    f"chat {THERE} --drafter_model= --prompt Hi": "got ''",
    f"chat {ABSENT} --temperature 1 --top_p 0": "--top_p 0.0",
    f"chat {ABSENT} --tree chain": "--heads, --drafter_model or --ngrams",
    f"chat {ABSENT} --acceptance rejection --temperature 1": "got --acceptance without --heads, --drafter_model",
    f"chat {ABSENT} --heads h --ngrams": "--heads and --ngrams",
    f"chat {ABSENT} --staged --drafter_model m --tree dynamic": "--staged with --tree dynamic",
    f"chat {ABSENT} --distributed": "got --distributed without --heads",
    f"chat {ABSENT} --distributed --ngrams --tree chain:2": "with --tree: servers verify chains",
    f"chat {ABSENT} --distributed --ngrams --compile": "with --compile",
    f"chat {ABSENT} --distributed --ngrams": "--distributed in a single process.* torchrun --nproc_per_node 2 ",
    f"chat {ABSENT} --ngrams --draft_vocab_data a.jsonl": NO_SIZE,
    f"chat {ABSENT} --ngrams --draft_vocab_size 512": NO_HEADS,
    f"serve {ABSENT} --ngrams --draft_vocab_data a.jsonl": NO_SIZE,
    f"serve {ABSENT} --ngrams --draft_vocab_size 512": NO_HEADS,
    f"serve {ABSENT} --max_batch_size 0": "got max_batch_size 0: it must be above 0",
    f"serve {ABSENT} --tree chain": "got --tree chain without a drafter",
    f"{BENCH} --draft_vocab_size 512": NO_HEADS,
    f"{BENCH} --temperature 0 -1": "--temperature -1.0",
    f"{BENCH} --acceptance rejection": "--acceptance rejection",
    f"{BENCH} --batch_size 2 2": "--batch_size 2 2",
    f"{BENCH} nowhere.jsonl": "--prompts nowhere.jsonl",
    f"{BENCH} README.md": "--prompts README.md is a file whose name ends in none",
    DATA: "--prompts",
    f"{DATA} --prompts nowhere.jsonl": "nowhere.jsonl",
    f"{DATA} --mode self": "--num_conversations",
    f"{DATA} --mode self --num_conversations 2 --temperature 0": "--temperature is 0",
    f"{DATA} --prompts p --num_shards 2 --shard_index 2": "--shard_index is 2",
    f"{DATA} --prompts p --endpoint http://h/v1 --heads h": "--heads",
    f"train {THERE} --dataset examples/conversations.jsonl.gz --max_length 0": "got max_length 0",
    f"train {THERE} --dataset examples/conversations.jsonl.gz --per_device_train_batch_size -1": "size -1",
    f"train {THERE} --dataset README.md": "dataset README.md is a file whose name ends in none",
    f"tree {ABSENT} --heads h --dataset d --output OUT --num_nodez 3": "num_nodez",
    f"tree {ABSENT} --heads h --dataset d --output OUT --num_ranks 0": "got num_ranks 0: it must be above 0",
    f"diagnose {ABSENT} --heads h --num_prompts 0": "got num_prompts 0",
}


@pytest.mark.parametrize(("command", "message"), WRONG_INPUT.items(), ids=lambda text: text[:60])
def test_wrong_input_ends_in_one_line(command: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    line = str(ended.value.code)
    assert re.search(message, line)
    assert "\n" not in line


def test_without_the_hubs_address_its_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_address(*words: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", find_no_address)
    monkeypatch.setattr(files, "getproxies", dict)
    files.settle_connection.cache_clear()
    check_folder("organisation/model")
    assert constants.HF_HUB_OFFLINE
    files.settle_connection.cache_clear()
