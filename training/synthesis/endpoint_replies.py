"""Turns from a server that speaks OpenAI's protocol: vLLM, SGLang, llama.cpp and others.

Replies come from `/chat/completions`, so the server applies its own chat template; a user's turn is written behind its
bare header, so it comes from `/completions`, whose prompt is token ids. Thoughts that the server tells from the answer
(vLLM's and SGLang's `--reasoning-parser`) are kept beside it. The key is read from the environment variable
`OPENAI_API_KEY` and nowhere else.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from training.synthesis.reply_decoding import TurnSettings, find_problem
from training.synthesis.reply_sources import Reply, TurnRequest, make_reply
from training.synthesis.turn_template import Role, TurnTemplate

_RETRIED_STATUS = (408, 409, 429, 500, 502, 503, 504)
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds between two attempts; each is twice the one before
_THOUGHTS = ("reasoning", "reasoning_content")  # vLLM's name for them; that of its earlier releases and of others
# What leaves all tokens to be drawn, where a server would do otherwise on its own: vLLM and SGLang as the target's
# generation config says, llama.cpp as its options do. By what servers call themselves in /models (`owned_by`): others
# (OpenAI's) may refuse fields that they do not know.
_ALL_TOKENS: dict[str, dict[str, float]] = {
    "vllm": {"top_k": -1},
    "sglang": {"top_k": -1},
    "llamacpp": {"top_k": 0, "min_p": 0.0},
}
_TOO_LONG = ("context length", "maximum context", "context_length_exceeded", "too long", "max_model_len")


class EndpointReplies:
    """Asks a server for turns, `concurrency` at a time.

    Args:
        url: the base URL, up to and with `/v1`.
        model: the name it serves the target under.
        template: of the target's tokenizer, which renders user headers and finds bad replies.
        stop_ids: the tokens that end a turn of each role.
        settings: how to draw tokens; a `top_k` of 0 is sent only to servers that are known to take one (`_ALL_TOKENS`).
        concurrency: requests in flight.
        timeout: seconds to wait for one answer.
        max_retries: further attempts after a timeout, a broken connection, or a status that says "later".

    Raises:
        ValueError: the URL is none, or the server does not serve the model (says what it serves) or wants another key.
        ConnectionError: no answer after all attempts.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: TurnTemplate,
        stop_ids: Mapping[Role, set[int]],
        settings: TurnSettings,
        *,
        concurrency: int = 64,
        timeout: float = 600.0,
        max_retries: int = 8,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the endpoint is {url!r}: give its base URL, such as http://localhost:8000/v1")
        self.url, self.model, self.template, self.stop_ids = url.rstrip("/"), model, template, stop_ids
        self.settings, self.timeout, self.max_retries = settings, timeout, max_retries
        self.capacity = concurrency
        self._thoughts = "reasoning_content"  # their name in the server's answers, and so in what it is sent
        self._key = os.environ.get("OPENAI_API_KEY")
        self._requests: queue.SimpleQueue[TurnRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[TurnRequest, Reply | Exception]] = queue.SimpleQueue()
        self._num_outstanding = 0
        self._is_closed = threading.Event()
        self._last_time = time.perf_counter()
        self._num_tokens = self._num_retries = 0
        self._lock = threading.Lock()
        self._check_model()
        # Daemons: a program that ends does not wait for answers.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)]
        for thread in self._threads:
            thread.start()

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        for request in requests:
            self._requests.put(request)
        self._num_outstanding += len(requests)
        replies: list[tuple[TurnRequest, Reply]] = []
        while self._num_outstanding and (not replies or not self._answers.empty()):
            request, answer = self._answers.get()
            self._num_outstanding -= 1
            if isinstance(answer, Exception):
                self.close()
                raise answer
            self._num_tokens += answer.num_tokens
            replies.append((request, answer))
        return replies

    def take_effort(self) -> dict[str, float]:
        now = time.perf_counter()
        with self._lock:
            effort = {
                "seconds": now - self._last_time,
                "num_tokens": self._num_tokens,
                "num_retries": self._num_retries,
            }
            self._last_time, self._num_tokens, self._num_retries = now, 0, 0
        return effort

    def close(self) -> None:
        self._is_closed.set()
        for _ in self._threads:
            self._requests.put(None)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._is_closed.is_set():
            try:
                answer: Reply | Exception = self._write(request)
            except Exception as error:  # noqa: BLE001 (raised again by `exchange`, in the thread that asks)
                answer = error
            self._answers.put((request, answer))

    def _write(self, request: TurnRequest) -> Reply:
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": request.seed,
            **self._all_tokens,
            **({"top_k": settings.top_k} if settings.top_k else {}),
        }
        try:
            if request.role == "assistant":
                messages = [self._rename_thoughts(message) for message in request.messages]
                body |= {"messages": messages} | ({"tools": request.tools} if request.tools else {})
                answer = self._ask("/chat/completions", body)
            else:
                ends = sorted(self.stop_ids["user"])
                body |= {
                    "prompt": self.template.encode_prompt(request.messages, "user"),
                    "stop": [self.template.decode([token_id]) for token_id in ends],
                    # vLLM and SGLang leave special tokens out of texts, where a stop string would not be found.
                    "stop_token_ids": ends,
                    "skip_special_tokens": False,
                }
                answer = self._ask("/completions", body)
        except TemplateError as error:
            return Reply("", 0, f"refused by the chat template ({error})")
        if answer is None:
            return Reply("", 0, "prompt too long")
        return self._judge(answer, request)

    def _rename_thoughts(self, message: dict[str, Any]) -> dict[str, Any]:
        """As the server names them itself."""
        return {self._thoughts if key == "reasoning_content" else key: value for key, value in message.items()}

    def _take_thoughts(self, message: dict[str, Any]) -> str:
        for name in _THOUGHTS:
            if isinstance(thoughts := message.get(name), str) and thoughts.strip():
                self._thoughts = name
                return thoughts
        return ""

    def _judge(self, answer: dict[str, Any], request: TurnRequest) -> Reply:
        role = request.role
        try:
            choice = answer["choices"][0]
            message = choice["message"] if role == "assistant" else {"content": choice["text"]}
            text = message["content"] or ""
            thoughts = self._take_thoughts(message)
            reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"{self.url} answered in another form than OpenAI's: {str(answer)[:300]}") from None
        if reason not in ("stop", "length"):
            return Reply(text, 0, f"ended by {reason}")
        ids = self.template.encode(text)
        if ids and ids[-1] in self.stop_ids[role]:  # some servers leave it in the text
            ids.pop()
            text = self.template.decode(ids)
        stop_id = min(self.stop_ids[role])
        all_ids = self.template.encode(thoughts) + ids + ([stop_id] if reason == "stop" else [])
        marks = self.template.marks if role == "assistant" else ()
        problem = find_problem(all_ids, {stop_id}, self.template.special_ids, marks)
        num_tokens = (answer.get("usage") or {}).get("completion_tokens", len(all_ids) - (reason == "stop"))
        return make_reply(self.template, request, Reply(text, num_tokens, problem, thoughts), ids)

    def _check_model(self) -> None:
        answer = self._ask("/models", None)
        owners = {str(entry.get("id")): entry.get("owned_by") for entry in (answer or {}).get("data", [])}
        self._all_tokens = _ALL_TOKENS.get(str(owners.get(self.model)), {})
        if self.model not in owners:
            raise ValueError(
                f"{self.url} does not serve {self.model!r}, but {', '.join(owners) or 'nothing'}: name one with "
                "--endpoint_model, or start the server with that name (vLLM: --served-model-name)"
            )

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any] | None:
        """The server's answer; None when it says that the prompt is too long."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        problem = ""
        for attempt in range(self.max_retries + 1):
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    answer: dict[str, Any] = json.loads(response.read())
                    return answer
            except urllib.error.HTTPError as error:
                told = error.read().decode(errors="replace")[:500]
                problem = f"status {error.code}: {told}"
                if error.code in (400, 413, 422) and any(word in told.lower() for word in _TOO_LONG):
                    return None
                self._raise_refusal(error.code, path, told)
                if (asked := error.headers.get("Retry-After", "")).isdigit():
                    wait = min(_LONGEST_WAIT, float(asked))
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.max_retries:
                with self._lock:
                    self._num_retries += 1
                if self._is_closed.wait(wait):
                    break
        raise ConnectionError(
            f"{self.url}{path} gave no answer in {self.max_retries + 1} attempts; the last: {problem}. See to the "
            "server, and run the same command again: what is finished is kept"
        )

    def _raise_refusal(self, status: int, path: str, told: str) -> None:
        """What no further attempt would change."""
        if status in (401, 403):
            has = "does not accept the key in" if self._key else "wants a key: set"
            raise ValueError(f"{self.url} {has} the environment variable OPENAI_API_KEY ({status}: {told})")
        if status == 404:
            raise ValueError(
                f"{self.url}{path} does not exist, or not for the model {self.model!r} ({told}): the endpoint's base "
                "URL usually ends in /v1, and --endpoint_model names the model"
            )
        if status not in _RETRIED_STATUS:
            raise ValueError(f"{self.url}{path} refuses the request with status {status}: {told}")
