"""Collates training rows into batches.

Legend: B batch, T tokens of the longest row of a batch, V target vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads.modules.host_tensors import OnHost, read_on_host
from draftsmith.inference.noise import derive_seeds

MULTIPLE = 8  # T is rounded up to it


@dataclass(frozen=True)
class ConversationCollator:
    """Pads rows on the right: input_ids, attention_mask, loss_mask and token_keys, each [B, T] int64. All but the ids
    are read on the host, and stay there.

    A token's key is a hash of its document's tokens and of its place among them: random choices in training are a
    function of the key, so they are the same in any batch.

    Packed rows (`draftsmith.training.data.packing`) also have document_ids, [B, T] int64: the number of the token's
    document in its row, from 0 (padding: -1). `draftsmith.heads.modules.documents` counts positions within
    documents.

    Args:
        pad_token_id: any valid id: padding is masked everywhere.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor | OnHost]:
        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // MULTIPLE) * MULTIPLE

        def pad(values: Iterable[Tensor], fill: int) -> Tensor:
            return torch.stack([F.pad(value, (0, length - len(value)), value=fill) for value in values])

        ids = [torch.tensor(row["input_ids"]) for row in rows]
        sizes = [row.get("document_lengths", [len(row["input_ids"])]) for row in rows]
        batch: dict[str, Tensor | OnHost] = {
            "input_ids": pad(ids, self.pad_token_id),
            "attention_mask": OnHost(pad(map(torch.ones_like, ids), 0)),
            "loss_mask": OnHost(pad([torch.tensor(row["loss_mask"]) for row in rows], 0)),
            "token_keys": OnHost(pad(map(_make_keys, ids, sizes), 0)),
        }
        if "document_lengths" in rows[0]:
            numbers = [torch.arange(len(size)).repeat_interleave(torch.tensor(size)) for size in sizes]
            batch["document_ids"] = OnHost(pad(numbers, -1))
        return batch


def hash_tokens(input_ids: Tensor) -> int:
    """The key of a text: a signed 64-bit hash of its ids ([T], any integer dtype)."""
    ids = input_ids.int().cpu().contiguous()
    unsigned = xxhash.xxh3_64_intdigest(ids.view(torch.uint8).numpy().data)
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def _make_keys(ids: Tensor, sizes: list[int]) -> Tensor:
    """[T] int64, the keys of a row of documents of these sizes."""
    documents = ids.split(sizes)
    keys = torch.tensor([hash_tokens(document) for document in documents]).repeat_interleave(torch.tensor(sizes))
    return derive_seeds(keys, torch.cat([torch.arange(size) for size in sizes]))


def find_documents(batch: Mapping[str, Any], *, num_groups: int | None = None) -> OnHost | None:
    """Returns the `document_ids` of a batch for `encode` and `DraftHeads.forward`.

    Unpacked rows count as documents too: groups of similar lengths waste less on padding. With `num_groups` each group
    has a cost (see `heads/modules/documents.py`), so unpacked rows give None.
    """
    if "document_ids" in batch:
        return OnHost(read_on_host(batch["document_ids"]))
    return OnHost(read_on_host(batch["attention_mask"]) - 1) if num_groups is None else None


def iterate_column(rows: datasets.Dataset, name: str) -> Iterator[Tensor]:
    """Yields the values [T] of each row, such as its `input_ids`."""
    for batch in rows.select_columns(name).with_format("arrow").iter(1000):
        column = batch[name].combine_chunks()
        values = torch.from_numpy(column.flatten().to_numpy().copy())
        yield from values.split(column.value_lengths().to_pylist())


def count_tokens(rows: datasets.Dataset, vocab_size: int) -> Tensor:
    """Counts how often each token is to be predicted: [V] int64, over the positions of the loss mask.

    Raises:
        ValueError: an id outside the vocabulary: the tokenizer is not the target's.
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
                f"the tokenizer gives token id {int(ids.max())}, and the target's vocabulary has {vocab_size} tokens: "
                "give a target with its own tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts
