"""Rejects invalid prompts and sources, and moves padding to the left.

Legend: B batch, L length with padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pad_left(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Moves each row's padding before its tokens; returns ids and mask [B, L] of 0 and 1."""
    mask = (attention_mask != 0).long()
    order = mask.argsort(dim=1, stable=True)
    return input_ids.gather(1, order), mask.gather(1, order)


def check_prompt(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuses ids and masks that are no tensors (TypeError), or of a wrong shape or dtype (ValueError)."""
    mask = input_ids if attention_mask is None else attention_mask
    for name, value in (("input_ids", input_ids), ("attention_mask", mask)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} is of type {type(value).__name__}; a tensor [batch, length] is expected: pass "
                "**tokenizer(text, return_tensors='pt'), or torch.tensor(rows)"
            )
    shape = tuple(input_ids.shape)
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty (shape {shape}): give each row at least one token")
    if len(shape) != 2:
        raise ValueError(f"input_ids has shape {shape}; expected [batch, length]: a single row is input_ids[None]")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids is of dtype {input_ids.dtype}; token ids are int64: take the tokenizer's")
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids {shape}: give one entry for each "
            "id, 1 for a token and 0 for padding"
        )


def check_token_ids(rows: Sequence[Sequence[int]], num_embeddings: int, kind: str) -> None:
    """Refuses (ValueError) ids that the target does not have; kind: prompt or source."""
    for number, row in enumerate(rows):
        for token in (min(row), max(row)):
            if not 0 <= token < num_embeddings:
                cure = "mask padding" if kind == "prompt" else "padding needs one of these ids, too"
                raise ValueError(
                    f"token {row.index(token)} of row {number} is {token}; this target's {kind}s have the ids 0 to "
                    f"{num_embeddings - 1}: was it written with another tokenizer, or is that padding? Then {cure}"
                )


def count_tokens(attention_mask: Tensor, kind: str) -> list[int]:
    """The real tokens of each row; refuses (ValueError) rows without any."""
    counts: list[int] = (attention_mask != 0).sum(1).tolist()
    if 0 in counts:
        raise ValueError(f"row {counts.index(0)} of the {kind} is all padding: give each row at least 1 token")
    return counts


def check_source(model: Any, source_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuses (ValueError) sources with invalid ids or without tokens. The encoder looks padding up too."""
    check_token_ids(source_ids.tolist(), model.get_encoder().get_input_embeddings().weight.shape[0], "source")
    if attention_mask is not None:
        count_tokens(attention_mask, "source")
