"""A server that speaks the chat page's contract, with texts, drafts and faults that a test chooses.

python -m tests.inference.serving.page_server   serves the page, to look at it in a browser
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "inference" / "serving" / "page" / "index.html"
TEXT = (
    "Regular exercise helps you sleep better, and it lifts your mood. It makes your heart and your muscles stronger. "
    "Even a short walk every day is a good way to begin, and walking with a friend is more fun."
)


def split_words(text: str) -> list[str]:
    """Tokens: words with the space before them."""
    first, *others = text.split(" ")
    return [first, *(f" {word}" for word in others)]


@dataclass
class PageServer(ThreadingHTTPServer):
    """Replies with `text`.

    Attributes:
        plain_text: of plain decoding, if it is to differ.
        is_near_tie: what the server finds where texts differ.
        drafted_steps: of those that the metrics tell; None = it tells none.
        seconds: between two steps.
        api_key: that requests must carry.
        breaks_after: steps after which the connection breaks off.
        requests: the bodies of all requests for replies.
    """

    text: str = TEXT
    plain_text: str | None = None
    is_near_tie: bool = True
    drafted_steps: int | None = None
    seconds: float = 0.0
    api_key: str | None = None
    breaks_after: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    daemon_threads = True

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def steps(self, body: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
        """The tokens of each step: depths 1, 2, ..., 0."""
        is_plain = body["heads"] == "none"
        words = split_words(self.plain_text if is_plain and self.plain_text is not None else self.text)
        words = words[: body["max_tokens"]]
        dice, place = random.Random(3), 0
        while place < len(words):
            num_drafted = 0 if is_plain or place == 0 else dice.choice((0, 1, 2, 2, 3, 3, 4, 5))
            new = words[place : place + num_drafted + 1]
            depths = [*range(1, num_drafted + 1), 0][: len(new)]
            yield [
                {
                    "id": hash(word) % 10**6,
                    "text": word,
                    "depth": depth,
                    "probability": round(dice.uniform(0.2, 1.0), 4) if depth else None,
                }
                for word, depth in zip(new, depths, strict=True)
            ]
            place += len(new)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(PAGE.read_bytes(), kind="text/html; charset=utf-8")
        elif self._has_key():
            self._answer_json({"data": [{"id": "chat-13m"}], "draft_heads": ["eagle3", "mtp", "none"]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return
        self.server.requests.append(body)
        if body.get("tree") == "gamma":
            self._answer_json({"error": {"message": "these heads draft no chains"}}, status=400)
        elif self.path == "/v1/difference":
            told = "a near-tie" if self.server.is_near_tie else "no near-tie"
            text = f"The log-probabilities are -0.6931 and -0.6932: {told}."
            self._answer_json({"is_near_tie": self.server.is_near_tie, "text": text})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        assert body["draft_report"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        start, histogram = time.perf_counter(), [0] * 8
        try:
            for number, tokens in enumerate(self.server.steps(body)):
                if number == self.server.breaks_after:
                    return
                time.sleep(self.server.seconds)
                delta = {"content": "".join(token["text"] for token in tokens)}
                self._send({"choices": [{"index": 0, "delta": delta}], "drafting": {"tokens": tokens}})
                histogram[max(token["depth"] for token in tokens)] += number > 0
            per_depth = [sum(histogram[depth:]) for depth in range(1, 8)]
            num_steps = max(sum(histogram), 1)
            report = {
                "acceptance_length": 1 + sum(per_depth) / num_steps,
                "num_steps": sum(histogram),
                "accepted_per_depth": [count for count in per_depth if count],
                "seconds": time.perf_counter() - start,
            }
            is_cut = body["max_tokens"] <= len(split_words(self.server.text))
            end = {"index": 0, "delta": {}, "finish_reason": "length" if is_cut else "stop"}
            self._send({"choices": [end], "drafting": report})
            if body["stream_options"]["include_usage"] and self.server.drafted_steps is not None:
                told = {"num_spec_steps": self.server.drafted_steps} if self.server.drafted_steps else None
                self._send({"choices": [], "usage": {}, "metrics": {"speculative_decoding": told}})
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the page has stopped the reply

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _has_key(self) -> bool:
        if self.server.api_key in (None, self.headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        self._answer_json({"error": {"message": "the API key is missing or wrong"}}, status=401)
        return False

    def _answer_json(self, content: Any, *, status: int = 200) -> None:
        self._answer(json.dumps(content).encode(), kind="application/json", status=status)

    def _answer(self, content: bytes, *, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    shown = PageServer(seconds=0.05)
    print(shown.address)
    threading.Event().wait()
