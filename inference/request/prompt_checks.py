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


def check_token_ids(prompts: Sequence[Sequence[int]], num_embeddings: int) -> None:
    """Refuses (ValueError) ids that the target does not have."""
    for row, prompt in enumerate(prompts):
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < num_embeddings:
                raise ValueError(
                    f"token {prompt.index(token)} of row {row} is {token}; this target has the ids 0 to "
                    f"{num_embeddings - 1}: was the prompt written with another tokenizer, or is padding not masked?"
                )


def are_tokens(ids: Tensor, num_embeddings: int) -> Tensor:
    """Whether each id is one of the target's."""
    return (ids >= 0) & (ids < num_embeddings)


def check_source(model: Any, source_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuses (ValueError) sources with invalid ids or without tokens. The encoder looks padding up too."""
    embeddings = model.get_encoder().get_input_embeddings()
    num_embeddings = embeddings.weight.shape[0]
    wrong = (~are_tokens(source_ids, num_embeddings)).nonzero().tolist()
    if wrong:
        row, place = wrong[0]
        raise ValueError(
            f"token {place} of row {row} of the source is {int(source_ids[row, place])}; this target's encoder has the "
            f"ids 0 to {num_embeddings - 1}, for padding too: was the source written with another tokenizer?"
        )
    if attention_mask is not None and not (attention_mask != 0).any(dim=1).all():
        row = int((attention_mask != 0).any(dim=1).int().argmin())
        raise ValueError(f"row {row} of the source is all padding: give each row at least 1 token")
