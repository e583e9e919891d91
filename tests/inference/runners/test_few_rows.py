"""Products of few rows in a graph: they get more, and give the same."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from draftsmith.inference.kernels.packed_weights import LEAST_ROWS
from draftsmith.inference.runners.few_rows import add_rows


@pytest.mark.parametrize("num_rows", [1, 3, LEAST_ROWS, 6])
def test_products_have_enough_rows(num_rows: int) -> None:
    torch.manual_seed(0)
    rows, weight, bias, row_biases = (torch.randn(*size) for size in ((num_rows, 8), (8, 5), (5,), (num_rows, 5)))

    def products(rows: torch.Tensor, row_biases: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias, rows, weight) + torch.addmm(row_biases, rows, weight) * (rows @ weight)

    traced = make_fx(products, tracing_mode="fake", _allow_non_fake_inputs=True)(rows, row_biases)
    wanted = traced(rows, row_biases)
    add_rows(traced.graph)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(rows, row_biases), wanted)
    sizes = {}
    for node in traced.graph.nodes:
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            sizes.setdefault(node.target, []).append(node.args[-2].meta["val"].shape[0])
    enough = max(num_rows, LEAST_ROWS)
    assert sizes[torch.ops.aten.mm.default] == [enough]
    assert sorted(sizes[torch.ops.aten.addmm.default]) == sorted(
        [enough, num_rows]
    )  # with a bias for each row: as it was


@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_layer_adds_is_added_to_all_rows(is_first: bool) -> None:
    """Or oneDNN would add it before it rounds in graphs of many rows only."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 2, 8), torch.randn(8, 8)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        product = (hidden.view(2, 8) @ weight).view(1, 2, 8)
        return product + hidden if is_first else hidden + product

    traced = make_fx(layer, tracing_mode="fake", _allow_non_fake_inputs=True)(hidden)
    wanted = traced(hidden)
    add_rows(traced.graph)
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(hidden), wanted)
    (total,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert total.meta["val"].shape == (LEAST_ROWS, 8)
