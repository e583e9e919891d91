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

from draftsmith.scripts import serve
from draftsmith.scripts.benchmarks import serving
from draftsmith.scripts.benchmarks.serving import ServingArguments
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "got --max_batch_size 0: give at least 1"),
        ({"tree": "chain"}, "got --tree chain without a drafter"),
    ],
)
def test_options_that_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.ServeArguments(target="x", **options)  # type: ignore[arg-type]
