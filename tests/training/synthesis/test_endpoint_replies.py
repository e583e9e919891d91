"""Turns from a server: the same as decoded here, through faults that pass; and faults that do not, told clearly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.inference import Decoder
from draftsmith.training.synthesis.endpoint_replies import EndpointReplies
from draftsmith.training.synthesis.prompts import Conversation, plan_self_synthesis, read_prompts
from draftsmith.training.synthesis.reply_decoding import TurnSettings
from draftsmith.training.synthesis.reply_sources import DecodedReplies, ReplySource, TurnRequest
from draftsmith.training.synthesis.synthesizer import synthesize
from draftsmith.training.synthesis.turn_template import TurnTemplate
from tests.training.openai_server import OpenAIServer, serving

SETTINGS = TurnSettings(max_new_tokens=24, temperature=1.5, top_p=0.98)
STOP_IDS = {3, 10, 20, 30, 40}  # several, or the tiny target would hardly come to an end
USER = [{"role": "user", "content": "word1 word2"}]


@pytest.fixture(scope="module")
def server(target_path: Path) -> Iterator[OpenAIServer]:
    decoder = Decoder(AutoModelForCausalLM.from_pretrained(target_path).eval())
    with serving(decoder, AutoTokenizer.from_pretrained(target_path)) as running:
        running.stop_ids = {"user": STOP_IDS, "assistant": STOP_IDS}
        yield running


@pytest.fixture
def connect(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EndpointReplies]]:
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.key = server.override = server.owner = None
    server.bodies.clear()
    server.faults.clear()
    server.max_in_flight = 0
    sources = []

    def connect_to(url: str = server.url, model: str = "tiny", **options: Any) -> EndpointReplies:
        options = {"settings": SETTINGS, "concurrency": 3, **options}
        source = EndpointReplies(url, model, server.template, server.stop_ids, **options)
        sources.append(source)
        return source

    yield connect_to
    for source in sources:
        source.close()


def write(source: ReplySource, conversations: list[Conversation]) -> list[dict[str, Any]]:
    """Rows of all conversations by id, those of no use included."""
    finished = [each for some in synthesize(source, conversations, seed=0) for each in some]
    return sorted((each.to_row() for each in finished), key=lambda row: str(row["id"]))


@pytest.mark.parametrize("mode", ["self", "regenerate"])
def test_a_server_writes_what_decoding_here_writes(
    mode: str, server: OpenAIServer, connect: Callable[..., EndpointReplies], conversations: Path
) -> None:
    def plan() -> list[Conversation]:
        return plan_self_synthesis(16, seed=0, num_turns=1) if mode == "self" else read_prompts(conversations)[:16]

    template = TurnTemplate(server.template.tokenizer)
    here = DecodedReplies(server.decoder, template, server.stop_ids, SETTINGS, batch_size=8)
    expected = write(here, plan())
    kinds = {row.get("ended_by", "good") for row in expected}
    assert "good" in kinds
    assert len(kinds) >= 3, "this test must see bad replies as well"

    server.faults.extend([(429, {"Retry-After": "0"}, "slow down"), (503, {}, "loading"), None, (500, {}, "oops")])
    source = connect()
    assert write(source, plan()) == expected
    assert not server.faults
    assert source.stats.num_new_tokens == here.stats.num_new_tokens
    assert 1 < server.max_in_flight <= 3
    paths = {body["path"] for body in server.bodies}
    assert paths == {"/v1/chat/completions", *(["/v1/completions"] if mode == "self" else [])}
    assert all(body["model"] == "tiny" and "top_k" not in body for body in server.bodies)


def ask(source: EndpointReplies, role: Any = "assistant") -> str:
    """The problem of one turn."""
    ((_, reply),) = source.exchange([TurnRequest(USER if role == "assistant" else [], role, 0)])
    return reply.problem


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"message": {"content": "word1"}, "finish_reason": "stop"}, ""),
        ({"message": {"content": "word1"}, "finish_reason": "length"}, "truncated"),
        ({"message": {"content": "word1 <|user|> word1"}, "finish_reason": "stop"}, "special token inside"),
        ({"message": {"content": "word1 word2 " * 12}, "finish_reason": "length"}, "looping"),
    ],
    ids=str,
)
def test_answers_are_judged(
    choice: dict[str, Any], problem: str, server: OpenAIServer, connect: Callable[..., EndpointReplies]
) -> None:
    server.override = {"choices": [choice]}
    assert ask(connect()) == problem


@pytest.mark.parametrize(
    ("owner", "sent"), [("vllm", {"top_k": -1}), ("llamacpp", {"top_k": 0, "min_p": 0.0}), (None, {})]
)
def test_all_tokens_means_all_where_a_server_would_draw_from_fewer(
    owner: str | None, sent: dict[str, float], server: OpenAIServer, connect: Callable[..., Any]
) -> None:
    """Most take what is not sent from the target's generation config: Qwen3's says top_k 20."""
    server.owner = owner
    choice = {"message": {"content": "word1"}, "text": "word1", "finish_reason": "stop"}
    server.override = {"choices": [choice]}
    ask(connect())
    (body,) = server.bodies
    assert {name: body[name] for name in ("top_k", "min_p") if name in body} == sent
    assert (body["temperature"], body["top_p"]) == (SETTINGS.temperature, SETTINGS.top_p)
