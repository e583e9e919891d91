"""Which replies are learned: not those that the template does not write, and not those that the data exclude."""

import json
from typing import Any

import pytest

from draftsmith.training.data.chat_tokens import drop_unusable, tokenize_conversations, tokenize_row
from draftsmith.training.data.layouts import parse_record
from draftsmith.training.data.learned_turns import EMPTY, LEFT_OUT, UNLEARNED, UNWRITTEN
from tests.chat_template_shapes import SHAPES
from tests.training.chat_templates import CHATML, FORGETTING, THINKING
from tests.training.conversation_cases import HARMONY_TEMPLATE, MARKED_TEMPLATE, TWO_TURNS, learned_text, to_dataset

USER = {"role": "user", "content": "Where?"}
GOOD = {"role": "assistant", "content": "There."}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
RESULT = {"role": "tool", "content": "x"}
# Only the last reply is learned, and calls are written outside of the markers.
MARKED_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}{{ c.function.name }}()\n"
    "{% endfor %}{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenize(record: dict[str, Any], tokenizer: Any, **options: Any) -> dict[str, Any]:
    return tokenize_row(json.dumps(parse_record(record)), tokenizer, 200, **options)


@pytest.mark.parametrize("says", ["", "I look("])
@pytest.mark.parametrize("template", [CHATML.jinja, MARKED_TEMPLATE])
def test_calls_that_the_template_does_not_write_end_the_conversation(
    template: str, says: str, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The text before a call may have the function's name, and so may the schemas of the tools."""
    tokenizer.chat_template = "{{ tools | tojson if tools }}" + template
    messages = [USER, {"role": "assistant", "content": says, "tool_calls": [CALL]}, RESULT, GOOD]
    row = tokenize({"messages": messages, "tools": [{"name": "look"}]}, tokenizer)
    assert (row["input_ids"], row["loss_mask"]) == ([], [])
    assert row["problem"] == "the chat template rejects it (it does not write tool calls)"
    assert len(drop_unusable(tokenize_conversations(to_dataset(messages, TWO_TURNS), tokenizer, max_length=64))) == 1
    assert "dropped 1 of 2 conversations: the chat template rejects it (it does not write tool calls)" in caplog.text


def test_a_system_text_that_prompts_only_have_is_counted(tokenizer: Any) -> None:
    """Under Mistral's template: the conversation is learned as the template writes it."""
    tokenizer.chat_template = SHAPES["Mistral: tools and system in the last question, long ids"].jinja
    system = {"role": "system", "content": "Be brief."}
    row = tokenize({"messages": [system, USER, GOOD]}, tokenizer)
    assert row == tokenize({"messages": [USER, GOOD]}, tokenizer) | {"notes": [LEFT_OUT]}
    assert tokenizer.decode(row["input_ids"]).endswith("[INST]Where?[/INST]There.<|im_end|>")
    assert row["loss_mask"].count(1) == len(tokenizer("There.<|im_end|>")["input_ids"])
    assert tokenize({"messages": [system, USER, {**GOOD, "weight": 0}]}, tokenizer)["notes"] == [UNLEARNED, LEFT_OUT]


def test_every_call_must_be_written(tokenizer: Any) -> None:
    """A template that writes the first call only."""
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    tokenizer.chat_template = THINKING.jinja.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
    assert tokenize({"messages": messages}, tokenizer)["problem"] == ""
    messages[1]["tool_calls"] *= 2
    assert "does not write" in tokenize({"messages": messages}, tokenizer)["problem"]
    tokenizer.chat_template = THINKING.jinja
    assert tokenize({"messages": messages}, tokenizer)["problem"] == ""
    tokenizer.chat_template = MARKED_LAST
    assert learned_text([*messages, RESULT, GOOD], tokenizer) == ["There.<|im_end|>"]


# A result must follow a call, and only the last reply has an empty thought: the first messages have another text alone.
MARKED_STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ '<think></think>' if loop.last }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_marked_replies_are_paired_in_order(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED_STRICT
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [USER, {**call, "learn": False}, RESULT, GOOD]
    assert learned_text(messages, tokenizer) == ["<think></think>There.<|im_end|>"]
    assert learned_text([USER, call, RESULT, GOOD], tokenizer)[0] == "look()<|im_end|>"
    tokenizer.chat_template = MARKED_LAST  # the only marked reply is not the first one
    wrong = {"role": "assistant", "content": "Nowhere.", "learn": False}
    assert learned_text([USER, wrong, USER, GOOD], tokenizer) == ["There.<|im_end|>"]


# Llama 3 writes no text beside a call; gpt-oss writes thoughts and text beside a call only where no answer follows, and
# needs the call before its result.
LLAMA = CHATML.jinja.replace(
    "{{ m.content }}", "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}(){% else %}{{ m.content }}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% set answered = messages[loop.index0 + 1:] | rejectattr('tool_calls', 'defined') | "
    "selectattr('role', 'equalto', 'assistant') | list %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if not (m.tool_calls and answered) %}{{ m.thinking }}{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}(){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [LLAMA, GPT_OSS])
def test_a_text_beside_a_call_that_the_template_does_not_write_is_left_out(template: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    call = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    messages = [USER, call, RESULT, GOOD]
    assert learned_text(messages, tokenizer) == ["look()<|im_end|>", "There.<|im_end|>"]
    assert tokenize({"messages": messages}, tokenizer)["notes"] == [UNWRITTEN]
    is_written = template == GPT_OSS  # where no answer follows
    assert tokenize({"messages": messages[:2]}, tokenizer)["notes"] == [UNWRITTEN] * (not is_written)


THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
# Template, reply, and whether it is learned as the first of two, as the last of two.
REPLIES: dict[str, tuple[str, dict[str, Any], tuple[bool, bool]]] = {
    "empty": (CHATML.jinja, {"content": ""}, (False, False)),
    "blank": (CHATML.jinja, {"content": " \n"}, (False, False)),
    "thoughts that no reply has": (CHATML.jinja, THOUGHT, (False, False)),
    "thoughts that only the last reply has": (THINKING.jinja, THOUGHT, (False, True)),
    "thoughts in the text": (THINKING.jinja, {"content": "<think>Hm</think>"}, (False, True)),
    "thoughts in the text, which are dropped": (FORGETTING.jinja, {"content": "<think>Hm</think>"}, (False, False)),
    "an empty thought": (THINKING.jinja, {"content": ""}, (False, False)),
    "channels": (HARMONY_TEMPLATE, THOUGHT, (False, True)),
    "markers": (MARKED_TEMPLATE, {"content": ""}, (False, False)),
    "markers, thoughts that no reply has": (MARKED_TEMPLATE, THOUGHT, (False, False)),
    "a call": (THINKING.jinja, {"content": "", "tool_calls": [CALL]}, (True, True)),
}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_without_text_are_context(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template, reply, learned = REPLIES[name]
    reply = {"role": "assistant", **reply}
    for messages, is_learned in zip(([USER, reply, USER, GOOD], [USER, GOOD, USER, reply]), learned, strict=True):
        row = tokenize({"messages": messages}, tokenizer)
        assert row["notes"] == [EMPTY] * (not is_learned)
        texts = learned_text(messages, tokenizer)
        assert len(texts) == 1 + is_learned
        assert sum("." in text for text in texts) == 1  # of GOOD, whose first token may begin in the header
        assert not any(text.strip() == "<|im_end|>" for text in texts)


@pytest.mark.parametrize("template", [CHATML.jinja, MARKED_TEMPLATE])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_turns_that_the_data_exclude_are_context(template: str, mark: dict[str, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = template
    wrong = {"role": "assistant", "content": "Nowhere.", **mark}
    opening = {"role": "assistant", "content": "Hello.", **mark}
    record = {"messages": [opening, USER, wrong, USER, {**GOOD, "weight": 1, "train": True}]}
    messages = parse_record(record)["messages"]
    assert learned_text(messages, tokenizer) == ["There.<|im_end|>"]
    text = tokenizer.decode(tokenize(record, tokenizer)["input_ids"])
    assert "<|im_start|>assistant\nNowhere.<|im_end|>" in text
    row = tokenize({"messages": [USER, wrong]}, tokenizer)
    assert (row["problem"], row["notes"]) == (f"nothing to learn: {UNLEARNED}", [UNLEARNED])


@pytest.mark.parametrize("template", [CHATML.jinja, MARKED_TEMPLATE, MARKED_LAST, THINKING.jinja])
def test_the_end_of_a_reply_that_was_cut_off_is_not_learned(template: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    messages = [USER, GOOD, USER, GOOD]
    *earlier, whole = learned_text(messages, tokenizer)
    assert whole.endswith("There.<|im_end|>")
    cut = parse_record({"messages": [*messages[:-1], {**GOOD, "truncated": True}]})["messages"]
    assert learned_text(cut, tokenizer) == [*earlier, whole.removesuffix("<|im_end|>")]
    assert (
        tokenize({"messages": cut}, tokenizer)["input_ids"] == tokenize({"messages": messages}, tokenizer)["input_ids"]
    )
