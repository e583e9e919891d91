"""Conversations to training rows: the chat template, and the mask of the tokens the assistant wrote.

Worked example, a ChatML template and the conversation user "Hi", assistant "Yo" (each word and sign one token):

    text        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    loss_mask        0        0   0  0      0      0       0           0      0  1      1      0

The assistant's header is given to it at decoding, so it is not learned; its end-of-turn token is; the line break behind
that is the template's again. Rows are cut on the right, ids and mask alike, so that the mask cannot shift.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from typing import Any

import datasets
from jinja2 import TemplateError

from training.data.layouts import Messages
from training.data.reply_spans import ChatRenderer, find_special_ids
from training.data.thoughts import count_lost_thoughts, find_thought_end, find_thoughts

logger = logging.getLogger(__name__)

_TOKENIZED = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "loss_mask": datasets.Sequence(datasets.Value("int8")),
        "problem": datasets.Value("string"),
        "lost_thoughts": datasets.Value("int32"),
    }
)
# Part of the cache key of what is tokenized: raise it when the code below gives another result.
_CACHE_VERSION = 5


def tokenize_conversations(
    conversations: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int,
    num_proc: int | None = None,
    train_on_thinking: bool = True,
) -> datasets.Dataset:
    """Rows `input_ids` and `loss_mask`, cut to `max_length` tokens.

    Conversations without a token of the assistant's left, and those the chat template cannot render or mask, are
    dropped and counted in a warning.

    Args:
        conversations: the column `conversation` of `load_conversations`.
        train_on_thinking: whether the thoughts a reply begins with are learned.

    Raises:
        ValueError: a tokenizer without chat template or character offsets, or no row left.
    """
    rows = tokenize_with_problems(
        conversations, tokenizer, max_length=max_length, num_proc=num_proc, train_on_thinking=train_on_thinking
    )
    problems = Counter(problem for problem in rows["problem"] if problem)
    if problems.total() == len(rows):
        raise ValueError(f"no conversation can be used; reasons and how often: {dict(problems)}")
    for problem, count in problems.items():
        logger.warning("dropped %d of %d conversations: %s", count, len(rows), problem)
    if problems:
        rows = rows.select([row for row, problem in enumerate(rows["problem"]) if not problem])
    warn_of_lost_thoughts(sum(rows["lost_thoughts"]))
    return rows.remove_columns(["problem", "lost_thoughts"])


def warn_of_lost_thoughts(count: int) -> None:
    """Says once for a set that its chat template has no place for thoughts."""
    if count:
        logger.warning(
            "the chat template drops the thoughts of %d replies, also where they are a conversation's last, so that "
            "nothing of them is learned: set a chat template that writes them (tokenizer.chat_template) to train on "
            "thoughts",
            count,
        )


def tokenize_with_problems(
    conversations: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int,
    num_proc: int | None = None,
    train_on_thinking: bool = True,
) -> datasets.Dataset:
    """As `tokenize_conversations`, with all rows and the columns `problem` (why a row cannot be used, or
    empty) and `lost_thoughts` (replies whose thoughts the chat template has dropped, `count_lost_thoughts`)."""
    check_tokenizer(tokenizer, max_length)
    return conversations.map(
        tokenize_row,
        fn_kwargs={
            "tokenizer": tokenizer,
            "max_length": max_length,
            "train_on_thinking": train_on_thinking,
            "version": _CACHE_VERSION,
        },
        features=_TOKENIZED,
        remove_columns=conversations.column_names,
        num_proc=num_proc if num_proc and num_proc > 1 else None,
        desc="Tokenizing conversations",
    )


def check_tokenizer(tokenizer: Any, max_length: int) -> None:
    """Refuses what no row could be made with.

    Raises:
        ValueError: no chat template, no character offsets, no length.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: set tokenizer.chat_template and save it with the target"
        )
    if not tokenizer.is_fast:
        raise ValueError("the target's tokenizer gives no character offsets: convert it to a fast (tokenizers) one")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; give the longest row in tokens, at least 1")


def tokenize_row(
    row: dict[str, Any], tokenizer: Any, max_length: int, train_on_thinking: bool = True, version: int = _CACHE_VERSION
) -> dict[str, Any]:
    """`input_ids`, `loss_mask`, `problem` (empty for a row that can be used) and `lost_thoughts` of a row of
    `load_conversations`."""
    conversation = json.loads(row["conversation"])
    unusable: dict[str, Any] = {"input_ids": [], "loss_mask": [], "lost_thoughts": 0}
    try:
        input_ids, loss_mask = tokenize_conversation(
            conversation["messages"],
            tokenizer,
            tools=conversation.get("tools"),
            train_on_thinking=train_on_thinking,
        )
    except TemplateError as error:
        return {**unusable, "problem": f"the chat template refuses it ({error})"}
    except ValueError as error:
        return {**unusable, "problem": str(error)}
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    problem = "" if any(loss_mask) else f"no token of the assistant's within max_length={max_length}"
    num_lost = 0
    if train_on_thinking and find_thoughts(conversation["messages"][-1]):
        text = ChatRenderer(tokenizer, conversation.get("tools")).render(conversation["messages"])
        num_lost = count_lost_thoughts(conversation["messages"], text)
    return {"input_ids": input_ids, "loss_mask": loss_mask, "problem": problem, "lost_thoughts": num_lost}


def tokenize_conversation(
    messages: Messages, tokenizer: Any, *, tools: list[dict[str, Any]] | None = None, train_on_thinking: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation under the tokenizer's chat template, and 1 where the assistant wrote the token (its
    end-of-turn token included, its header not).

    The template's `{% generation %}` markers say where that is; without them, renderings are compared.

    Raises:
        ValueError: the template renders the conversation so that the replies cannot be found in it.
        TemplateError: it refuses the conversation.
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
        first, behind = bisect_left(starts, span.begin), bisect_left(starts, span.end)
        # The next special token ends the turn, unless text stands between: text of the template's, not the assistant's.
        turn_end = next((place for place in range(behind, len(starts)) if input_ids[place] in special), None)
        if not span.has_turn_end and turn_end is not None and not text[span.end : starts[turn_end]].strip():
            behind = turn_end + 1
        thought_end = None if train_on_thinking else find_thought_end(text, span.begin, span.end)
        if thought_end is not None:
            first = bisect_left(starts, thought_end)
        loss_mask[first:behind] = [1] * (behind - first)
    return input_ids, loss_mask
