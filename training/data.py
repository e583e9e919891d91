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
from collections import Counter
from collections.abc import Iterator, Sequence
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
# Part of the cache key of what is read and tokenized: raise it when the code below gives another result.
_CACHE_VERSION = 1


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
    parts: list[datasets.Dataset] = []
    missing = max_samples
    for path in paths:
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
    num_good = 0
    for number, record in _read_records(Path(file)):
        if num_good == max_samples:
            return
        try:
            if isinstance(record, Exception):
                raise ValueError(str(record))
            yield {"messages": parse_conversation(record), "problem": ""}
            num_good += 1
        except ValueError as error:
            yield {"messages": [], "problem": f"{file}, line {number}: {error}"}


def _read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, parsed record or the error) of a JSON or JSON-lines file, gzipped or not.

    A JSON file may hold one array instead, ShareGPT's original form; the numbers are then those of its items.
    """
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            if ".json" in (path.suffix, Path(path.stem).suffix):
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

    Conversations without a token of the assistant's left, and those the chat template cannot render or mask, are dropped
    and counted in a warning.

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

    The template's `{% generation %}` markers say where that is; without them, `find_replies` does.

    Raises:
        ValueError: the template renders the conversation so that the replies cannot be found in it.
    """
    if re.search(r"\{%-?\s*generation\b", tokenizer.get_chat_template()):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [int(bit) for bit in encoded["assistant_masks"]]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_special_tokens_mask=True)
    input_ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special_ids = _special_ids(tokenizer)
    loss_mask = [0] * len(input_ids)
    for begin, end in find_replies(messages, text, tokenizer):
        position = 0
        for position, (start, stop) in enumerate(offsets):
            if begin <= start < end and start < stop:
                loss_mask[position] = 1
            if start >= end:
                break
        # The special token behind the text ends the turn; further text (a line break, say) is the template's.
        starts_behind = offsets[position][0] >= end
        if starts_behind and input_ids[position] in special_ids and not text[end : offsets[position][0]].strip():
            loss_mask[position] = 1
    return input_ids, loss_mask


def find_replies(messages: Messages, text: str, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Where in a rendered conversation each reply's text stands: its first character, and the one behind its last.

    A reply begins where the rendering of everything before it, with the generation prompt, ends. Its own end is looked
    up rather than taken from the rendering up to it: several templates (Qwen3's, for one) render a last reply differently.

    Raises:
        ValueError: a prefix is rendered differently, or a reply is not in the rendering as it is.
    """
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before: str = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        reply = message["content"].strip()  # templates may trim
        place = text.find(reply, len(before))
        if not text.startswith(before) or place < 0:
            raise ValueError(
                "the chat template renders replies differently inside a conversation, so that the assistant's tokens "
                "cannot be told apart; add {% generation %} markers to the template"
            )
        end = place + len(reply)
        yield len(before), end


def _special_ids(tokenizer: Any) -> set[int]:
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


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
            torch.from_numpy(batch[name].combine_chunks().flatten().to_numpy().copy()) for name in ("input_ids", "loss_mask")
        )
        ids = input_ids[loss_mask == 1]
        if ids.numel() and int(ids.max()) >= vocab_size:
            raise ValueError(f"token id {int(ids.max())} with a vocabulary of {vocab_size}: tokenize for this target again")
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts
