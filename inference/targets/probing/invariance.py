"""Checks that a target in batch-invariant mode keeps its promise, on this machine and with this model.

Whether a row of a product depends on the number of rows is a matter of the library that computes it, and of the layer.

Legend: B batch, N tree nodes, V target vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.kernels.split_rows import find_tile
from draftsmith.inference.targets.masks import plant
from draftsmith.inference.targets.model_config import chooses_experts, find_attention, has_attention_interface
from draftsmith.inference.targets.refusals import draw_ids

LEAST_ROWS = 4  # in float32, products of up to 3 rows have another kernel
SMALL_PRODUCT = 4096  # multiplications; in bfloat16, products of at most as many have another kernel (torch 2.13, CPU)
SUM_ROWS = 16  # on CUDA, torch adds up a row of numbers (in a norm) in one order from so many rows on (Reduce.cuh)
_NUM_NODES = 24
_MANY_ROWS = 24
_PATH = [0, 9, 22]  # far apart, and not in the first slots


def check_supported(causal_lm: Any) -> None:
    """Refuses (ValueError) models whose attention cannot be replaced, or whose products cannot be padded."""
    name = type(causal_lm).__name__
    if causal_lm.config.is_encoder_decoder or not has_attention_interface(causal_lm):
        raise ValueError(f"batch_invariant=True replaces attention functions, and {name} has its own: leave it out")
    if (implementation := find_attention(causal_lm)) != "sdpa":
        raise ValueError(
            f"batch_invariant=True replaces the attention implementation 'sdpa', and {name} has {implementation!r}: "
            "load the model with attn_implementation='sdpa', or leave batch_invariant out"
        )
    if chooses_experts(causal_lm):
        raise ValueError(
            f"batch_invariant=True cannot be kept: an expert of {name} multiplies as many rows as the router gives it, "
            "and products of a few rows round in another way. Leave batch_invariant out"
        )


def count_min_pass_tokens(causal_lm: Any) -> int:
    """Rows with which no layer has another kernel than with more of them. On CUDA these are no slower than one row.

    >>> from torch import nn
    >>> count_min_pass_tokens(nn.Linear(256, 256)), count_min_pass_tokens(nn.Linear(32, 16))
    (4, 9)
    """
    matrices = [weight for weight in causal_lm.parameters() if weight.dim() == 2]
    if matrices[0].device.type == "cuda":
        return SUM_ROWS
    smallest: int = min(weight.numel() for weight in matrices)
    return max(LEAST_ROWS, SMALL_PRODUCT // smallest + 1)


def check_compiling(target: Any) -> None:
    """Refuses (ValueError) compiled steps whose numbers depend on the number of their rows, however few there are."""
    if target.device.type != "cpu":
        raise ValueError(
            f"batch_invariant=True cannot be kept with compile=True on {target.device}: inductor makes other kernels "
            "for other numbers of rows. Leave compile out; graphs=True captures the mode's own kernels"
        )
    if target.dtype != torch.float32 and find_tile(target.dtype, target.device.type) is not None:
        raise ValueError(
            f"batch_invariant=True cannot be kept with compile=True in {target.dtype} on this CPU, whose compiled "
            "products (AMX) depend on the number of rows: leave compile out, or load the target in float32"
        )


def check_depth(target: Any, depth: int) -> None:
    """Refuses (ValueError) trees that are deeper than attention in Triton computes as plain text."""
    if target.min_pass_tokens == 1 or not target.masks.packs_all:
        return
    from draftsmith.inference.kernels.triton_kernel import TILE

    if depth > TILE:
        raise ValueError(
            f"the tree is {depth} levels deep, and with batch_invariant=True attention in Triton takes at most {TILE}: "
            "choose a smaller tree"
        )


@torch.no_grad()
def check_invariance(target: Any) -> None:
    """Compares the scores of a chain with those of the same tokens in a tree and in a batch, bit by bit.

    Raises:
        ValueError: they differ.
    """
    prompt = draw_ids(target.model, 1, target.device)
    alone = _score(target, prompt, prompt[:, :3], [0, 1, 2])
    crowd = prompt.repeat(1, _NUM_NODES // prompt.shape[1])
    crowd[:, _PATH] = prompt[:, :3]
    batch = 2 if target.device.type == "cpu" else _MANY_ROWS  # cuBLAS has more kernels than CPUs' libraries
    beside = _score(target, prompt.expand(batch, -1), crowd.expand(batch, -1), _PATH)
    if not torch.equal(alone, beside):
        raise ValueError(
            f"batch_invariant=True cannot be kept: with {type(target.model).__name__} in {target.dtype} on "
            f"{target.device}, a token's scores depend on the other tokens of the pass (by up to "
            f"{float((alone - beside).abs().max()):.2g}): its layers, or the kernels of this machine, compute a row in "
            "another way when there are more rows. Leave batch_invariant out"
        )


def _score(target: Any, prompts: Tensor, token_ids: Tensor, path: list[int]) -> Tensor:
    """The scores [P, V] of a path of the last row's tree, whose other nodes are children of the root.

    Args:
        prompts: [B, 4] long.
        token_ids: [B, N] long.
    """
    (batch, num_nodes), device = token_ids.shape, token_ids.device
    cache = target.new_cache(batch, 64)
    length = prompts.shape[1]
    target.prefill(cache, prompts, torch.full((batch,), length, device=device))
    cache.open_slots(max(num_nodes, target.min_pass_tokens), Span(length, length))
    parents = [-1] + [0] * (num_nodes - 1)
    for parent, node in itertools.pairwise(path):
        parents[node] = parent
    scores: Tensor = target.verify(cache, plant(token_ids, parents)).logits[-1, path]
    return scores
