"""Turns conversations into training rows: token ids under the chat template, and a mask of the assistant's tokens.

Worked example, a ChatML template and the conversation user "Hi", assistant "Yo" (each word and sign one token):

    text        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    loss_mask        0        0   0  0      0      0       0           0      0  1      1      0

The assistant's header is given at decoding, so it is not learned. Its end-of-turn token is learned, unless the reply
was cut off (`truncated`). The line break after that token belongs to the template. Rows are cut on the right, ids and
mask alike.
"""

import hashlib
import json
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from pyarrow import compute

from draftsmith.inference.request.chat_template import ConversationError
from draftsmith.training.data.conversations import IMAGES_FIRST, BadLineError
from draftsmith.training.data.learned_turns import EMPTY, UNLEARNED, find_learned_turns
from draftsmith.training.data.reply_spans import Span, find_special_ids
from draftsmith.training.images.processor import ImageError, expand_images, load_processor

logger = logging.getLogger(__name__)

# The columns of a training row.
ROW = {"input_ids": datasets.Sequence(datasets.Value("int32")), "loss_mask": datasets.Sequence(datasets.Value("int8"))}
_PROBLEM = {"problem": datasets.Value("string"), "notes": datasets.Sequence(datasets.Value("string"))}
# More columns of sets with images: references to the images, the rendered text with their marks, and the tokens up to
# the end of the last image. Pixels are made from them for each batch.
IMAGE_COLUMNS = {
    "media": datasets.Sequence(datasets.Value("string")),
    "text": datasets.Value("string"),
    "media_end": datasets.Value("int32"),
}
# Part of the cache key of tokenized rows: raise it when the code below gives another result.
_CACHE_VERSION = 11
_UNUSABLE: dict[str, Any] = {"input_ids": [], "loss_mask": [], "notes": []}
# A process starts in about 0.1 s; this many short rows take 0.4 s.
_ROWS_PER_PROCESS = 1000


def tokenize_conversations(
    conversations: datasets.Dataset,
    tokenizer: Any,
    *,
    max_length: int,
    num_proc: int | None = None,
    skip_bad_lines: bool = False,
) -> datasets.Dataset:
    """Tokenizes all conversations into the columns of `tokenize_row`.

    Conversations with images need the processor that is saved with the tokenizer.

    Args:
        conversations: the column `conversation` of `load_conversations`.
        max_length: the most tokens of a row; longer rows are cut.
        num_proc: processes that tokenize; None = one for each core, fewer for small sets.
        skip_bad_lines: count conversations whose images cannot be read, instead of raising at the first one.

    Raises:
        ValueError: a tokenizer without a chat template or character offsets; images for a target that reads text only,
            or an image that cannot be read.
    """
    images = _describe_images(conversations)
    more: dict[str, Any] = {}
    if images:
        processor = load_processor(tokenizer.name_or_path)
        more = {"processor": processor, "skip_bad_lines": skip_bad_lines, "images": images}
        if not tokenizer.chat_template:
            tokenizer.chat_template = processor.chat_template
    check_tokenizer(tokenizer)
    num_proc = num_proc or min(count_cores(), len(conversations) // _ROWS_PER_PROCESS)
    return conversations.map(
        _tokenize_rows,
        batched=True,
        fn_kwargs={
            "tokenizer": tokenizer,
            "max_length": max_length,
            "version": _CACHE_VERSION,
            **more,
        },
        features=datasets.Features({**ROW, **IMAGE_COLUMNS, **_PROBLEM} if images else {**ROW, **_PROBLEM}),
        remove_columns=conversations.column_names,
        num_proc=num_proc if num_proc > 1 else None,
        desc="Tokenizing conversations",
    )


def _describe_images(conversations: datasets.Dataset) -> str:
    """A hash of the images' names, sizes and times of change, for the key of the cache; "" without images."""
    digest, found = hashlib.blake2b(digest_size=16), False
    for batch in conversations.select_columns("conversation").with_format("arrow").iter(1000):
        texts = batch["conversation"]
        for text in texts.filter(compute.starts_with(texts, IMAGES_FIRST)).to_pylist():
            found = True
            for reference in json.loads(text)["media"]:
                path = Path("" if reference.startswith("data:") else reference)
                stat = path.stat() if path.is_file() else None
                digest.update(repr(stat and (reference, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest() if found else ""


def count_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drop_unusable(rows: datasets.Dataset, counts: Counter[str] | None = None) -> datasets.Dataset:
    """Returns the rows that can be trained on, without the columns `problem` and `notes`; warnings count both.

    Args:
        counts: the reasons of dropped rows and the notes of the others are added.

    Raises:
        ValueError: no row is left.
    """
    dropped, notes, used = count_problems(rows)
    if not used:
        raise ValueError(f"no conversation can be used; reasons and how often: {dict(dropped)}")
    log_problems(dropped, notes, len(rows))
    if counts is not None:
        counts.update({f"dropped: {problem}": count for problem, count in dropped.items()})
        counts.update(notes)
    return (rows if len(used) == len(rows) else rows.select(used)).remove_columns([*_PROBLEM])


def count_problems(rows: datasets.Dataset) -> tuple[Counter[str], Counter[str], list[int]]:
    """Counts the reasons of rows that cannot be used, and the notes of the others; returns also the others' numbers."""
    problems = rows["problem"][:]
    used = [row for row, problem in enumerate(problems) if not problem]
    notes = Counter(chain.from_iterable(rows.select(used)["notes"]))
    return Counter(filter(None, problems)), notes, used


def log_problems(dropped: Mapping[str, int], notes: Mapping[str, int], num_rows: int) -> None:
    """Warns of dropped conversations and of what is left out; what the data ask for is only told."""
    for problem, count in dropped.items():
        logger.warning("dropped %d of %d conversations: %s", count, num_rows, problem)
    for note, count in notes.items():
        logger.log(logging.INFO if note == UNLEARNED else logging.WARNING, "%d %s", count, note)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer with which no row can be made."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: set tokenizer.chat_template and save it with the target"
        )
    if not tokenizer.is_fast:
        raise ValueError("the target's tokenizer gives no character offsets: convert it to a fast (tokenizers) one")


def _tokenize_rows(
    rows: dict[str, list[str]], version: int, images: str = "", skip_bad_lines: bool = False, **options: Any
) -> dict[str, list[Any]]:
    made = []
    for text in rows["conversation"]:
        try:
            made.append(tokenize_row(text, **options))
        except ImageError as error:
            if not skip_bad_lines:
                raise BadLineError(
                    f"{error}. Correct it, or skip such conversations with --skip_bad_lines true"
                ) from None
            made.append({**_UNUSABLE, "problem": "an image cannot be read"})
    if images:
        made = [{"media": [], "text": "", "media_end": 0, **row} for row in made]
    return {name: [row[name] for row in made] for name in made[0]}


def tokenize_row(text: str, tokenizer: Any, max_length: int, processor: Any = None) -> dict[str, Any]:
    """Tokenizes one conversation of `load_conversations`.

    The mask is 1 for each token of the assistant: it includes a reply's end-of-turn token and excludes its header. The
    template's `{% generation %}` markers tell where replies are; without them, renderings are compared.

    Args:
        processor: of sets with images; its chat template renders all their conversations.

    Returns:
        `input_ids` and `loss_mask`, cut to `max_length`; `problem`: why the row cannot be used, or empty. With images
        also `media`, `text` and `media_end`: such a row is never cut before the end of its last image.

    Raises:
        ImageError: an image cannot be read.
    """
    try:
        row = _tokenize(json.loads(text), tokenizer, processor)
    except ImageError:
        raise
    except ConversationError as error:
        return {**_UNUSABLE, "problem": f"the chat template rejects it ({error.kind})"}
    except ValueError as error:
        return {**_UNUSABLE, "problem": str(error)}
    if row.get("media_end", 0) > max_length:
        return {**_UNUSABLE, "problem": f"its images end after max_length={max_length}"}
    problem = (
        "" if any(row["loss_mask"][:max_length]) else f"no token of the assistant's within max_length={max_length}"
    )
    if not any(row["loss_mask"]) and (context := {EMPTY, UNLEARNED} & {*row["notes"]}):
        problem = f"nothing to learn: {' and '.join(sorted(context))}"
    return {**row, **{name: row[name][:max_length] for name in ROW}, "problem": problem}


def _tokenize(conversation: dict[str, Any], tokenizer: Any, processor: Any = None) -> dict[str, Any]:
    """The columns of `tokenize_row`, not cut.

    Replies are found in the text with one mark for each image. The marks become longer, and so the replies move.
    """
    turns = find_learned_turns(
        tokenizer,
        conversation["messages"],
        tools=conversation.get("tools"),
        template=None if processor is None else processor.chat_template,
    )
    text, spans, media = turns.text, turns.spans, conversation.get("media")
    if media:
        expanded = expand_images(processor, text, media)
        text = expanded.text
        spans = [replace(span, begin=expanded.move(span.begin), end=expanded.move(span.end)) for span in spans]
    input_ids, loss_mask, starts = _encode(text, spans, tokenizer)
    notes = [*turns.notes, *([conversation["note"]] if "note" in conversation else [])]
    row = {"input_ids": input_ids, "loss_mask": loss_mask, "notes": notes}
    if not media:
        return row
    return {
        **row,
        "media": media,
        "text": turns.text,
        "media_end": bisect_left(starts, expanded.move(expanded.places[-1][0])),
    }


def _encode(text: str, spans: Sequence[Span], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Token ids, loss mask, and the place in the text where each token starts."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = list(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    special = find_special_ids(tokenizer)
    loss_mask = [0] * len(input_ids)
    for span in spans:
        first, end = bisect_left(starts, span.begin), bisect_left(starts, span.end)
        # The next special token ends the turn, unless text of the template stands in between.
        turn_end = next((place for place in range(end, len(starts)) if input_ids[place] in special), None)
        if not span.is_complete and turn_end is not None and not text[span.end : starts[turn_end]].strip():
            end = turn_end + 1
        loss_mask[first:end] = [1] * (end - first)
    return input_ids, loss_mask, starts
