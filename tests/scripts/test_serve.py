"""The program that serves, as a process of its own."""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from draftsmith.inference import Target
from draftsmith.inference.serving.server import bind
from draftsmith.scripts import serve
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.inference.serving.test_replies import texts_alone

HEADS = str(REPOSITORY / "examples" / "heads" / "eagle3")
SECONDS = 120
WITHOUT_TRAINING = """
import sys
sys.modules |= dict.fromkeys(("accelerate", "datasets"))
import draftsmith.scripts.generate
from draftsmith import OnlineLearner
from draftsmith.scripts import serve
sys.exit(serve.main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_text_and_the_end_by_a_signal(chat_target: Any, chat_tokenizer: Any) -> None:
    """A client gets the text that the target gives alone; then a stream is cut off by SIGTERM. Serving, chatting and
    learning need no packages of training."""
    words = ["-c", WITHOUT_TRAINING, "--target", str(CHAT_TARGET), "--dtype", "float32", "--port", "0"]
    words += ["--max_batch_size", "4", "--max_length", "1024", "--heads", HEADS, "--tree", "dynamic:3,2,6"]
    words += ["--drain_seconds", "0", "--threads", "1"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[0].startswith("chat-13m with eagle3, none: at most 4 replies of 1024 tokens at once")
        url = lines[1].partition("serving at ")[2].partition("/v1")[0] + "/v1/completions"

        body: dict[str, Any] = {"prompt": [5, 9, 11], "max_tokens": 24, "temperature": 0.7, "seed": 5}
        text = httpx.post(url, json=body, timeout=SECONDS).json()["choices"][0]["text"]
        sampled = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 24}
        assert [text] == texts_alone(Target(chat_target), chat_tokenizer, [5, 9, 11], **sampled)
        body = {"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as reply:
            stream = reply.iter_lines()
            next(stream)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            last = [line for line in stream if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        process.wait(SECONDS)
        assert time.monotonic() - began < 15
        assert process.stdout.read() == ""


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port}: .*--port 0"):
            serve.run(serve.ServeArguments(target="./nowhere", port=port))
    with pytest.raises(ValueError, match="--host nowhere"):
        bind("nowhere.invalid", 0)


def test_replies_are_no_longer_than_the_target_reads() -> None:
    scheduler, _ = serve.build_scheduler(serve.ServeArguments(target=str(CHAT_TARGET), max_batch_size=1))
    assert scheduler.limits.max_length == scheduler.target.max_length


def test_too_little_memory_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(serve, "Scheduler", fail)
    args = serve.ServeArguments(target=str(CHAT_TARGET), max_batch_size=100_000)
    error: Exception = RuntimeError("can't allocate memory: you tried to allocate 1048576000000 bytes")
    with pytest.raises(ValueError, match=r"lower --max_batch_size \(100000\)"):
        serve.build_scheduler(args)
    error = NotImplementedError("this layer has no mask")
    with pytest.raises(NotImplementedError, match="no mask"):
        serve.build_scheduler(args)
