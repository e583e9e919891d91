"""What a server refuses: in OpenAI's shape, without a traceback, and without harm to others."""

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.inference import Target
from draftsmith.inference.serving import app
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
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        *(
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, "response_format")
            for schema in ({"not": {}}, {"allOf": 5}, {"type": "string", "format": ["a"]})
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"heads": "absent"}, "heads"),
        ({"heads": "none", "tree": "chain"}, "tree"),
        ({"tree": "/etc/passwd"}, "tree"),
        ({"tree": "dynamic:9,9,999"}, "tree"),
        ({"tree": "chain:0"}, "tree"),
        ({"tree": "dynamic:16,9999,64"}, "tree"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_bad_options_are_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert assert_refused(client.post("/chat/completions", json=CHAT | change))["param"] == param


def test_other_models_routes_and_methods(client: httpx.Client, served: Running) -> None:
    error = assert_refused(client.post("/chat/completions", json=CHAT | {"model": "other"}), 404)
    assert error["code"] == "model_not_found"
    assert_refused(client.get("/nowhere"), 404)
    assert_refused(client.get("/chat/completions"), 405)
    assert_refused(client.post("/completions", content=json.dumps(PLAIN)), 415)
    with served.client() as own, pytest.raises(openai.BadRequestError, match="nonsense"):
        own.completions.create(model=MODEL, prompt="x", extra_body={"nonsense": 1})


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
        for _ in range(60):
            path, body = draws.choice(bodies)
            reply = client.post(f"/{path}", content=spoil(json.dumps(body).encode(), draws))
            statuses.append(reply.status_code)
            if reply.status_code != 200:
                assert_refused(reply, reply.status_code)
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(400) > 30
    served.wait_until_idle()
    assert served.metric("num_requests_running") == 0


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
    assert served.metric("num_requests_running") == 0


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
        page = httpx.get(f"{served.address}/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
