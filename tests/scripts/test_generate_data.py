"""The program that writes data: the same from any number of processes, with any heads, and after any interruption."""

import gzip
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.scripts import cli, generate_data
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.synthesis.synthesizer import synthesize
from tests.processes import limited_file_size
from tests.tiny_tokenizers import read_whole_words
from tests.training.conversation_cases import write
from tests.training.openai_server import serving
from tests.training.runner import WORDS, save_chat_target

# Hot, because the tiny target's texts are too much alike otherwise.
SETTINGS = ("--temperature=2", "--max_new_tokens=16", "--batch_size=4", "--device=cpu", "--no_keep_truncated")
NUM_PROMPTS = 30
STOP_IDS = {3, 10, 20, 30, 40}  # several, or the tiny target would hardly come to an end


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_chat_target(tmp_path_factory.mktemp("target"))
    GenerationConfig(eos_token_id=sorted(STOP_IDS)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained ones; coupled drafting lets some of their drafts be accepted all the same."""
    folder = tmp_path_factory.mktemp("heads")
    model = AutoModelForCausalLM.from_pretrained(target)
    create_heads("medusa", Target(model.eval()), num_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of one to three turns."""
    rows = [
        {"id": f"p{i}", "turns": [" ".join(WORDS[i : i + 3 + i % 4])] * (1 + i % 3), "source": "test"}
        for i in range(NUM_PROMPTS)
    ]
    return Path(write(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows))


Run = Callable[..., str]


def run_program(target: Path, output: Path, *options: Any) -> None:
    words = ["--target", target, *SETTINGS, "--output", output, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate_data.py", *map(str, words)])
        generate_data.main()


@pytest.fixture
def run(target: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process; returns what it prints."""

    def run_with(output: Path, *options: Any) -> str:
        run_program(target, output, *options)
        return capsys.readouterr().out

    return run_with


@pytest.fixture(scope="module")
def expected(
    target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes | dict[str, Any]]:
    """What one plain process writes at once: OUT, its dropped ones and its statistics."""
    output = tmp_path_factory.mktemp("expected") / "out.jsonl"
    run_program(target, output, "--prompts", prompts)
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "out.jsonl", "out.jsonl.dropped.jsonl", "out.jsonl.stats.json",
    ]  # fmt: skip
    return results(output)


def results(output: Path) -> dict[str, Any]:
    stats = json.loads(output.with_name(f"{output.name}.stats.json").read_text())
    counted = {name: stats[name] for name in ("conversations", "turns", "tokens", "dropped", "shortened", "settings")}
    written = gzip.decompress(output.read_bytes()) if output.suffix == ".gz" else output.read_bytes()
    return {"out": written, "dropped": output.with_name(f"{output.name}.dropped.jsonl").read_bytes(), "stats": counted}


def journals(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.glob(f"{output.name}.shard*"))


def test_the_reference_has_everything(expected: dict[str, Any], tmp_path: Path) -> None:
    """Good, dropped and shortened conversations, of several turns, in the order of the prompts; all counted."""
    rows = [json.loads(line) for line in expected["out"].splitlines()]
    dropped = [json.loads(line) for line in expected["dropped"].splitlines()]
    ids = [row["id"] for row in rows]
    assert ids == [name for name in (f"p{i}" for i in range(NUM_PROMPTS)) if name in ids]
    assert {*ids, *(record["id"] for record in dropped)} == {f"p{i}" for i in range(NUM_PROMPTS)}
    assert {len(row["messages"]) for row in rows} >= {2, 4}
    stats = expected["stats"]
    assert stats["conversations"] == len(rows)
    assert sum(entry["count"] for entry in stats["dropped"].values()) == len(dropped) > 0
    assert sum(entry["count"] for entry in stats["shortened"].values()) == sum("ended_by" in row for row in rows) > 0
    assert {"assistant turn truncated", "assistant turn special token inside"} <= stats["dropped"].keys()
    assert stats["tokens"] == sum(sum(row["turn_tokens"]) for row in rows)
    path = tmp_path / "out.jsonl"
    path.write_bytes(expected["out"])
    assert len(load_conversations([str(path)])) == len(rows)


def test_heads_batches_and_shards_change_nothing(
    run: Run, expected: dict[str, Any], prompts: Path, heads: Path, tmp_path: Path
) -> None:
    """Two of three shards, one with heads and one with another batch size; then the third puts all together."""
    output = tmp_path / "out.jsonl.gz"
    options = ("--prompts", prompts, "--num_shards", 3, "--shard_index")
    drafting = ("--heads", heads, "--tree", "dynamic:2,2,4", "--batch_size", 7)
    for index, changes in enumerate((drafting, ("--batch_size", 1), drafting)):
        assert not output.exists()
        told = run(output, *options, index, *changes)
        assert ("or a rerun, merges all shards" in told) == (index < 2)
    assert results(output) == expected
    assert journals(output) == []
    assert float(told.partition("acceptance length ")[2].split()[0]) > 1.0
    written = output.read_bytes()
    assert "0 of them new" in run(output, "--prompts", prompts)
    assert output.read_bytes() == written


class KilledError(Exception):
    """Stands for whatever breaks off a run."""


def test_a_broken_run_goes_on_where_it_stopped(
    run: Run, expected: dict[str, Any], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off after some conversations, by a kill within a line; then as two processes; then counted anew."""
    output = tmp_path / "out.jsonl"

    def break_off(*args: Any, **options: Any) -> Iterator[Any]:
        num_finished = 0
        for finished in synthesize(*args, **options):
            yield finished
            if (num_finished := num_finished + len(finished)) >= NUM_PROMPTS // 2:
                raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(generate_data, "synthesize", break_off)
        with pytest.raises(KilledError):
            run(output, "--prompts", prompts)
    (journal,) = output.parent.glob("out.jsonl.shard-00000-of-00001")
    journal.write_bytes(journal.read_bytes()[:-7])
    begun: list[str] = []

    def count(source: Any, conversations: Any, **options: Any) -> Iterator[Any]:
        begun.extend(conversation.id for conversation in conversations)
        yield from synthesize(source, conversations, **options)

    monkeypatch.setattr(generate_data, "synthesize", count)
    for rank in ("0", "1"):  # as accelerate and torchrun start them
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        run(output, "--prompts", prompts)
    assert 0 < len(begun) <= NUM_PROMPTS // 2 + 1
    assert results(output) == expected


def test_what_the_targets_generation_config_sets_is_recorded(
    run: Run, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the text, so a run does not go on under another one."""
    folder, output = tmp_path / "target", tmp_path / "out.jsonl"
    shutil.copytree(target, folder)
    own = {"do_sample": True, "repetition_penalty": 1.5, "min_p": 0.01, "top_k": 3, "stop_strings": ["@word1"]}
    GenerationConfig(eos_token_id=sorted(STOP_IDS), **own).save_pretrained(folder)
    options = ("--target", folder, "--prompts", prompts, "--num_conversations")
    read_whole_words(monkeypatch)
    told = run(output, *options, 4)
    expected = {name: own[name] for name in ("min_p", "repetition_penalty", "stop_strings")}  # --top_k is given
    assert results(output)["stats"]["settings"]["generation_config"] == expected
    assert "repetition_penalty 1.5" in told
    GenerationConfig(eos_token_id=sorted(STOP_IDS)).save_pretrained(folder)
    with pytest.raises(SystemExit):
        run(output, *options, 8)


def test_a_larger_plan_goes_on_from_a_finished_one(
    run: Run, expected: dict[str, Any], prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    run(output, "--prompts", prompts, "--num_conversations", 10)
    assert results(output)["stats"]["conversations"] < 10
    assert "20 of them new" in run(output, "--prompts", prompts)
    assert results(output) == expected


def test_own_conversations_are_the_same_in_any_number_of_processes(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz"
    options = ("--mode", "self", "--max_turns", 2, "--num_conversations")
    told = run(one, *options, 24, "--keep_truncated")
    for index in (1, 0):
        run(two, *options, 24, "--keep_truncated", "--num_shards", 2, "--shard_index", index)
    assert results(one) == results(two)
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    roles = [[message["role"] for message in row["messages"]] for row in rows]
    assert all(r in (["user", "assistant"], ["user", "assistant"] * 2) for r in roles)
    stats = results(one)["stats"]
    assert "assistant turn truncated" in stats["shortened"], "kept"
    assert "assistant turn truncated" not in stats["dropped"]
    cut = [message for row in rows for message in row["messages"] if message.get("truncated")]
    assert len(cut) == stats["shortened"]["assistant turn truncated"]["count"]
    for reason, entry in (*stats["dropped"].items(), *stats["shortened"].items()):
        assert f"{entry['count']:8} ({entry['share']:6.1%})  {reason}" in told


def test_an_endpoint_writes_the_same(
    run: Run, expected: dict[str, Any], prompts: Path, target: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    decoder = Decoder(AutoModelForCausalLM.from_pretrained(target).eval())
    with serving(decoder, AutoTokenizer.from_pretrained(target)) as server:
        server.stop_ids = {"user": STOP_IDS, "assistant": STOP_IDS}
        endpoint = ("--endpoint", server.url, "--endpoint_model", "tiny", "--concurrency", "4")
        told = run(output, "--prompts", prompts, *endpoint)
    written = results(output)
    assert written.pop("stats")["settings"].pop("is_from_endpoint")
    assert written == {"out": expected["out"], "dropped": expected["dropped"]}
    assert "tokens a second" in told


def test_ctrl_c_keeps_what_is_finished(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        yield next(iter(synthesize(*args, **options)))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(generate_data, "synthesize", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
    options = ("--mode", "self", "--num_conversations", "2000", "--output", str(tmp_path / "out.jsonl"))
    words = ["data", "--target", str(target), *SETTINGS, *options]
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    signal.signal(signal.SIGINT, handler)
    assert ended.value.code == 130
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("draftsmith data: interrupted; ")
    assert shlex.split(line.partition("Continue: ")[2]) == ["draftsmith", *words]
    (journal,) = tmp_path.glob("out.jsonl.shard-*")
    assert len(journal.read_text().splitlines()) > 1  # the first has the settings


# What goes wrong


def test_a_full_disk_loses_nothing(run: Run, expected: dict[str, Any], prompts: Path, tmp_path: Path) -> None:
    """Full while conversations are written, and while they are put together."""
    output = tmp_path / "out.jsonl"
    options = ("--prompts", prompts, "--num_shards", 3, "--shard_index")
    told = "out.jsonl{} cannot be written"
    with limited_file_size(1000), pytest.raises(SystemExit) as exit_:
        run(output, *options, 0)
    assert told.format(".shard-00000-of-00003") in str(exit_.value.code)
    run(output, *options, 0)
    run(output, *options, 1)
    with limited_file_size(len(expected["out"]) - 9), pytest.raises(SystemExit) as exit_:
        run(output, *options, 2)
    assert told.format("") in str(exit_.value.code)
    assert len(journals(output)) == len([*tmp_path.iterdir()]) == 3
    assert "0 of them new" in run(output, "--prompts", prompts)
    assert results(output) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--prompts", "BAD"], "line 1"), (["--prompts", "GOOD", "--output", "DIARY"], "diary.jsonl")],
)
def test_wrong_files_end_it_in_one_line(
    options: list[str], message: str, tmp_path: Path, prompts: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with files is said before the target is loaded."""
    (tmp_path / "bad.jsonl").write_text("3\n")
    (tmp_path / "diary.jsonl").write_text("Dear diary\n")
    places = {"BAD": tmp_path / "bad.jsonl", "GOOD": prompts, "DIARY": tmp_path / "diary.jsonl"}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded the target"))
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path / "out.jsonl", *(places.get(word, word) for word in options))
    assert str(exit_.value.code).startswith("draftsmith data: ")
    assert message in str(exit_.value.code)


def test_other_settings_are_not_mixed_into_a_file(run: Run, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    options = ("--prompts", prompts, "--num_conversations", 3)
    run(output, *options, "--num_shards", 2)
    for _ in range(2):  # a run that is not finished, and one that is
        with pytest.raises(SystemExit, match=r"\(seed was 0 and is 1; top_p was 1\.0 and is 0\.5\)"):
            run(output, *options, "--seed", 1, "--top_p", "0.5")
        run(output, *options)
