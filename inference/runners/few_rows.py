"""Rows that are added to products of few rows in graphs with packed weights, as `PackedLinear` does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from draftsmith.inference.kernels.packed_weights import LEAST_ROWS

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}  # and the place of the rows


def add_rows(graph: fx.Graph) -> None:
    """Gives all products of a graph of inductor at least `LEAST_ROWS` rows. What comes out stays, but for rounding."""
    for product, place in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=product):
            size = node.args[place].meta["val"].shape[0]
            if not isinstance(size, int) or size >= LEAST_ROWS:  # an open size is larger
                continue
            if place and node.args[0].meta["val"].ndim > 1:  # a bias for each row
                continue
            with graph.inserting_before(node):
                rows = _call(
                    graph, torch.ops.aten.constant_pad_nd.default, node.args[place], [0, 0, 0, LEAST_ROWS - size]
                )
                wide = _call(graph, product, *node.args[:place], rows, *node.args[place + 1 :], **node.kwargs)
                cut = _call(graph, torch.ops.aten.slice.Tensor, wide, 0, 0, size)
            node.replace_all_uses_with(cut)
            graph.erase_node(node)


def _call(graph: fx.Graph, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(function, args, kwargs)
    known = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = function(*known, **kwargs)  # of fake tensors
    return node
