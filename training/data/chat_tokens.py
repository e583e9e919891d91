"""Turns conversations into training rows: token ids under the chat template, and a mask of the assistant's tokens.

Worked example, a ChatML template and the conversation user "Hi", assistant "Yo" (each word and sign one token):

    text        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    loss_mask        0        0   0  0      0      0       0           0      0  1      1      0

The assistant's header is given at decoding, so it is not learned. Its end-of-turn token is learned; the line break
after that token belongs to the template. Rows are cut on the right, ids and mask alike.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections import Counter
from typing import Any

import datasets
from jinja2 import TemplateError

from training.data.layouts import Messages
from training.data.reply_spans import ChatRenderer, find_special_ids
from training.data.thoughts import find_thought_end

logger = logging.getLogger(__name__)

# The columns of a training row.
ROW = {"input_ids": datasets.Sequence(datasets.Value("int32")), "loss_mask": datasets.Sequence(datasets.Value("int8"))}
_TOKENIZED = datasets.Features({**ROW, "problem": datasets.Value("string")})
# Part of the cache key of tokenized rows: raise it when the code below gives another result.
_CACHE_VERSION = 6
# A process starts in about 0.1 s; this many short rows take 0.4 s.
_ROWS_PER_PROCESS = 1000


def tokenize_conversations(
    conversations: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int,
    num_proc: int | None = None,
    train_on_thinking: bool = True,
) -> datasets.Dataset:
    """Tokenizes all conversations into the columns of `tokenize_row`.

    Args:
        conversations: the column `conversation` of `load_conversations`.
        max_length: the most tokens of a row; longer rows are cut.
        num_proc: processes that tokenize; None = one for each core, fewer for small sets.
        train_on_thinking: learn the thoughts at the beginning of replies.

    Raises:
        ValueError: a tokenizer without a chat template or character offsets.
    """
    check_tokenizer(tokenizer, max_length)
    num_proc = num_proc or min(count_cores(), len(conversations) // _ROWS_PER_PROCESS)
    return conversations.map(
        _tokenize_rows,
        batched=True,
        fn_kwargs={
            "tokenizer": tokenizer,
            "max_length": max_length,
            "train_on_thinking": train_on_thinking,
            "version": _CACHE_VERSION,
        },
        features=_TOKENIZED,
        remove_columns=conversations.column_names,
        num_proc=num_proc if num_proc > 1 else None,
        desc="Tokenizing conversations",
    )


def count_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drop_unusable(rows: datasets.Dataset) -> datasets.Dataset:
    """Returns the rows that can be trained on, without the column `problem`; a warning counts the others.

    Raises:
        ValueError: no row is left.
    """
    problems = Counter(problem for problem in rows["problem"] if problem)
    if problems.total() == len(rows):
        raise ValueError(f"no conversation can be used; reasons and how often: {dict(problems)}")
    for problem, count in problems.items():
        logger.warning("dropped %d of %d conversations: %s", count, len(rows), problem)
    if problems:
        rows = rows.select([row for row, problem in enumerate(rows["problem"]) if not problem])
    return rows.remove_columns("problem")


def check_tokenizer(tokenizer: Any, max_length: int) -> None:
    """Raises ValueError for a tokenizer or a length with which no row can be made."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: set tokenizer.chat_template and save it with the target"
        )
    if not tokenizer.is_fast:
        raise ValueError("the target's tokenizer gives no character offsets: convert it to a fast (tokenizers) one")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; give the longest row in tokens, at least 1")


def _tokenize_rows(rows: dict[str, list[str]], version: int, **options: Any) -> dict[str, list[Any]]:
    made = [tokenize_row(text, **options) for text in rows["conversation"]]
    return {name: [row[name] for row in made] for name in _TOKENIZED}


def tokenize_row(text: str, tokenizer: Any, max_length: int, train_on_thinking: bool = True) -> dict[str, Any]:
    """Tokenizes one conversation of `load_conversations`.

    Returns:
        `input_ids` and `loss_mask`, cut to `max_length`; `problem`: why the row cannot be used, or empty.
    """
    conversation = json.loads(text)
    messages, tools = conversation["messages"], conversation.get("tools")
    try:
        input_ids, loss_mask = tokenize_conversation(
            messages, tokenizer, tools=tools, train_on_thinking=train_on_thinking
        )
    except (TemplateError, ValueError) as error:
        problem = f"the chat template rejects it ({error})" if isinstance(error, TemplateError) else str(error)
        return {"input_ids": [], "loss_mask": [], "problem": problem}
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    problem = "" if any(loss_mask) else f"no token of the assistant's within max_length={max_length}"
    return {"input_ids": input_ids, "loss_mask": loss_mask, "problem": problem}


def tokenize_conversation(
    messages: Messages, tokenizer: Any, *, tools: list[dict[str, Any]] | None = None, train_on_thinking: bool = True
) -> tuple[list[int], list[int]]:
    """Returns the token ids of a conversation under the chat template, and 1 for each token of the assistant.

    The mask includes a reply's end-of-turn token and excludes its header. The template's `{% generation %}` markers
    tell where replies are; without them, renderings are compared.

    Raises:
        ValueError: a reply cannot be found in the rendered text.
        TemplateError: the template rejects the conversation.
    """
    renderer = ChatRenderer(tokenizer, tools)
    marked = renderer.find_marked(messages)
    text, spans = marked or (renderer.render(messages), [])
    if marked is None:
        spans = list(renderer.find_replies(messages, text))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = list(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    special = find_special_ids(tokenizer)
    loss_mask = [0] * len(input_ids)
    for span in spans:
        first, end = bisect_left(starts, span.begin), bisect_left(starts, span.end)
        # The next special token ends the turn, unless text of the template stands in between.
        turn_end = next((place for place in range(end, len(starts)) if input_ids[place] in special), None)
        if not span.has_turn_end and turn_end is not None and not text[span.end : starts[turn_end]].strip():
            end = turn_end + 1
        thought_end = None if train_on_thinking else find_thought_end(text, span.begin, span.end)
        if thought_end is not None:
            first = bisect_left(starts, thought_end)
        loss_mask[first:end] = [1] * (end - first)
    return input_ids, loss_mask
