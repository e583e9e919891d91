"""What of a pass decides the bits of a row: a target's products, norms and attention one by one.

Every operation is run twice on the same rows, and the two runs differ in one thing: where a row stands, what the other
rows hold, how many rows there are, how many masked slots follow, what they hold, and which slots the keys lie in.

Legend: N rows of a pass, D width, H query heads, G key-value heads, S cache slots in view, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from divergence_count import find_step
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from inference.attention import attend_grouped

NUM_ROWS = 16
COUNTS = (1, 2, 3, 4, 5, 8, 64)
NUM_COMMITTED = 150  # slots before those of the pass; no multiple of anything
VIEW = 256
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "eager attention": eager_attention_forward,
    "sdpa, keys repeated": sdpa_attention_forward,
    "sdpa, grouped": attend_grouped,
}
Rows = Callable[[Tensor], Tensor]  # [N, ...] -> [N, ...]


@dataclass
class Finding:
    """How many rows are bitwise equal in two runs; max_steps: the largest difference of a number, in steps of the dtype
    at the size of its row's largest number."""

    operation: str
    factor: str
    num_rows: int = 0
    num_equal: int = 0
    max_steps: float = 0.0

    def add(self, one: Tensor, other: Tensor) -> None:
        """Takes in two runs [N, ...] of the same rows."""
        assert one.shape == other.shape
        rows, others = one.flatten(1), other.flatten(1)
        is_equal = (rows == others).all(dim=1)
        self.num_rows += len(rows)
        self.num_equal += int(is_equal.sum())
        for row, beside in zip(rows[~is_equal].double(), others[~is_equal].double(), strict=True):
            step = find_step(float(row.abs().max()), one.dtype)
            self.max_steps = max(self.max_steps, float((row - beside).abs().max()) / step)


@torch.no_grad()
def find_factors(model: Any, *, num_draws: int = 16, seed: int = 0) -> list[Finding]:
    """Findings of a Llama's first layer and LM head, on numbers that are drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    findings: dict[tuple[str, str], Finding] = {}
    for _ in range(num_draws):
        for operation, factor, one, other in _compare_all(model, generator):
            findings.setdefault((operation, factor), Finding(operation, factor)).add(one, other)
    return list(findings.values())


def _compare_all(model: Any, generator: torch.Generator) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    layer = model.model.layers[0]
    dtype = model.dtype

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    linears = [module for module in (*layer.modules(), model.lm_head) if isinstance(module, nn.Linear)]
    for linear in linears:
        inputs = randn(max(COUNTS), linear.in_features)
        yield from _compare_rows("products with weights", linear, inputs, randn(*inputs.shape))
    others: list[tuple[Rows, int]] = [
        (layer.input_layernorm, model.config.hidden_size),
        (layer.mlp.act_fn, model.config.intermediate_size),
    ]
    for function, width in others:
        inputs = randn(max(COUNTS), width)
        yield from _compare_rows("norm, activation", function, inputs, randn(*inputs.shape))
    for name, function in ATTENTIONS.items():
        yield from _compare_attention(name, function, layer.self_attn, randn, generator)


def _compare_rows(
    operation: str, function: Rows, inputs: Tensor, others: Tensor
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Factors of an operation that works on each row by itself."""
    usual = function(inputs[:NUM_ROWS])
    yield operation, "another place among the rows", usual, function(inputs[:NUM_ROWS].roll(5, 0)).roll(-5, 0)
    replaced = torch.cat([inputs[:1], others[1:NUM_ROWS]])
    yield operation, "other rows beside it", usual[:1], function(replaced)[:1]
    for count in COUNTS:
        parts = [function(inputs[start : start + count]) for start in range(0, NUM_ROWS, count)]
        yield operation, f"{count} row{'s' * (count > 1)} instead of {NUM_ROWS}", usual, torch.cat(parts)[:NUM_ROWS]


def _compare_attention(
    name: str, function: Callable[..., Any], module: Any, randn: Callable[..., Tensor], generator: torch.Generator
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Row i of the pass sees the committed slots and slots of the pass, its ancestors."""
    heads, groups, size = module.config.num_attention_heads, module.config.num_key_value_heads, module.head_dim
    end = NUM_COMMITTED + max(COUNTS)
    query = randn(1, heads, max(COUNTS), size)
    key, value = (torch.zeros(1, groups, 1024, size, dtype=query.dtype) for _ in range(2))
    key[:, :, :end], value[:, :, :end] = randn(1, groups, end, size), randn(1, groups, end, size)
    chain = torch.arange(1024) <= NUM_COMMITTED + torch.arange(max(COUNTS))[:, None]  # [64, 1024]

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, view: int = VIEW) -> Tensor:
        """[N, H * d] of query [1, H, N, d] where seen [N, S] allows."""
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
        output: Tensor = function(
            module, query, key[:, :, :view], value[:, :, :view], mask[None, None, :, :view], scaling=module.scaling
        )[0]
        return output[0].flatten(1)

    rows, seen = query[:, :, :NUM_ROWS], chain[:NUM_ROWS]
    usual = attend(rows, key, value, seen)
    moved = attend(rows.roll(5, 2), key, value, seen.roll(5, 0)).roll(-5, 0)
    yield name, "another place among the rows", usual, moved
    replaced = torch.cat([rows[:, :, :1], randn(*rows[:, :, 1:].shape)], dim=2)
    alone = torch.cat([seen[:1], torch.eye(1024, dtype=torch.bool)[NUM_COMMITTED + 1 : NUM_COMMITTED + NUM_ROWS]])
    yield name, "other rows and masks beside it", usual[:1], attend(replaced, key, value, alone)[:1]
    for count in COUNTS:
        starts = range(0, NUM_ROWS, count)
        parts = [attend(query[:, :, i : i + count], key, value, chain[i : i + count]) for i in starts]
        yield name, f"{count} row{'s' * (count > 1)} instead of {NUM_ROWS}", usual, torch.cat(parts)[:NUM_ROWS]
    for view in (192, 320, 1024):
        yield name, f"{view} slots in view instead of {VIEW}", usual, attend(rows, key, value, seen, view)
    last = NUM_COMMITTED + NUM_ROWS
    filled = torch.cat([key[:, :, :last], randn(1, groups, 1024 - last, size)], dim=2)
    yield name, "other numbers in masked slots", usual, attend(rows, filled, value, seen)

    # The same keys, in the same order, behind gaps: each of the pass's slots moves on by some masked ones.
    places = torch.arange(1024)
    gaps = torch.randint(0, 3, (NUM_ROWS,), generator=generator).cumsum(0)
    places[NUM_COMMITTED:last] += gaps
    yield name, "gaps between the keys' slots", usual, _attend_moved(attend, rows, key, value, seen, places[:last])
    shuffled = torch.randperm(NUM_COMMITTED, generator=generator)
    places = torch.cat([shuffled, torch.arange(NUM_COMMITTED, last)])
    yield name, "committed keys in another order", usual, _attend_moved(attend, rows, key, value, seen, places)


def _attend_moved(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, seen: Tensor, places: Tensor
) -> Tensor:
    """`attend` with slot i of the first len(places) slots moved to slot places[i], its mask too; the rest is masked."""
    num_slots = len(places)
    keys, values, allowed = torch.zeros_like(key), torch.zeros_like(value), torch.zeros_like(seen)
    keys[:, :, places], values[:, :, places] = key[:, :, :num_slots], value[:, :, :num_slots]
    allowed[:, places] = seen[:, :num_slots]
    return attend(query, keys, values, allowed)
