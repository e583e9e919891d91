"""A local server with OpenAI's protocol that decodes with a target of this process, and fails as it is told to."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftsmith.inference import Decoder
from draftsmith.training.synthesis.reply_decoding import TurnSettings, write_turns
from draftsmith.training.synthesis.turn_template import TurnTemplate

# What the server does instead of answering: a status with headers and a text, or None = the connection breaks.
Fault = tuple[int, dict[str, str], str] | None


class OpenAIServer(ThreadingHTTPServer):
    """Serves one target under the name "tiny".

    Attributes:
        faults: what happens to the next requests for texts, in turn.
        key: the key it wants, None for none.
        bodies: the bodies of its requests.
        override: replaces the next answers where it is not None.
        owner: what it calls itself in its list of models, None for nothing.
        max_in_flight: most requests that it had at a time.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, decoder: Decoder, tokenizer: Any, handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.decoder, self.template = decoder, TurnTemplate(tokenizer)
        self.stop_ids = self.template.find_stop_ids(tokenizer.eos_token_id)
        self.lock = threading.Lock()
        self.faults: deque[Fault] = deque()
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.override: dict[str, Any] | None = None
        self.owner: str | None = None
        self.in_flight = self.max_in_flight = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def complete(self, prompt: list[int], stop_ids: set[int], body: dict[str, Any]) -> tuple[str, str, int]:
        """(text, finish reason, tokens)."""
        settings = TurnSettings(body["max_tokens"], body["temperature"], body["top_p"], body.get("top_k", 0))
        with self.lock:
            ((ids,), _) = write_turns(self.decoder, settings, [prompt], stop_ids=stop_ids, seeds=[body["seed"]])
        is_ended = ids[-1] in stop_ids
        return self.template.decode(ids[:-1] if is_ended else ids), "stop" if is_ended else "length", len(ids)


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny", **({"owned_by": owner} if (owner := self.server.owner) else {})}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append({"path": self.path, **body})
            server.in_flight += 1
            server.max_in_flight = max(server.max_in_flight, server.in_flight)
            fault: Fault | str = server.faults.popleft() if server.faults else ""
        is_allowed = server.key is None or self.headers["Authorization"] == f"Bearer {server.key}"
        content = server.override or (self._complete(body) if is_allowed and fault == "" else {})
        with server.lock:
            server.in_flight -= 1  # before the answer: who gets it asks again at once
        if fault is None:
            self.connection.close()
        elif not isinstance(fault, str):
            self._answer(fault[0], {"error": {"message": fault[2]}}, fault[1])
        elif not is_allowed:
            self._answer(401, {"error": {"message": "no such key"}})
        else:
            self._answer(200, content)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        template = self.server.template
        if self.path == "/v1/chat/completions":
            prompt, stop_ids = template.encode_prompt(body["messages"], "assistant"), self.server.stop_ids["assistant"]
        else:
            prompt, stop_ids = body["prompt"], set(body["stop_token_ids"])
        text, reason, num_tokens = self.server.complete(prompt, stop_ids, body)
        content = {"message": {"content": text}} if "messages" in body else {"text": text}
        return {"choices": [{**content, "finish_reason": reason}], "usage": {"completion_tokens": num_tokens}}

    def _answer(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def serving(decoder: Decoder, tokenizer: Any) -> Iterator[OpenAIServer]:
    with OpenAIServer(decoder, tokenizer) as server, answering(server):
        yield server


@contextmanager
def answering(server: OpenAIServer) -> Iterator[None]:
    """Requests are answered while the context is open."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
