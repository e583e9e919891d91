"""The slow and obvious way to what `Target` computes: the model's own cache-less forward, one pass per path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.inference.trees.token_tree import TokenTree
from tests.tiny_targets import tiny_target

ATOL = 1e-4


def calm_target(family: str, **overrides: Any) -> PreTrainedModel:
    """A tiny target with weights of 0.3: at the usual 0.5 it blows plain float32 rounding up to 1e-4."""
    return tiny_target(family, **({"initializer_range": 0.3} | overrides))


def run_plainly(model: PreTrainedModel, tokens: list[int]) -> Any:
    """The model's own forward over one sequence, without cache, mask or position ids."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)


def compute_depths(parents: Tensor) -> Tensor:
    """Edges between each node and its root, [B, N], node after node."""
    depths = torch.zeros_like(parents)
    for row, above in enumerate(parents.tolist()):
        for node, parent in enumerate(above):
            depths[row, node] = 0 if parent < 0 else depths[row, parent] + 1
    return depths


def random_tree(batch_size: int, num_nodes: int, generator: torch.Generator, num_padding: int = 0) -> TokenTree:
    """Random parents per row; the last row's last nodes are padding."""
    parents = torch.full((batch_size, num_nodes), -1)
    for row in range(batch_size):
        for node in range(1, num_nodes - (num_padding if row == batch_size - 1 else 0)):
            parents[row, node] = torch.randint(0, node, (), generator=generator)
    token_ids = torch.randint(2, 128, (batch_size, num_nodes), generator=generator)
    depths = compute_depths(parents)
    return TokenTree(token_ids, parents, depths, torch.zeros(batch_size, num_nodes))


def assert_states_close(states: Tensor, wanted: Tensor) -> None:
    """Hidden states of these targets reach 100 and more, so their error is measured against the largest."""
    torch.testing.assert_close(states, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)
