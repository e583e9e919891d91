"""Counts the operations of a program. torch counts products. Fused attention is counted here, as causal whatever its
mask: torch has no formula for its kernel for CPUs, and before 2.13 none for grouped heads on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _forward(q: torch.Size, *rest: Any, **more: Any) -> int:
    return 2 * _causal_product(q)


def _backward(grad: torch.Size, *rest: Any, **more: Any) -> int:
    return 5 * _causal_product(grad)


def _causal_product(shape: torch.Size) -> int:
    """Of a product of two matrices that makes, or reads, [T, T] scores: two operations for each of the seen half."""
    batch, heads, length, size = shape
    return batch * heads * length * length * size


class _NoModules(nullcontext[None]):
    """In the place of torch's table by module, whose hooks refuse gradients that are taken within a forward pass."""

    parents = frozenset({"Global"})


def count_operations() -> FlopCounterMode:
    """A context; `get_total_flops()` of it is the number of operations inside, those that are repeated included."""
    mapping = {}
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        mapping[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _forward
        mapping[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _backward
    mode = FlopCounterMode(display=False, custom_mapping=mapping)
    mode.mod_tracker = _NoModules()  # type: ignore[assignment, unused-ignore]
    return mode
