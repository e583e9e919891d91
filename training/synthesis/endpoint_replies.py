"""Turns from a server with OpenAI's protocol (vLLM, SGLang, llama.cpp and others).

Replies come from `/chat/completions`, where the server applies its own chat template. A user's turn follows its bare
header, so it comes from `/completions`, whose prompt is token ids. Thoughts that the server separates from the answer
(`--reasoning-parser` of vLLM and SGLang) are kept.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from draftsmith.inference import GenerationStats
from draftsmith.inference.request.chat_template import ConversationError, change_calls, write_arguments
from draftsmith.training.endpoint.client import EndpointClient
from draftsmith.training.synthesis.reply_decoding import TurnSettings, find_problem
from draftsmith.training.synthesis.reply_sources import Reply, TurnRequest, make_reply
from draftsmith.training.synthesis.turn_template import Role, TurnTemplate

_THOUGHTS = ("reasoning", "reasoning_content")  # the key for thoughts in vLLM, and in its older releases and others
# Fields that keep all tokens, where a server would otherwise drop some: vLLM, SGLang and this library's server follow
# the target's generation config, llama.cpp its own options. The keys are the servers' names in /models (`owned_by`):
# others (OpenAI's) may reject fields that they do not know.
_ALL_TOKENS: dict[str, dict[str, float]] = {
    "vllm": {"top_k": -1},
    "sglang": {"top_k": -1},
    "draftsmith": {"top_k": 0},
    "llamacpp": {"top_k": 0, "min_p": 0.0},
}


class EndpointReplies:
    """Asks a server for turns, `concurrency` at a time.

    Args:
        url: the base URL, up to and with `/v1`.
        model: the name under which it serves the target, whose tokenizer's `template` renders user headers.
        settings: how to draw tokens; a `top_k` of 0 is sent only to servers that are known to take one.

    Raises:
        ValueError: not a URL, no `openai` package, or a model that the server does not serve.
        ConnectionError: no answer after all attempts, or the server rejects the key or the request.
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
    ) -> None:
        self.client = EndpointClient(url, model)
        self.template, self.stop_ids = template, stop_ids
        self.settings, self.capacity, self.stats = settings, concurrency, GenerationStats()
        self._thoughts = "reasoning_content"  # the server's key for thoughts, in both directions
        self._all_tokens = _ALL_TOKENS.get(str(self.client.entry.get("owned_by")), {})
        self._pool = ThreadPoolExecutor(concurrency)
        self._waiting: dict[Future[Reply], TurnRequest] = {}

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        self._waiting |= {self._pool.submit(self._write, request): request for request in requests}
        replies = []
        for future in wait(self._waiting, return_when=FIRST_COMPLETED).done:
            request = self._waiting.pop(future)
            if future.exception() is not None:
                self.close()
            replies.append((request, future.result()))
            self.stats.num_new_tokens += replies[-1][1].num_tokens
        return replies

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    def _write(self, request: TurnRequest) -> Reply:
        settings = self.settings
        body: dict[str, Any] = {
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": request.seed,
            **self._all_tokens,
            **({"top_k": settings.top_k} if settings.top_k else {}),
        }
        try:
            if request.role == "assistant":
                own = {"reasoning_content": self._thoughts}  # the server's key
                messages = [
                    {own.get(key, key): value for key, value in m.items()}
                    | ({"tool_calls": change_calls(m, write_arguments)} if "tool_calls" in m else {})
                    for m in request.messages
                ]
                body |= {"messages": messages} | ({"tools": request.tools} if request.tools else {})
                answer = self.client.ask("/chat/completions", body)
            else:
                ends = sorted(self.stop_ids["user"])
                body |= {
                    "prompt": self.template.encode_prompt(request.messages, "user"),
                    "stop": [self.template.decode([token_id]) for token_id in ends],
                    # vLLM and SGLang leave special tokens out of the text, so a stop string would not be found.
                    "stop_token_ids": ends,
                    "skip_special_tokens": False,
                }
                answer = self.client.ask("/completions", body)
        except ConversationError as error:
            return Reply("", 0, f"rejected by the chat template ({error.kind})")
        return Reply("", 0, "prompt too long") if answer is None else self._judge(answer, request)

    def _take_thoughts(self, message: dict[str, Any]) -> str:
        for name in _THOUGHTS:
            if isinstance(thoughts := message.get(name), str) and thoughts.strip():
                self._thoughts = name
                return thoughts
        return ""

    def _judge(self, answer: dict[str, Any], request: TurnRequest) -> Reply:
        """Makes a reply of an answer, with the problem that decoding here would have found."""
        role = request.role
        try:
            choice = answer["choices"][0]
            message = choice["message"] if role == "assistant" else {"content": choice["text"]}
            text = message["content"] or ""
            thoughts = self._take_thoughts(message)
            reason = choice["finish_reason"]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self.client.misread(answer) from None
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
