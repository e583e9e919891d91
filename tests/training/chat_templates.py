"""Chat templates that behave as those of well-known models do, each beside the same in plain Python.

`pieces(messages)` returns what the template writes, piece by piece, with what each is: "template" (not learned, also
an empty reply) or "reply".
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Piece = tuple[str, str]
END = "<|im_end|>"


class RefusedError(Exception):
    """The template raises for this conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    jinja: str
    pieces: Callable[[list[dict[str, Any]]], Iterator[Piece]]


def is_learned(messages: list[dict[str, Any]], index: int) -> bool:
    """An assistant's turn that somebody else's stands before."""
    return messages[index]["role"] == "assistant" and any(m["role"] != "assistant" for m in messages[:index])


def reply_kind(messages: list[dict[str, Any]], index: int, said: str) -> str:
    """`said`: what the template writes of the turn; marks of thoughts say nothing."""
    is_empty = not said.replace("<think>", "").replace("</think>", "").strip()
    return "reply" if is_learned(messages, index) and not is_empty else "template"


def refuse_calls(message: dict[str, Any]) -> None:
    """In a template that writes none."""
    if message.get("tool_calls"):
        raise RefusedError


def chatml(messages: list[dict[str, Any]]) -> Iterator[Piece]:
    for index, message in enumerate(messages):
        refuse_calls(message)
        yield f"<|im_start|>{message['role']}\n", "template"
        yield message["content"] + END, reply_kind(messages, index, message["content"])
        yield "\n", "template"


CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    chatml,
)


def trimming(messages: list[dict[str, Any]]) -> Iterator[Piece]:
    yield "<s>", "template"
    for index, message in enumerate(messages):
        refuse_calls(message)
        yield f"[{message['role']}]\n\n", "template"
        yield message["content"].strip() + END, reply_kind(messages, index, message["content"])


# Llama 3: trims every text, and nothing stands between two turns.
TRIMMING = ChatTemplate(
    "<s>{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}",
    trimming,
)


def merging(messages: list[dict[str, Any]]) -> Iterator[Piece]:
    system = f"{messages[0]['content']}\n\n" if messages[0]["role"] == "system" else ""
    rest = messages[1:] if system else messages
    for index, message in enumerate(rest):
        if (message["role"] == "user") != (index % 2 == 0) or message["role"] in ("system", "tool"):
            raise RefusedError
        refuse_calls(message)
        if message["role"] == "user":
            yield f"[INST] {system if index == 0 else ''}{message['content']} [/INST]", "template"
        else:
            yield " " + message["content"].strip() + END, reply_kind(rest, index, message["content"])


# Mistral: the system prompt joins the first user turn, user and assistant must alternate, no header for a reply.
MERGING = ChatTemplate(
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if system else messages %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role in ('system', 'tool') %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ system if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}",
    merging,
)


def split_thought(message: dict[str, Any]) -> tuple[str, str]:
    content = message["content"]
    if "reasoning_content" in message:
        return message["reasoning_content"].strip("\n"), content
    if "</think>" not in content:
        return "", content
    thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return thought, content.split("</think>")[-1].lstrip("\n")


_SPLIT_THOUGHT = (
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content.strip('\n') %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"


def calls(message: dict[str, Any]) -> str:
    return "".join(
        f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", [])
    )


def thinking(messages: list[dict[str, Any]], *, opens: bool = False) -> Iterator[Piece]:
    last_question = max((index for index, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            role = "user" if message["role"] == "tool" else message["role"]
            text = f"<result>{message['content']}</result>" if message["role"] == "tool" else message["content"]
            yield f"<|im_start|>{role}\n{text}{END}\n", "template"
            continue
        yield "<|im_start|>assistant\n", "template"
        thought, content = split_thought(message)
        thinks = index > last_question and (index == len(messages) - 1 or thought)
        kind = reply_kind(messages, index, (thought if thinks else "") + content + calls(message))
        if thinks:
            yield "<think>\n", "template" if opens else kind
            yield f"{thought.strip(chr(10))}\n</think>\n\n", kind
            content = content.lstrip("\n")
        yield content + calls(message) + END, kind
        yield "\n", "template"


def _thinking_jinja(header: str) -> str:
    return (
        _TOOLS + "{% for m in messages %}{% if m.role != 'assistant' %}"
        "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
        "{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% else %}<|im_start|>assistant\n"
        + _SPLIT_THOUGHT
        + "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% set content = content.lstrip('\n') %}{{ content }}"
        "{% else %}{{ content }}{% endif %}"
        + _CALLS
        + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + header
        + "{% endif %}"
    )


# Qwen3: thoughts only after the last question, an empty one in the last reply that has none; results are the user's.
THINKING = ChatTemplate(_thinking_jinja("<|im_start|>assistant\n"), thinking)
# Its successors that always think: the prompt opens the thought.
OPENING = ChatTemplate(
    _thinking_jinja("<|im_start|>assistant\n<think>\n"), lambda messages: thinking(messages, opens=True)
)


def forgetting(messages: list[dict[str, Any]]) -> Iterator[Piece]:
    for index, message in enumerate(messages):
        if message["role"] == "system":
            raise RefusedError
        if message["role"] != "assistant":
            yield f"<|im_start|>{message['role']}: {message['content']}", "template"
            continue
        yield "<|im_start|>assistant: ", "template"
        said = message["content"].split("</think>")[-1] + calls(message)
        yield said + END, reply_kind(messages, index, said)


# DeepSeek-R1: the prompt opens a thought, and no reply has any, not even the last; refuses system prompts.
FORGETTING = ChatTemplate(
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    "<|im_start|>{{ m.role }}: "
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}" + _CALLS + "<|im_end|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: <think>\n{% endif %}",
    forgetting,
)


TEMPLATES = {
    "chatml": CHATML,
    "trimming": TRIMMING,
    "merging": MERGING,
    "thinking": THINKING,
    "opening": OPENING,
    "forgetting": FORGETTING,
}
