"""Reads, shuffles and tokenizes conversations while heads train on them: for sets larger than the disk.

A stream never ends: after the last conversation the next epoch begins, in another order. So the position of a run is a
number of batches; Trainer skips that many in a resumed run, which then sees the batches of the uninterrupted one.

Of N readers (processes x DataLoader workers), each takes every N-th conversation.
"""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, NoReturn

import datasets
from torch.utils.data import IterableDataset, get_worker_info

from draftsmith.training.data.chat_tokens import ROW, check_tokenizer, log_problems, tokenize_row
from draftsmith.training.data.conversations import IMAGES_FIRST, BadLineError, Place, iterate_place, parse_row
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.packing import WINDOW, pack_window

logger = logging.getLogger(__name__)

# Rows whose tokens are counted for a reduced draft vocabulary, because a stream is not read to its end.
VOCABULARY_ROWS = 10_000

Row = dict[str, list[int]]


class NoConversationError(ValueError):
    """A reader of a stream has no conversation: the user must change the data or the number of readers."""


def message_of(error: Exception) -> str:
    """The error's message, without the traceback that DataLoader puts before it when a worker raises."""
    return str(error).rpartition(f"{type(error).__name__}: ")[2].strip()


class ConversationStream(IterableDataset[Row]):
    """Yields rows `input_ids` and `loss_mask` (packed: also `document_lengths`) without end.

    At the end of an epoch, a warning counts the conversations that could not be used.

    Args:
        holds_out: leave out the `validation_fraction` of conversations with the lowest hashes. So the choice does not
            depend on the order, and equal conversations are held out together.
        rank: this process, of `num_processes`.

    Raises:
        ValueError: a missing file or an unusable tokenizer; while reading: a malformed line (unless skipped), or an
            epoch without a conversation for this reader.
    """

    def __init__(
        self,
        data_args: DataArguments,
        tokenizer: Any,
        *,
        seed: int,
        holds_out: bool,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        check_tokenizer(tokenizer)
        self.data_args, self.tokenizer, self.seed = data_args, tokenizer, seed
        self.holds_out = holds_out
        self.rank, self.num_processes = rank, num_processes
        self.record_format = data_args.record_format()
        self.places = [Place.find(name, split) for name, split in zip(data_args.dataset, data_args.splits, strict=True)]
        if len(self.places) > 1:
            logger.warning("a stream reads its sets one after the other, mixed only within shuffle_buffer")

    def __iter__(self) -> Iterator[Row]:
        worker = get_worker_info()
        num_workers = worker.num_workers if worker else 1
        reader = self.rank * num_workers + (worker.id if worker else 0)
        for epoch in count():
            rows = self._tokenize(self._shuffle(epoch, reader, self.num_processes * num_workers))
            yield from self._pack(rows) if self.data_args.packing else rows

    def first_rows(self, count: int) -> datasets.Dataset:
        """Returns the first `count` training rows, unshuffled, the same in every process."""
        return self._collect(islice(self._tokenize(self._read_all(0, 0, 1)), count))

    def held_out_rows(self, count: int | None) -> datasets.Dataset | None:
        """Returns the first `count` held-out rows, or all of them without a count; None if no row is held out."""
        rows = [*islice(self._tokenize(self._read_all(0, 0, 1, is_held_out=True), may_be_empty=True), count)]
        return self._collect(iter(rows)) if rows else None

    @staticmethod
    def _collect(rows: Iterator[Row]) -> datasets.Dataset:
        return datasets.Dataset.from_list(list(rows), features=datasets.Features(ROW))

    def _tokenize(self, conversations: Iterator[dict[str, str]], *, may_be_empty: bool = False) -> Iterator[Row]:
        dropped: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        num_rows = 0
        args = self.data_args
        for conversation in conversations:
            problem = conversation["problem"]
            if problem:
                dropped["malformed line"] += 1
                continue
            if conversation["conversation"].startswith(IMAGES_FIRST):
                raise BadLineError("got streaming, and a conversation has images: leave streaming out")
            row = tokenize_row(conversation["conversation"], self.tokenizer, args.max_length)
            if problem := row.pop("problem"):
                dropped[problem] += 1
                continue
            num_rows += 1
            notes.update(row.pop("notes"))
            yield row
        log_problems(dropped, notes, num_rows + dropped.total())
        if not num_rows and not may_be_empty:
            self._refuse_empty(", ".join(args.dataset), dropped)

    def _refuse_empty(self, name: str, dropped: Mapping[str, int]) -> NoReturn:
        """Raises NoConversationError for a reader that no conversation of `name` is left for, and says why."""
        worker = get_worker_info()
        reason = (
            f"dropped, by reason: {dict(dropped)}"
            if dropped
            else "there are fewer conversations, without the held-out ones, than readers: give fewer processes or "
            "--dataloader_num_workers, or leave --streaming out"
        )
        raise NoConversationError(
            f"no conversation of {name} is left for this reader, one of {self.num_processes} processes"
            f"{f' x {worker.num_workers} dataloader_num_workers' if worker else ''}; {reason}"
        )

    def _pack(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Packs window by window, as `draftsmith.training.data.packing.pack_rows`."""
        while window := list(islice(rows, WINDOW)):
            columns = {name: [row[name] for row in window] for name in ("input_ids", "loss_mask")}
            packed = pack_window(columns, self.data_args.max_length)
            for values in zip(*packed.values(), strict=True):
                yield dict(zip(packed, values, strict=True))

    def _shuffle(self, epoch: int, reader: int, num_readers: int) -> Iterator[dict[str, str]]:
        """Draws from a buffer that is always refilled."""
        draw = random.Random(f"{self.seed} {epoch} {reader}")
        buffer: list[dict[str, str]] = []
        for conversation in self._read_all(epoch, reader, num_readers):
            if len(buffer) < self.data_args.shuffle_buffer:
                buffer.append(conversation)
                continue
            place = draw.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = conversation
        draw.shuffle(buffer)
        yield from buffer

    def _read_all(
        self, epoch: int, reader: int, num_readers: int, *, is_held_out: bool = False
    ) -> Iterator[dict[str, str]]:
        """Yields one epoch of the reader's conversations, set by set."""
        for place in self.places:
            files = list(place.files)
            random.Random(f"{self.seed} {epoch} files").shuffle(files)  # the same order for every reader
            for where, record in iterate_place(place, files, reader=reader, num_readers=num_readers):
                row = parse_row(where, record, self.record_format)
                # Training reports the first malformed line; the held-out part skips such lines.
                if row["problem"] and not (is_held_out or self.data_args.skip_bad_lines):
                    raise BadLineError(f"{row['problem']}. Correct it, or skip such lines with --skip_bad_lines true")
                held_out = self.holds_out and is_in_fraction(row["conversation"], self.data_args.validation_fraction)
                if held_out == is_held_out and not (is_held_out and row["problem"]):
                    yield row


def is_in_fraction(text: str, fraction: float) -> bool:
    """Whether the hash of a text is among the lowest `fraction` of all hashes."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64
