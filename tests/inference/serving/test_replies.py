"""What OpenAI's own client gets from a server."""

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from draftsmith.inference import Target, generate
from draftsmith.inference.request.text_processors import OccurrencePenalties
from draftsmith.inference.serving.lane import Lane
from draftsmith.inference.serving.scheduler import Limits
from tests.inference.serving.arrivals import SECONDS
from tests.inference.serving.conftest import MODEL, Running, running

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
PROMPT = "The sea is"
# The seeds whose texts are compared are those of `generate(seed=...)`.
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def texts_alone(
    target: Target, tokenizer: PreTrainedTokenizerBase, ids: list[int], count: int = 1, *, seed: int = 5, **options: Any
) -> list[str]:
    """The texts that `generate` alone gives."""
    settings: dict[str, Any] = {"do_sample": False, **options}
    if settings["do_sample"]:
        settings = {"top_k": 0, "num_return_sequences": count, **settings}
    out = generate(target, None, torch.tensor([ids]), seed=seed, **settings)
    return tokenizer.batch_decode(out.sequences[:, len(ids) :], skip_special_tokens=True)


def chat_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]


def test_a_chat_reply_is_the_text_of_generate(
    served: Running, served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = chat_ids(chat_tokenizer)
    with served.client() as client:
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=16, temperature=0)
        sampled = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, n=2, **SAMPLED)
    assert reply.choices[0].message.content == texts_alone(served_target, chat_tokenizer, ids, max_new_tokens=16)[0]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(ids),
        "completion_tokens": 16,
        "total_tokens": len(ids) + 16,
    }
    expected = texts_alone(
        served_target, chat_tokenizer, ids, 2, do_sample=True, max_new_tokens=16, temperature=0.9, top_p=0.95
    )
    assert [choice.message.content for choice in sampled.choices] == expected
    assert [choice.index for choice in sampled.choices] == [0, 1]
    assert expected[0] != expected[1]


def test_streams_join_to_the_same_text(served: Running) -> None:
    """Of every choice; the usage comes last."""
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "n": 2, **SAMPLED}
    with served.client() as client:
        whole = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]
        assert chunks[-1].usage == whole.usage
        assert not chunks[-1].choices
        ends = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
        assert sorted(ends) == [(0, "length"), (1, "length")]


def test_many_async_clients_get_their_own_texts(
    served: Running, served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Twelve at once, where four run: streams and whole replies, greedy and sampled, drafted and plain."""
    requests = []
    for number in range(12):
        options: dict[str, Any] = {"max_tokens": 5 + number, "temperature": 0, "prompt": [[5 + number, 9, 11]]}
        if number % 2:
            options |= {"temperature": 0.8, "seed": number}
        extra = {"heads": "none" if number % 4 == 2 else "oracle"} | ({"top_k": 20} if number % 2 else {})
        requests.append((options, extra, number % 3 == 0))

    async def ask(client: openai.AsyncOpenAI, options: dict[str, Any], extra: dict[str, Any], is_stream: bool) -> str:
        reply = await client.completions.create(model=MODEL, extra_body=extra, stream=is_stream, **options)
        if is_stream:
            return "".join([piece.choices[0].text async for piece in reply])
        return str(reply.choices[0].text)

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
            return await asyncio.gather(*(ask(client, *request) for request in requests))

    texts = asyncio.run(ask_all())
    for text, (options, extra, _) in zip(texts, requests, strict=True):
        settings = {"max_new_tokens": options["max_tokens"]}
        if "seed" in options:
            settings |= {"do_sample": True, "temperature": 0.8, "top_k": extra["top_k"], "seed": options["seed"]}
        assert [text] == texts_alone(served_target, chat_tokenizer, options["prompt"][0], **settings)


def test_several_prompts_and_choices_are_numbered(served: Running) -> None:
    with served.client() as client:
        both = client.completions.create(model=MODEL, prompt=["One", "Two two"], n=2, max_tokens=4, **SAMPLED)
        alone = [
            client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=4, **SAMPLED)
            for prompt in ("One", "Two two")
        ]
    assert [choice.text for choice in both.choices] == [choice.text for one in alone for choice in one.choices]
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert both.usage.completion_tokens == 16


def test_stop_strings_and_stop_tokens(served: Running, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    with served.client() as client:
        whole = client.completions.create(**options, logprobs=0).choices[0]
        stop = whole.text[9:13]
        for is_stream in (False, True):
            reply = client.completions.create(**options, stop=["\x00never", stop], stream=is_stream)
            choices = [chunk.choices[0] for chunk in reply] if is_stream else reply.choices
            assert "".join(choice.text for choice in choices) == whole.text[: whole.text.index(stop)]
            assert choices[-1].finish_reason == "stop"
        first = whole.logprobs.tokens[:6]
        ids = [number for number in range(4096) if chat_tokenizer.decode([number]) == first[3]]
        reply = client.completions.create(**options, logprobs=0, extra_body={"stop_token_ids": ids})
        assert reply.choices[0].text == "".join(reply.choices[0].logprobs.tokens)
        assert reply.choices[0].text == "".join(first[: first.index(first[3])])
        assert reply.choices[0].finish_reason == "stop"


def test_logprobs_are_the_targets(served: Running, served_target: Target) -> None:
    with served.client() as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
        ).choices[0]
        plain = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=6, temperature=0, logprobs=2)
    content = chat.logprobs.content
    assert "".join(entry.token for entry in content) == chat.message.content
    for entry in content:
        assert bytes(entry.bytes).decode(errors="replace") == entry.token  # some tokens are parts of characters
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy
        assert entry.top_logprobs[1].logprob <= entry.logprob < 0
    own = plain.choices[0].logprobs
    assert "".join(own.tokens) == plain.choices[0].text
    assert own.text_offset[1] == len(own.tokens[0])
    with torch.no_grad():
        scores = served_target.model(torch.tensor([[5, 6, 7]])).logits[0, -1].float().log_softmax(-1)
    assert own.token_logprobs[0] == pytest.approx(float(scores.max()), abs=1e-4)
    assert len(own.top_logprobs[0]) == 2


def test_penalties_and_biases_change_a_text_as_generate_does(
    served: Running, served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    ids, settings = [5, 6, 7], {"max_new_tokens": 12}
    penalties = OccurrencePenalties(presence=1.5, frequency=2.0, begin=torch.tensor(3))
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {"77": 100}}, {}, {"sequence_bias": [[[77], 100.0]]}),
        ({"presence_penalty": 1.5, "frequency_penalty": 2.0}, {}, {"logits_processor": [penalties]}),
    ]
    with served.client() as client:
        for given, extra, expected in cases:
            reply = client.completions.create(
                model=MODEL, prompt=ids, max_tokens=12, temperature=0, extra_body=extra, **given
            )
            alone = texts_alone(served_target, chat_tokenizer, ids, **settings, **expected)
            assert [reply.choices[0].text] == alone, given or extra


def complete(served: Running, body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = httpx.post(f"{served.url}/completions", json=body, timeout=SECONDS).json()["choices"]
    return choice


@pytest.mark.parametrize(
    ("own", "given", "options"),
    [
        ({"repetition_penalty": 1.9}, {"repetition_penalty": 1.0}, {}),
        ({"sequence_bias": [[[77], 50.0]]}, {"logit_bias": {}}, {}),
        ({"min_p": 0.9}, {"min_p": 0}, SAMPLED),
        ({"top_k": 1}, {"top_k": -1}, SAMPLED),
        ({"temperature": 0.01}, {"temperature": 1}, {"seed": 5}),
    ],
    ids=str,
)
def test_a_neutral_value_switches_the_models_own_off(
    own: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
    served: Running,
    served_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"temperature": 0, **options, "prompt": [5, 6, 7], "max_tokens": 12}
    if "temperature" in given:
        del body["temperature"]

    plain = complete(served, body | given)
    monkeypatch.setattr(served_target.model, "generation_config", GenerationConfig(**own))
    left_out = complete(served, body | dict.fromkeys(given))
    assert left_out["text"] != plain["text"], "the model's own setting must change this text"
    assert complete(served, body | given) == plain


def test_stop_strings_of_the_model_hold_where_a_request_gives_none(
    served: Running, served_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**more: Any) -> tuple[str, str]:
        choice = complete(served, {"temperature": 0, "prompt": [5, 6, 7], "max_tokens": 12} | more)
        return choice["text"], choice["finish_reason"]

    plain, _ = ask()
    own, other = plain[3:5], plain[6:8]
    monkeypatch.setattr(served_target.model, "generation_config", GenerationConfig(stop_strings=own))
    assert ask() == ask(stop=None) == (plain[: plain.index(own)], "stop")
    assert ask(stop=[]) == (plain, "length")
    assert ask(stop=other) == (plain[: plain.index(other)], "stop")


def test_reports_of_drafting(served: Running) -> None:
    """The contract with the chat page."""
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "draft_report": True}
    whole = httpx.post(f"{served.url}/chat/completions", json=body, timeout=SECONDS).json()
    assert whole["drafting"].keys() == {"acceptance_length", "num_steps", "accepted_per_depth", "seconds"}
    assert whole["drafting"]["acceptance_length"] > 2
    plain = httpx.post(f"{served.url}/chat/completions", json=body | {"heads": "none"}, timeout=SECONDS).json()
    assert plain["drafting"]["acceptance_length"] == 1.0
    assert plain["choices"] == whole["choices"]
    wide = httpx.post(f"{served.url}/chat/completions", json=body | {"tree": "dynamic:2,2,5"}, timeout=SECONDS).json()
    assert wide["choices"] == whole["choices"]
    assert len(wide["drafting"]["accepted_per_depth"]) == 2
    with httpx.stream("POST", f"{served.url}/chat/completions", json=body | {"stream": True}, timeout=SECONDS) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    tokens = [token for chunk in chunks for token in chunk.get("drafting", {}).get("tokens", [])]
    assert len(tokens) == 12
    assert "".join(token["text"] for token in tokens) == whole["choices"][0]["message"]["content"]
    assert all(token.keys() == {"id", "text", "depth", "probability"} for token in tokens)
    assert {token["depth"] for token in tokens} == {0, 1, 2, 3}
    last = chunks[-1]["drafting"]
    assert {**last, "seconds": 0} == {**whole["drafting"], "seconds": 0}


def test_models_and_health(served: Running) -> None:
    with served.client() as client:
        (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.draft_heads) == (MODEL, 200, ["oracle", "none"])
    assert model.root == MODEL  # where vLLM's clients look for the tokenizer; this target is of no folder
    assert httpx.get(f"{served.address}/health").json() == {"status": "ok"}


def count_drafting(served: Running) -> dict[str, float]:
    """As `vllm bench serve` adds up its metrics: by the first of these names that a line contains."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_accepted_tokens")
    counts = dict.fromkeys(names, 0.0)
    for line in httpx.get(f"{served.address}/metrics").text.splitlines():
        if line.startswith("vllm:spec_decode"):
            counts[next(name for name in names if name in line)] += float(line.split()[-1])
    return counts


def test_other_programs_count_drafting_by_the_names_of_vllm(served: Running) -> None:
    """One token comes from the prompt; two steps accept all three drafts. All positions are there from the start."""
    before = count_drafting(served)
    positions = [f'position="{position}"' in httpx.get(f"{served.address}/metrics").text for position in range(4)]
    assert positions == [True, True, True, False]
    with served.client() as client:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0)
    after = count_drafting(served)
    assert {name: after[name] - before[name] for name in after} == {
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": 6,
    }


def test_replies_tell_what_drafting_did_as_those_of_vllm(
    served_target: Target, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    """A token comes from the prompt; a step accepts three drafts, and the last one may keep no more than one."""
    expected = {
        "mean_acceptance_length": 4.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 2],
        "acceptance_histogram_by_draft_length": {"3": [0, 0, 0, 2]},
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 6,
        "num_spec_tokens": 3,
    }
    more = {"per_step_accepted": [3, 3], "per_step_drafted": [3, 3]}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    limits = Limits(max_rows=2, max_length=64, max_waiting=4)
    for metrics in ("none", "summary", "detailed"):
        with running(served_target, chat_tokenizer, limits=limits, metrics=metrics) as served:
            url = f"{served.url}/completions"
            whole = [httpx.post(url, json=body | own).json() for own in ({}, {"n": 2}, {"heads": "none"})]
            streamed = httpx.post(url, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text
        last = json.loads(streamed.split("data: ")[-2])
        if metrics == "none":
            assert all("metrics" not in one for one in (*whole, last))
            continue
        own = {"speculative_decoding": expected | (more if metrics == "detailed" else {})}
        assert [one["metrics"] for one in (*whole, last)] == [own, *[{"speculative_decoding": None}] * 2, own]


def test_min_tokens_puts_off_every_end(served: Running, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 0}
    with served.client() as client:
        words = client.completions.create(**options).choices[0].logprobs.tokens
        ids = [number for number in range(4096) if chat_tokenizer.decode([number]) == words[3]]
        for end in ({"stop_token_ids": ids}, {"stop": [words[3]]}):
            early, late = (
                client.completions.create(**options, extra_body=end | least).usage.completion_tokens
                for least in ({}, {"min_tokens": 6})
            )
            assert early < 6 <= late
        with pytest.raises(openai.BadRequestError, match="min_tokens is 13"):
            client.completions.create(**options, extra_body={"min_tokens": 13})


def test_replies_are_json(served: Running, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    pytest.importorskip("xgrammar", reason="replies by a grammar need xgrammar")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    given = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    with served.client() as client:
        for heads in ("oracle", "none"):
            reply = client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=60,
                temperature=0.8,
                seed=4,
                response_format=given,
                extra_body={"heads": heads},
            )
            assert json.loads(reply.choices[0].message.content).keys() == {"a", "b"}
        (bracket,) = chat_tokenizer.encode("[", add_special_tokens=False)
        wish = {"response_format": {"type": "json_object"}, "logit_bias": {str(bracket): 100}}
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, **wish)
        assert reply.choices[0].message.content[:2] in ('{"', "{}")  # an object, without spaces


def test_a_server_that_is_about_to_end_says_so(
    served_target: Target, chat_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Lane.advance
    monkeypatch.setattr(Lane, "advance", lambda lane: (time.sleep(0.05), advance(lane)))
    limits = Limits(max_rows=1, max_length=250, max_waiting=4)
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 240}
    with running(served_target, chat_tokenizer, limits=limits, drain_seconds=1.0) as one, one.client() as client:
        running_reply = client.completions.create(**options, stream=True)
        next(iter(running_reply))
        one.server.should_exit = True
        while (health := httpx.get(f"{one.address}/health")).status_code == 200:
            pass
        assert health.json() == {"status": "stopping"}
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(**options)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="shutting down"):
            list(running_reply)


def test_models_have_addresses(served: Running) -> None:
    with served.client() as client:
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("other/model")
