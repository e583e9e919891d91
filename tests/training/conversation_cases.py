"""Conversations, chat templates and files for tests of what training reads."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets

from draftsmith.training.data.chat_tokens import tokenize_row

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Yo"},
    {"role": "assistant", "content": "Hi"},
]
MARKED_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's does, it writes an empty thought before a reply, if that is the last one, and drops earlier thoughts.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As gpt-oss's does: thoughts in a channel of their own, only those of the last reply; texts with channels are refused.
HARMONY_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels belong into fields') }}{% endif %}"
    "{% if loop.last and 'thinking' in m %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|im_end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
STRICT_TEMPLATE = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}"


def to_dataset(*conversations: list[dict[str, Any]]) -> datasets.Dataset:
    """As `load_conversations` gives them."""
    texts = [json.dumps({"messages": messages}) for messages in conversations]
    return datasets.Dataset.from_dict({"conversation": texts})


def to_messages(conversations: datasets.Dataset) -> list[Any]:
    return [json.loads(text)["messages"] for text in conversations["conversation"]]


def tokenize(
    messages: list[dict[str, Any]], tokenizer: Any, *, tools: list[dict[str, Any]] | None = None, **options: Any
) -> tuple[list[int], list[int]]:
    """The token ids and the mask of a conversation that is not cut.

    Raises:
        ValueError: it cannot be used.
    """
    row = tokenize_row(json.dumps({"messages": messages, "tools": tools}), tokenizer, 10**6, **options)
    if not row["input_ids"]:
        raise ValueError(row["problem"])
    return row["input_ids"], row["loss_mask"]


def learned_text(messages: list[dict[str, Any]], tokenizer: Any, **options: Any) -> list[str]:
    """The text of each run of tokens under the mask."""
    input_ids, loss_mask = tokenize(messages, tokenizer, **options)
    runs: list[list[int]] = []
    for position, (token, bit) in enumerate(zip(input_ids, loss_mask, strict=True)):
        if bit and (position == 0 or not loss_mask[position - 1]):
            runs.append([])
        if bit:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def write(path: Path, rows: list[Any]) -> str:
    data = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def sharegpt(*texts: str) -> dict[str, Any]:
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[index % 2], "value": text} for index, text in enumerate(texts)]}


def replies(rows: Any, tokenizer: Any) -> list[str]:
    """The first token of each row's reply."""
    return [tokenizer.convert_ids_to_tokens(row["input_ids"])[row["loss_mask"].index(1)] for row in rows]
