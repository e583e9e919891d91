"""Conversations written turn by turn: own replies in the context, what is given kept, and what ends one."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftsmith.inference import Decoder, GenerationStats
from draftsmith.training.data.layouts import parse_record
from draftsmith.training.synthesis import reply_sources
from draftsmith.training.synthesis.prompts import Conversation, read_prompts
from draftsmith.training.synthesis.reply_decoding import TurnSettings, turn_seed
from draftsmith.training.synthesis.reply_sources import UNWRITABLE, DecodedReplies, Reply, TurnRequest
from draftsmith.training.synthesis.synthesizer import synthesize
from draftsmith.training.synthesis.turn_template import Role, TurnTemplate
from tests.training.chat_templates import CHATML, FORGETTING, OPENING, THINKING, ChatTemplate
from tests.training.conversation_cases import HARMONY_TEMPLATE, tokenize

STOP_IDS = {3, 10, 20, 30, 40}  # several, or the tiny target would hardly come to an end
SETTINGS = TurnSettings(30, temperature=0.0)
THOUGHT, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def model(target_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target_path).eval()


@pytest.fixture
def source(model: PreTrainedModel, target_path: Path) -> DecodedReplies:
    template = TurnTemplate(AutoTokenizer.from_pretrained(target_path))
    stop_ids: dict[Role, set[int]] = {"user": STOP_IDS, "assistant": STOP_IDS}
    return DecodedReplies(Decoder(model), template, stop_ids, SETTINGS, batch_size=3)


def play(source: DecodedReplies, plan: Sequence[Conversation]) -> list[Conversation]:
    return [each for some in synthesize(source, plan, seed=0) for each in some]


def test_own_replies_stay_in_the_context(source: DecodedReplies, model: PreTrainedModel, tmp_path: Path) -> None:
    """Every reply against `generate` after all earlier turns: system prompt, tools, own replies."""
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    rows = [
        {"messages": [{"role": role, "content": f"word{(5 * row + place) % 56}"} for place, role in enumerate(roles)]}
        for row in range(14)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = source.template.tokenizer
    finished = play(source, read_prompts(path))
    assert len(finished) == len(rows)
    num_replies = []
    for conversation in finished:
        messages = conversation.messages
        replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if conversation.is_of_use:
            assert [message["role"] for message in messages] == roles[: len(messages)]
            assert (len(messages) == len(roles)) == (not conversation.problem)
        for place in replies:
            prompt = tokenizer.apply_chat_template(
                messages[:place], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            prompt.pop("token_type_ids", None)
            alone = model.generate(
                **prompt, max_new_tokens=30, do_sample=False, eos_token_id=sorted(STOP_IDS), pad_token_id=0
            )
            new = alone[0, prompt["input_ids"].shape[1] :]
            assert messages[place]["content"] == tokenizer.decode(new[:-1])
        num_replies.append(len(replies))
    assert {2, 3} <= {*num_replies}, "some conversations must have several replies for this test to mean anything"
    assert {"", "assistant turn truncated"} <= {conversation.problem for conversation in finished}


# The prompt opens a thought, which comes in a field of its own.
FIELD_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content is string %}"
    "[THINK]\n{{ m.reasoning_content }}\n[/THINK]\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n[THINK]\n{% endif %}"
)


def bracketed(template: ChatTemplate) -> str:
    return template.jinja.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")


# A template, what the target writes under it, and what is kept of that: problem, text, thoughts.
MARKED = [
    (HARMONY_TEMPLATE, f"{THOUGHT}Hm<|end|><|start|>assistant{ANSWER}Yo", "", "Yo", "Hm"),
    (HARMONY_TEMPLATE, f"{THOUGHT}Hm<|end|><|start|>user<|message|>Yo", "special token inside", None, ""),
    (HARMONY_TEMPLATE, "<|channel|>commentary to=look <|constrain|>json<|message|>{}", UNWRITABLE, None, ""),
    (CHATML.jinja, "[THINK]Hm[/THINK]Yo", "", "[THINK]Hm[/THINK]Yo", ""),
    (CHATML.jinja, '[TOOL_CALLS]look[ARGS]{"at": 1}', "", '[TOOL_CALLS]look[ARGS]{"at": 1}', ""),
    (CHATML.jinja, "[THINK]Hm[/THINK]<|im_start|>user", "special token inside", None, ""),
    (bracketed(OPENING), "Hm\n[/THINK]\n\nYo", "", "Hm\n[/THINK]\n\nYo", ""),
    (bracketed(THINKING), "[THINK]\nHm\n[/THINK]\n\nYo", "", "[THINK]\nHm\n[/THINK]\n\nYo", ""),
    (FIELD_TEMPLATE, "Hm\n[/THINK]\n\nYo", "", "Yo", "Hm"),
    (bracketed(FORGETTING), "Hm[/THINK]Yo", UNWRITABLE, None, ""),
]


@pytest.mark.parametrize(("jinja", "written", "problem", "text", "thoughts"), MARKED)
def test_marks_of_the_targets_own_are_read_back_as_they_were_written(
    jinja: str,
    written: str,
    problem: str,
    text: str | None,
    thoughts: str,
    tokenizer: Any,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thoughts, channels and calls whose marks are special tokens: token by token, or not at all."""
    names = ("start", "end", "channel", "message", "constrain")
    marks = [*(f"<|{name}|>" for name in names), "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.chat_template = jinja
    template = TurnTemplate(tokenizer)
    prompt = [{"role": "user", "content": "Hi"}]
    ids = [*template.encode(written), 2]
    source = DecodedReplies(Decoder(model), template, {"user": {2}, "assistant": {2}}, SETTINGS)
    monkeypatch.setattr(reply_sources, "write_turns", lambda *_, **__: ([ids], GenerationStats()))
    (conversation,) = play(source, [Conversation("a", "s", deque([*prompt, "assistant"]))])
    assert conversation.problem == (f"assistant turn {problem}" if problem else "")
    if text is None:
        assert not conversation.is_of_use
        return
    reply = {"role": "assistant", "content": text, **({"reasoning_content": thoughts} if thoughts else {})}
    messages = parse_record(conversation.to_row())["messages"]
    assert messages == [*prompt, reply]
    input_ids, loss_mask = tokenize(messages, tokenizer)
    before = template.encode_prompt(prompt, "assistant")
    assert input_ids[: len(before) + len(ids)] == before + ids
    assert [place for place, bit in enumerate(loss_mask) if bit] == [*range(len(before), len(before) + len(ids))]


def test_prompts_without_room_are_told_from_others(source: DecodedReplies, model: PreTrainedModel) -> None:
    """The target has 256 positions."""
    texts = [" ".join(["word1"] * count) for count in (3, 30, 9, 4, 17)]
    requests = [TurnRequest([{"role": "user", "content": text}], "assistant", 0) for text in texts]
    lengths = {request: len(source.template.encode_prompt(request.messages, "assistant")) for request in requests}
    settings = replace(SETTINGS, max_new_tokens=256 - sorted(lengths.values())[2])
    source = DecodedReplies(Decoder(model), source.template, source.stop_ids, settings)
    replies = dict(source.exchange(requests))
    too_long = [replies[request].problem == "prompt too long" for request in requests]
    assert too_long == [False, True, False, False, True]
    assert all(
        bool(replies[request].num_tokens) != is_long for request, is_long in zip(requests, too_long, strict=True)
    )
    with pytest.raises(ValueError, match="target has 256 positions"):
        DecodedReplies(Decoder(model), source.template, source.stop_ids, replace(SETTINGS, max_new_tokens=256))


class ScriptedSource:
    """Answers one request at a time, the newest first, with what `problems` says of each turn's place."""

    capacity = 4
    stats = GenerationStats()

    def __init__(self, problems: dict[int, str]) -> None:
        self.problems = problems
        self.open: list[TurnRequest] = []
        self.asked: list[TurnRequest] = []
        self.most_open = 0

    def exchange(self, requests: Sequence[TurnRequest]) -> list[tuple[TurnRequest, Reply]]:
        self.open += requests
        self.asked += requests
        self.most_open = max(self.most_open, len(self.open))
        request = self.open.pop()
        return [(request, Reply("text", 2, self.problems.get(len(request.messages), "")))]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("problems", "keep_truncated", "num_messages", "problem"),
    [
        ({}, False, 4, ""),
        ({3: "looping"}, False, 2, "assistant turn looping"),
        ({1: "truncated"}, False, 0, "assistant turn truncated"),
        ({1: "truncated"}, True, 2, "assistant turn truncated"),
        ({2: "truncated"}, True, 2, "user turn truncated"),
    ],
)
def test_a_turn_of_no_use_ends_its_conversation(
    problems: dict[int, str], keep_truncated: bool, num_messages: int, problem: str
) -> None:
    """Whatever the order of the answers; and the source is kept busy."""
    source = ScriptedSource(problems)
    plan = [Conversation(f"c{i}", "s", deque(["user", "assistant"] * 2)) for i in range(9)]
    parts = synthesize(source, plan, seed=5, keep_truncated=keep_truncated)
    finished = [each for part in parts for each in part]
    assert sorted(each.id for each in finished) == [f"c{i}" for i in range(9)]
    for conversation in finished:
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * (num_messages // 2)
        assert conversation.problem == problem
        assert conversation.is_of_use == (num_messages > 0)
        cut = [place for place, message in enumerate(conversation.messages) if message.get("truncated")]
        assert cut == [place for place in problems if keep_truncated and place % 2]
    assert source.most_open == 4
    assert {request.seed for request in source.asked} == {
        turn_seed(5, f"c{i}", place) for i in range(9) for place in range(len(source.asked) // 9)
    }
