"""Conversations to training rows: reading, the chat template, and the mask of the tokens the assistant wrote.

Legend: B batch, T tokens of the longest row of a batch, V target vocabulary.

Worked example, a ChatML template and the conversation user "Hi", assistant "Yo" (each word and sign one token):

    text        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    loss_mask        0        0   0  0      0      0       0           0      0  1      1      0

The assistant's header is given to it at decoding, so it is not learned; its end-of-turn token is; the line break behind
that is the template's again.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from jinja2 import TemplateError
from torch import Tensor

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_MESSAGE_FEATURES = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
_PARSED = datasets.Features({"messages": _MESSAGE_FEATURES, "problem": datasets.Value("string")})
_TOKENIZED = datasets.Features(
    {
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "loss_mask": datasets.Sequence(datasets.Value("int8")),
        "problem": datasets.Value("string"),
    }
)
# Part of the cache key of what is read and tokenized: raise it when the code below gives another result.
_CACHE_VERSION = 2


class BadLineError(ValueError):
    """A line that is no conversation; the message names file and line."""


def parse_conversation(record: Any) -> Messages:
    """A record in ShareGPT (`conversations` of `from` / `value`) or `messages` (`role` / `content`) form as messages.

    Raises:
        ValueError: what is wrong with it.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    turns = record.get("messages") or record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"expected a non-empty list `messages` or `conversations`, got the keys {sorted(record)}")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError(f"expected a turn with role and content, got {type(turn).__name__}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in _ROLES:
            raise ValueError(f"unknown role {role!r}; known roles: {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"the content of a {role} turn is {type(content).__name__}, expected text")
        messages.append({"role": _ROLES[role], "content": content})
    return messages


def load_conversations(
    paths: Sequence[str], *, split: str = "train", max_samples: int | None = None, skip_bad_lines: bool = False
) -> datasets.Dataset:
    """Conversations of files, folders and hub ids, in order, as a dataset with the column `messages`.

    What was read is kept in the cache of `datasets` and mapped into memory from there, until a file changes.

    Args:
        paths: JSON or JSON-lines files (gzipped or not), folders of such files, hub ids.
        split: which split of a hub id; files have none.
        max_samples: keep the first so many.
        skip_bad_lines: count and skip malformed lines instead of raising.

    Raises:
        ValueError: a missing file, no conversation at all, or (BadLineError) a malformed line, with file and line.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}; give a number of at least 1, or none for all")
    parts: list[datasets.Dataset] = []
    missing = max_samples
    for path in paths:
        if missing == 0:
            break
        for part in _read_path(path, split, missing):
            problems = [problem for problem in part["problem"] if problem]
            if problems and not skip_bad_lines:
                raise BadLineError(f"{problems[0]}. Mend it, or skip such lines with --skip_bad_lines true")
            if problems:
                logger.warning("skipped %d malformed lines; the first: %s", len(problems), problems[0])
                part = part.select([row for row, problem in enumerate(part["problem"]) if not problem])
            if missing is not None:
                part = part.select(range(min(missing, len(part))))
                missing -= len(part)
            if len(part):
                parts.append(part.remove_columns("problem"))
    if not parts:
        raise ValueError(f"no conversations in {', '.join(paths)} (max_samples={max_samples}); give others")
    return datasets.concatenate_datasets(parts)


def _read_path(path: str, split: str, max_samples: int | None) -> Iterator[datasets.Dataset]:
    """One dataset of `messages` and `problem` (empty for a good line) for each file behind a path, or for a hub id."""
    files = _find_files(path)
    if not files:
        rows = datasets.load_dataset(path, split=split)
        if max_samples is not None:
            rows = rows.select(range(min(len(rows), max_samples)))
        yield rows.map(
            _parse_row, with_indices=True, fn_kwargs={"name": f"{path} ({split})"}, features=_PARSED,
            remove_columns=rows.column_names, desc="Reading conversations",
        )  # fmt: skip
    for file in files:
        stat = file.stat()
        # Everything the result depends on is an argument, because the arguments are the key of the cache.
        key = {"size": stat.st_size, "changed": stat.st_mtime_ns, "version": _CACHE_VERSION}
        yield datasets.Dataset.from_generator(
            _generate_rows,
            features=_PARSED,
            gen_kwargs={"file": str(file.resolve()), "max_samples": max_samples, "key": key},
        )


def _find_files(path: str) -> list[Path]:
    """Local files behind a name, in order; empty when it is not local."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.name.endswith(_SUFFIXES))
        if not files:
            raise ValueError(f"{path} has no files ending in {', '.join(_SUFFIXES)}")
        return files
    if place.name.endswith(_SUFFIXES) or path.startswith((".", "/", "~")):
        raise ValueError(f"dataset {path} does not exist; give an existing file or folder, or a hub id")
    return []


def _parse_row(row: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    try:  # a hub dataset fills what a row lacks with None
        messages = parse_conversation({key: value for key, value in row.items() if value is not None})
    except ValueError as error:
        return {"messages": [], "problem": f"{name}, row {index + 1}: {error}"}
    return {"messages": messages, "problem": ""}


def _generate_rows(file: str, max_samples: int | None, key: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Good and bad lines alike, so that the cached result can be used with and without `skip_bad_lines`."""
    num_good = number = 0
    for number, record in read_records(Path(file)):
        if num_good == max_samples:
            break
        try:
            if isinstance(record, Exception):
                raise ValueError(str(record))
            yield {"messages": parse_conversation(record), "problem": ""}
            num_good += 1
        except ValueError as error:
            yield {"messages": [], "problem": f"{file}, line {number}: {error}"}
    if number == 0:  # `datasets` has no tables without rows
        yield {"messages": [], "problem": f"{file}, line 1: the file is empty"}


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, parsed record or the error) of a JSON or JSON-lines file, gzipped or not.

    A JSON file may hold one array instead, ShareGPT's original form; the numbers are then those of its items.
    """
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            if path.name.removesuffix(".gz").endswith(".json"):
                text = lines.read()
                if text.lstrip().startswith("["):
                    try:
                        yield from enumerate(json.loads(text), start=1)
                    except json.JSONDecodeError as error:
                        yield error.lineno, error
                    return
                lines = iter(text.split("\n")[: -1 if text.endswith("\n") else None])  # type: ignore[assignment]
            for line in lines:
                number += 1
                try:
                    yield number, json.loads(line) if line.strip() else ValueError("the line is empty")
                except json.JSONDecodeError as error:
                    yield number, error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # damaged: nothing behind it can be read
        yield number + 1, ValueError(f"the file cannot be read from here on ({error})")


def tokenize_conversations(
    conversations: datasets.Dataset, tokenizer: Any, *, max_length: int, num_proc: int | None = None
) -> datasets.Dataset:
    """Rows `input_ids` and `loss_mask`, cut to `max_length` tokens.

    Conversations without a token of the assistant's left, and those the chat template cannot render or mask, are
    dropped and counted in a warning.

    Raises:
        ValueError: a tokenizer without chat template or character offsets, or no row left.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: set tokenizer.chat_template and save it with the target"
        )
    if not tokenizer.is_fast:
        raise ValueError("the target's tokenizer gives no character offsets: convert it to a fast (tokenizers) one")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; give the longest row in tokens, at least 1")
    rows = conversations.map(
        _tokenize_row,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "version": _CACHE_VERSION},
        features=_TOKENIZED,
        remove_columns=conversations.column_names,
        num_proc=num_proc if num_proc and num_proc > 1 else None,
        desc="Tokenizing conversations",
    )
    problems = Counter(problem for problem in rows["problem"] if problem)
    if problems.total() == len(rows):
        raise ValueError(f"no conversation can be used; reasons and how often: {dict(problems)}")
    for problem, count in problems.items():
        logger.warning("dropped %d of %d conversations: %s", count, len(rows), problem)
    if problems:
        rows = rows.select([row for row, problem in enumerate(rows["problem"]) if not problem])
    return rows.remove_columns("problem")


def _tokenize_row(row: dict[str, Any], tokenizer: Any, max_length: int, version: int) -> dict[str, Any]:
    try:
        input_ids, loss_mask = tokenize_conversation(row["messages"], tokenizer)
    except TemplateError as error:
        return {"input_ids": [], "loss_mask": [], "problem": f"the chat template refuses it ({error})"}
    except ValueError as error:
        return {"input_ids": [], "loss_mask": [], "problem": str(error)}
    input_ids, loss_mask = input_ids[:max_length], loss_mask[:max_length]
    problem = "" if any(loss_mask) else f"no token of the assistant's within max_length={max_length}"
    return {"input_ids": input_ids, "loss_mask": loss_mask, "problem": problem}


def tokenize_conversation(messages: Messages, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of a conversation under the tokenizer's chat template, and 1 where the assistant wrote the token (its
    end-of-turn token included, its header not).

    The template's `{% generation %}` markers say where that is; without them, the rendering is searched.

    Raises:
        ValueError: the template renders the conversation so that the replies cannot be found in it.
    """
    if re.search(r"\{%-?\s*generation\b", tokenizer.get_chat_template()):
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
        return list(encoded["input_ids"]), [int(bit) for bit in encoded["assistant_masks"]]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    input_ids = list(encoded["input_ids"])
    starts = [start for start, _ in encoded["offset_mapping"]]
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    loss_mask = [0] * len(input_ids)
    for begin, end in _find_replies(messages, text, tokenizer, special.values()):
        first, behind = bisect_left(starts, begin), bisect_left(starts, end)
        # The next special token ends the turn, unless text stands between: text of the template's, not the assistant's.
        turn_end = next((place for place in range(behind, len(starts)) if input_ids[place] in special), None)
        if turn_end is not None and not text[end : starts[turn_end]].strip():
            behind = turn_end + 1
        loss_mask[first:behind] = [1] * (behind - first)
    return input_ids, loss_mask


def _find_replies(
    messages: Messages, text: str, tokenizer: Any, special_tokens: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Where each reply stands in the rendered conversation: its first character, and the one behind its last.

    A reply begins where the rendering of all before it, with the generation prompt, ends. Its end is looked up, not
    taken from the rendering up to it, because templates (Qwen3's, for one) may render the last reply unlike the others.
    """
    for index, message in enumerate(messages):
        # What the assistant says before anyone else answers no prompt, and is not learned.
        is_opening = all(earlier["role"] == "assistant" for earlier in messages[:index])
        if message["role"] != "assistant" or is_opening:
            continue
        before: str = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        begin, reply = len(before), message["content"]
        place = text.find(reply, begin)
        if place < 0:  # many templates trim
            reply = reply.strip()
            place = text.find(reply, begin)
        # A special token in between: what was found is the same text in a later turn.
        is_elsewhere = any(token in text[begin:place] for token in special_tokens)
        if not text.startswith(before) or place < 0 or is_elsewhere:
            raise ValueError(
                "the chat template renders replies differently inside a conversation, so that the assistant's tokens "
                "cannot be told apart; add {% generation %} markers to the template"
            )
        yield begin, place + len(reply)


class ConversationCollator:
    """Pads rows on the right: input_ids, attention_mask and loss_mask, each [B, T] int64.

    Args:
        pad_token_id: any valid id; padding is masked everywhere.
        multiple_of: T is rounded up to it.
    """

    def __init__(self, pad_token_id: int, *, multiple_of: int = 8) -> None:
        self.pad_token_id = pad_token_id
        self.multiple_of = multiple_of

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        batch = {
            "input_ids": torch.full((len(rows), length), self.pad_token_id),
            "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
            "loss_mask": torch.zeros(len(rows), length, dtype=torch.long),
        }
        for index, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][index, :size] = torch.tensor(row["input_ids"])
            batch["attention_mask"][index, :size] = 1
            batch["loss_mask"][index, :size] = torch.tensor(row["loss_mask"])
        return batch


def count_tokens(rows: datasets.Dataset, vocab_size: int) -> Tensor:
    """How often each token is to be predicted: [V] int64, over the positions of the loss mask.

    Raises:
        ValueError: an id outside the vocabulary (rows tokenized for another target).
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in rows.with_format("arrow").iter(1000):
        input_ids, loss_mask = (
            torch.from_numpy(batch[name].combine_chunks().flatten().to_numpy().copy())
            for name in ("input_ids", "loss_mask")
        )
        ids = input_ids[loss_mask == 1]
        if ids.numel() and int(ids.max()) >= vocab_size:
            raise ValueError(
                f"token id {int(ids.max())} with a vocabulary of {vocab_size}: tokenize for this target again"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts
