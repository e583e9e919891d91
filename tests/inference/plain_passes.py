"""The slow and obvious way to what `Target` computes: the model's own cache-less forward, one pass per path."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.inference import Target
from draftsmith.inference.cache.kv_cache import KVCache, Span
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


def prefill_in_parts(
    target: Target, cache: KVCache, token_ids: Tensor, counts: Tensor, size: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`Target.prefill` of `size` tokens at a time: the last token's logits [B, V], and the features of all."""
    logits, features = torch.empty(0), []
    for start in range(0, token_ids.shape[1], size):
        part = token_ids[:, start : start + size]
        own = (counts - start).clamp(0, part.shape[1])
        output = target.prefill(cache, part, own, span=Span(start, start), **options)
        logits = torch.where(own[:, None] > 0, output.logits[:, 0], logits) if start else output.logits[:, 0]
        features += [] if output.features is None else [output.features]
    return logits, torch.cat(features, dim=1) if features else None


def assert_states_close(states: Tensor, wanted: Tensor) -> None:
    """Hidden states of these targets reach 100 and more, so their error is measured against the largest."""
    torch.testing.assert_close(states, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)
