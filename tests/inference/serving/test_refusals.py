"""What a server refuses: in OpenAI's shape, without a traceback, and without harm to others."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.inference import Target
from draftsmith.inference.serving import app
from draftsmith.inference.serving.protocol import ChatRequest, CompletionRequest
from draftsmith.inference.serving.scheduler import Limits
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import MODEL, Running, running

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}


@pytest.fixture
def client(served: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=SECONDS) as one:
        yield one


def assert_refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    (name, error), *rest = reply.json().items()
    assert name == "error"
    assert not rest
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in reply.text
    assert "\n" not in error["message"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 300}]}, "max_tokens"),
        ({"messages": [{"no": "role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "contents": "Hello"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "system"}, *CHAT["messages"]]}, "messages"),
        ({"messages": [{"role": "assistant", "refusal": 5}, *CHAT["messages"]]}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "look"}}, *CHAT["messages"]]}, "messages"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"heads": "absent"}, "heads"),
        ({"heads": "none", "tree": "chain"}, "tree"),
        ({"tree": "/etc/passwd"}, "tree"),
        ({"tree": "configs/trees/medusa.yaml"}, "tree"),
        ({"tree": "dynamic:9,9,999"}, "tree"),
        ({"tree": "chain:0"}, "tree"),
        ({"tree": "dynamic:16,9999,64"}, "tree"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"padding": "max_length", "max_length": 10**10}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"seed": 2**70}, "seed"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_bad_options_are_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert assert_refused(client.post("/chat/completions", json=CHAT | change))["param"] == param


def test_images_are_refused_by_their_type(client: httpx.Client) -> None:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "cat.png"}}]
    error = assert_refused(
        client.post("/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": content}]})
    )
    assert "a part is of type 'image_url': this server reads text" in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 4096]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a"] * 13}, "n"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completions_are_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert assert_refused(client.post("/completions", json=PLAIN | change))["param"] == param


def test_values_that_ask_for_nothing_are_allowed(client: httpx.Client) -> None:
    nothing = {"echo": False, "best_of": 1, "suffix": None, "user": "me", "logit_bias": {}, "stop": None}
    nothing |= {"response_format": {"type": "text"}, "presence_penalty": 0, "top_k": -1}
    assert client.post("/completions", json=PLAIN | nothing).status_code == 200


def test_null_is_the_default(client: httpx.Client) -> None:
    """For every field that has a default."""
    for path, kind, body in (("chat/completions", ChatRequest, CHAT), ("completions", CompletionRequest, PLAIN)):
        nulls = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
        assert {"n", "stream", "logprobs", "presence_penalty", "frequency_penalty"} <= nulls.keys()
        body = body | {"temperature": 0}
        given, left_out = client.post(path, json=nulls | body), client.post(path, json=body)
        assert given.status_code == 200, given.text
        assert given.json()["choices"] == left_out.json()["choices"]
    assert_refused(client.post("/completions", json=PLAIN | {"prompt": None}))
    ends = {"stream": True, "stream_options": {"include_usage": None}}
    assert client.post("/completions", json=PLAIN | ends).status_code == 200


def test_other_models_routes_and_methods(client: httpx.Client, served: Running) -> None:
    error = assert_refused(client.post("/chat/completions", json=CHAT | {"model": "other"}), 404)
    assert error["code"] == "model_not_found"
    assert_refused(client.get("/nowhere"), 404)
    assert_refused(client.get("/chat/completions"), 405)
    assert_refused(client.post("/completions", content=json.dumps(PLAIN)), 415)
    with served.client() as own, pytest.raises(openai.BadRequestError, match="nonsense"):
        own.completions.create(model=MODEL, prompt="x", extra_body={"nonsense": 1})


def test_grammars_need_their_library(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar.contrib.hf", None)
    error = assert_refused(client.post("/chat/completions", json=CHAT | {"response_format": {"type": "json_object"}}))
    assert error["param"] == "response_format"
    assert "pip install xgrammar" in error["message"]


def test_bodies_are_bounded(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    assert_refused(client.post("/completions", json=PLAIN | {"prompt": "x" * 1000}), 413)


def spoil(body: bytes, draws: random.Random) -> bytes:
    """A valid body with something cut, doubled, replaced or inserted."""
    begin, end = sorted(draws.sample(range(len(body) + 1), 2))
    match draws.randrange(5):
        case 0:
            return body[:begin]
        case 1:
            return body[:begin] + body[end:]
        case 2:
            return body[:end] + body[begin:]
        case 3:
            return body[:begin] + draws.randbytes(draws.randrange(1, 9)) + body[begin:]
    words = [b"null", b"-1", b"1e999", b"[]", b"{}", b'""', b"true", b"NaN", b"[" * 500, b'"\\ud800"', b"123456789" * 9]
    return body[:begin] + draws.choice(words) + body[end:]


def test_malformed_bodies(served: Running) -> None:
    draws = random.Random(0)
    options = {"temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 3, "logit_bias": {"5": 1.0}}
    bodies = [("chat/completions", CHAT | options), ("completions", PLAIN | options | {"prompt": [5, 6, 7]})]
    statuses: list[int] = []
    with httpx.Client(base_url=served.url, timeout=SECONDS, headers={"content-type": "application/json"}) as client:
        for _ in range(150):
            path, body = draws.choice(bodies)
            reply = client.post(f"/{path}", content=spoil(json.dumps(body).encode(), draws))
            statuses.append(reply.status_code)
            if reply.status_code != 200:
                assert_refused(reply, reply.status_code)
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(400) > 75
    served.wait_until_idle()
    assert served.metric("cache_rows_used") == 0


def test_a_client_that_goes_away_frees_its_rows(served: Running) -> None:
    """From a stream, while it waits for a whole reply, and while it is in the queue."""
    endless = PLAIN | {"max_tokens": 190, "n": 6}
    before = served.metric("request_success_total", finished_reason="abort") or 0.0
    for is_stream in (True, False):
        with ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=0.3))
            if is_stream:
                lines = stack.enter_context(
                    client.stream("POST", f"{served.url}/completions", json=endless | {"stream": True})
                ).iter_lines()
                next(lines)
            else:
                stack.enter_context(pytest.raises(httpx.ReadTimeout))
                client.post(f"{served.url}/completions", json=endless | {"n": 12})
        served.wait_until_idle()
    assert served.metric("request_success_total", finished_reason="abort") >= before + 6
    assert served.metric("cache_rows_used") == 0


def test_a_slow_reader_delays_nobody(served: Running) -> None:
    body = PLAIN | {"max_tokens": 150, "stream": True}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=SECONDS))
        lines = stack.enter_context(client.stream("POST", f"{served.url}/completions", json=body)).iter_lines()
        next(lines)
        assert httpx.post(f"{served.url}/completions", json=PLAIN, timeout=SECONDS).status_code == 200
        served.wait_until_idle()
        assert sum(line.startswith("data: {") for line in lines) > 10


def test_a_full_queue_says_when_to_come_back(served_target: Target, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    limits = Limits(max_rows=1, max_length=100, max_waiting=2)
    with running(served_target, chat_tokenizer, limits=limits) as served:
        body = PLAIN | {"max_tokens": 60}
        statuses: list[int] = []

        def ask() -> None:
            reply = httpx.post(f"{served.url}/completions", json=body, timeout=SECONDS)
            statuses.append(reply.status_code)
            if reply.status_code == 429:
                assert_refused(reply, 429)
                assert int(reply.headers["retry-after"]) >= 1

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert set(statuses) == {200, 429}
        assert served.metric("request_refused_total", status="429") == statuses.count(429)


def test_keys(served_target: Target, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    limits = Limits(max_rows=1, max_length=100)
    with running(served_target, chat_tokenizer, limits=limits, api_key="sesame") as served:
        for given in (None, "Bearer open", "sesame", "Bearer \u00e9"):
            headers = {} if given is None else {"authorization": given.encode()}
            for path in ("/v1/models", "/metrics"):
                assert_refused(httpx.get(f"{served.address}{path}", headers=headers), 401)
        right = {"authorization": "Bearer sesame"}
        assert httpx.get(f"{served.url}/models", headers=right).status_code == 200
        assert httpx.get(f"{served.address}/health").status_code == 200


def test_the_end_of_a_server_ends_streams_with_an_error(
    served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A stream that would take longer than the server waits; then requests are refused."""
    limits = Limits(max_rows=1, max_length=250)
    with running(served_target, chat_tokenizer, limits=limits, drain_seconds=0.0) as served, httpx.Client() as client:
        body = PLAIN | {"max_tokens": 240, "stream": True, "heads": "none"}
        with client.stream("POST", f"{served.url}/completions", json=body, timeout=SECONDS) as reply:
            lines = reply.iter_lines()
            next(lines)
            began = time.monotonic()
            served.server.should_exit = True
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        served.thread.join(SECONDS)
        assert time.monotonic() - began < 5
