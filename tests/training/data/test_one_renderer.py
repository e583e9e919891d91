"""Conversations are rendered alike everywhere: the same tokens in training rows and in the prompts of every program."""

import json
from typing import Any

import pytest

from draftsmith.inference import Target
from draftsmith.inference.serving.protocol import ChatRequest
from draftsmith.inference.serving.reply_maker import ReplyMaker
from draftsmith.scripts.chat.session import Conversation as Chat
from draftsmith.scripts.shared.model_loading import encode_messages
from draftsmith.training.data.chat_tokens import tokenize_row
from draftsmith.training.data.layouts import parse_record
from draftsmith.training.synthesis.prompts import read_prompts
from draftsmith.training.synthesis.turn_template import TurnTemplate
from tests.chat_template_shapes import SHAPES, Shape
from tests.tiny_targets import tiny_target

TARGET = Target(tiny_target("llama", vocab_size=4096))


def server_ids(shape: Shape, messages: list[dict[str, Any]], tokenizer: Any, **fields: Any) -> list[int]:
    body = {"messages": messages, "tools": shape.tools, **fields}
    request = ChatRequest.model_validate_json(json.dumps(body))
    return ReplyMaker(TARGET, tokenizer, {"none": None}, max_length=512).encode_chat(request)


def first_learned(row: dict[str, Any]) -> list[int]:
    """The places where replies begin."""
    mask = row["loss_mask"]
    return [place for place, bit in enumerate(mask) if bit and not mask[place - 1]]


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_prompts_have_the_same_tokens(name: str, tokenizer: Any, tmp_path: Any) -> None:
    shape = SHAPES[name]
    tokenizer.chat_template = shape.jinja
    record = {"messages": shape.messages, "tools": shape.tools}
    parsed = parse_record(record)
    row = tokenize_row(json.dumps(parsed), tokenizer, max_length=512)
    assert row["problem"] == ""
    assert tokenizer.decode(row["input_ids"]) == shape.text
    if "add_generation_prompt" in shape.jinja:
        whole = {"chat_template_kwargs": {"add_generation_prompt": False}}
        assert server_ids(shape, shape.messages, tokenizer, **whole) == row["input_ids"]
    else:
        assert server_ids(shape, shape.messages, tokenizer) == row["input_ids"]

    replies = [index for index, message in enumerate(shape.messages) if message["role"] == "assistant"]
    begins = first_learned(row)
    assert len(begins) == len(replies)
    for index, begin in zip(replies, begins, strict=True):
        before, before_parsed = shape.messages[:index], parsed["messages"][:index]
        prompt = server_ids(shape, before, tokenizer)
        assert prompt == row["input_ids"][:begin]
        assert TurnTemplate(tokenizer).encode_prompt(before_parsed, "assistant", parsed.get("tools")) == prompt
        if shape.tools is None:
            assert encode_messages(tokenizer, before_parsed)[0].tolist() == prompt
    # Prompts of evaluations and benchmarks: up to the first reply.
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({name: value for name, value in record.items() if value}) + "\n")
    (first,) = read_prompts(file)
    assert first.encode_prompt(tokenizer) == row["input_ids"][: begins[0]]


def test_a_chat_in_the_terminal_is_rendered_alike(tokenizer: Any) -> None:
    tokenizer.chat_template = SHAPES["SmolVLM"].jinja
    chat = Chat(tokenizer, system="Be brief.", is_raw=False)
    chat.ask("Hi")
    chat.answer("Yo")
    text = f"{SHAPES['SmolVLM'].text.partition('Assistant: Bye')[0]}Assistant:"
    assert tokenizer.decode(chat.ask("And now?")[0]) == text
