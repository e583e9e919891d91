"""Tensors on their way between two formats: renamed, and without copies of the target's own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.formats.published import refuse
from draftsmith.inference.targets.target import Target


def rename(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under our names. A tensor that the format does not have keeps its own name.

    >>> x = torch.zeros(1)
    >>> sorted(rename({"0.1.weight": x, "extra": x}, {"heads.0.lm_head.weight": "0.1.weight"}))
    ['extra', 'heads.0.lm_head.weight']

    Args:
        names: our name -> the format's.
    """
    ours = {theirs: name for name, theirs in names.items()}
    # A stray tensor may be called as one of ours is. It must not pass for that one.
    return {ours.get(name, f"{name} (of no format)" if name in names else name): x for name, x in tensors.items()}


def target_table(target: Target) -> Tensor:
    """[rows, D] on the CPU: what the target's embedding gives for each token."""
    with torch.no_grad():
        table: Tensor = target.embed_tokens(torch.arange(target.num_embeddings, device=target.device))
    return table.cpu()


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of numbers have the same values in the narrower of their dtypes."""
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return False
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)


def is_targets_table(table: Tensor, target: Target, *, but: int | None = None) -> bool:
    """Whether a table [rows, D] of token embeddings is what the target's embedding gives.

    Args:
        but: a row that may differ, the mask's.
    """
    own = target_table(target)
    if table.shape != own.shape:
        return False
    rows = torch.arange(len(own)) != (-1 if but is None else but)
    return is_same(table[rows], own[rows])


def take_copies(path: str, tensors: dict[str, Tensor], copies: Mapping[str, Tensor]) -> None:
    """Takes copies of the target's own tensors, which heads borrow, out of the `tensors` of a checkpoint.

    Args:
        path: the checkpoint's, for messages.
        copies: the name that a copy would have -> the target's tensor.

    Raises:
        ValueError: a copy differs from the target's tensor in more than its rounding.
    """
    for name, own in copies.items():
        if (copy := tensors.pop(name, None)) is None:
            continue
        if copy.shape != own.shape:
            refuse(path, f"tensor {name} is {list(copy.shape)}, and the target's own is {list(own.shape)}")
        if not is_same(copy, own.detach().to(copy.device)):
            refuse(
                path,
                f"tensor {name} differs from the target's own, which the heads would read: give the target that the "
                "heads were trained for",
            )


def count_rows(tensor: Tensor) -> int:
    """The length of the first dimension; a scalar has none."""
    return tensor.shape[0] if tensor.dim() else 0


def as_wide_as(tensor: Tensor, other: Tensor | None) -> Tensor:
    """A tensor in the dtype of another one: engines keep some tensors wider than the heads have them. Whole numbers,
    which may be quantized, stay as they are."""
    if other is None or not (other.is_floating_point() and tensor.is_floating_point()):
        return tensor
    return tensor.to(other.dtype)


def refuse_other_layer(config: Any) -> None:
    """Refuses heads on another layer than the last.

    Raises:
        ValueError: engines and authors' code give heads of this kind the target's last states.
    """
    if config.feature_layers != [config.target_num_layers]:
        raise ValueError(
            f"feature_layers is {config.feature_layers}, and other projects give such heads the target's last states "
            f"([{config.target_num_layers}]): train heads on these"
        )
