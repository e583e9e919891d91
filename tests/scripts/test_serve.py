"""The program that serves, as a process of its own, and the benchmark that loads it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from draftsmith.inference.serving.server import bind
from draftsmith.scripts import serve
from draftsmith.scripts.benchmarks import serving
from draftsmith.scripts.benchmarks.serving import Answer, ServingArguments
from tests.conftest import CHAT_TARGET, REPOSITORY

HEADS = str(REPOSITORY / "examples" / "heads" / "eagle3")
SECONDS = 120


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_texts_under_load_and_the_end_by_a_signal(tmp_path: Path) -> None:
    """Six clients at once get the texts that the target gives alone; then a stream is cut off by SIGTERM."""
    args = ServingArguments(
        target=str(CHAT_TARGET), prompts=str(REPOSITORY / "examples" / "prompts.jsonl"), clients=6, requests=9
    )
    args.temperature, args.max_new_tokens, args.max_batch_size = 0.7, 24, 4
    asks = serving.draw_asks(args)
    _, tokenizer, texts = serving.decode_alone(args, asks)
    words = [*serving.server_words(args, HEADS), "--drain_seconds", "0", "--tree", "dynamic:3,2,6", "--threads", "1"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[0].startswith("chat-13m with eagle3, none: at most 4 replies of 1024 tokens at once")
        address = lines[1].partition("serving at ")[2].partition("/v1")[0]
        answers, seconds = asyncio.run(serving.ask_all(args, "eagle3", address, asks))
        row = serving.make_row("eagle3", [(answers, seconds)], texts, tokenizer)
        assert (row["requests"], row["texts_that_differ"]) == (9, 0)
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=SECONDS) as reply:
            stream = reply.iter_lines()
            next(stream)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            last = [line for line in stream if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        process.wait(SECONDS)
        assert time.monotonic() - began < 15
        assert process.stdout.read() == ""


def test_the_numbers_of_a_contender() -> None:
    answers = [Answer(number, "one two", 0.1 * number, 1.0 + number) for number in range(4)]

    def tokenize(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    row = serving.make_row("x", [(answers[:2], 4.0), (answers[2:], 1.0)], ["one two"] * 3 + ["other"], tokenize)
    assert row["tokens_per_second"] == 8 / 5
    assert row["tokens_per_second_by_round"] == [1.0, 4.0]
    assert row["latency_seconds"] == {"p50": 3.0, "p90": 4.0, "p99": 4.0}
    assert row["texts_that_differ"] == 1
    assert row["seconds"] == 5.0
    assert serving.percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}


def test_requests_are_repeated_until_the_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [serving.Ask("a", 1, 0), serving.Ask("b", 1, 1)]
    assert list(serving.in_turn(asks, 0)) == list(enumerate(asks))
    monkeypatch.setattr(time, "monotonic", iter(range(100)).__next__)
    assert [number for number, _ in serving.in_turn(asks, 3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "got --max_batch_size 0: give at least 1"),
        ({"threads": 0}, "got --threads 0: give at least 1"),
        ({"port": 70000}, "got --port 70000"),
        ({"drain_seconds": -1.0}, "got --drain_seconds -1.0"),
        ({"tree": "chain"}, "got --tree chain without a drafter"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.ServeArguments(target="x", **options)  # type: ignore[arg-type]


def test_two_heads_of_one_name_are_refused() -> None:
    args = serve.ServeArguments(target=str(CHAT_TARGET), heads=[HEADS, HEADS])
    with pytest.raises(ValueError, match="got two --heads called eagle3"):
        serve.build_scheduler(args)


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}"):
            serve.run(serve.ServeArguments(target="./nowhere", port=port))


def test_replies_are_no_longer_than_the_target_reads() -> None:
    scheduler, _ = serve.build_scheduler(serve.ServeArguments(target=str(CHAT_TARGET), max_batch_size=1))
    assert scheduler.limits.max_length == scheduler.target.max_length
