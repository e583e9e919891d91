"""Rows that are added to products of few rows in graphs with packed weights, as `PackedLinear` does it.

The sum of a product and what a layer adds to it (the residual) gets them too: oneDNN adds it before it rounds, in every
graph or in none, so that graphs of few rows and of many compute the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from draftsmith.inference.kernels.packed_weights import LEAST_ROWS

_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}  # and the place of the rows
_VIEW, _ADD = torch.ops.aten.view.default, torch.ops.aten.add.Tensor


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
                rows = _pad(graph, node.args[place], size)
                wide = _call(graph, product, *node.args[:place], rows, *node.args[place + 1 :], **node.kwargs)
            views = _find_views(node)
            total = next(iter(views[-1].users))
            if len(views[-1].users) == 1 and _adds_rows(total):
                with graph.inserting_before(total):
                    terms = [
                        wide if term is views[-1] else _pad(graph, _view(graph, term, (size, -1)), size)
                        for term in total.all_input_nodes
                    ]
                    wide = _call(graph, _ADD, *terms)
                views.append(total)
            with graph.inserting_after(wide):
                cut = _call(graph, torch.ops.aten.slice.Tensor, wide, 0, 0, size)
            with graph.inserting_after(cut):
                views[-1].replace_all_uses_with(_view(graph, cut, views[-1].meta["val"].shape))
            for one in reversed(views):
                graph.erase_node(one)


def _find_views(node: fx.Node) -> list[fx.Node]:
    """The node, and the views of it that nothing else reads."""
    views = [node]
    while len(views[-1].users) == 1 and (user := next(iter(views[-1].users))).target is _VIEW:
        views.append(user)
    return views


def _adds_rows(node: fx.Node) -> bool:
    """Whether it adds two tensors of one shape and dtype."""
    terms = [term for term in node.args if isinstance(term, fx.Node)]
    if node.target is not _ADD or node.kwargs or len(terms) < 2 or terms[0] is terms[1]:
        return False
    first, second = (term.meta["val"] for term in terms)
    return bool((first.shape, first.dtype) == (second.shape, second.dtype))


def _pad(graph: fx.Graph, rows: fx.Node, size: int) -> fx.Node:
    return _call(graph, torch.ops.aten.constant_pad_nd.default, rows, [0, 0, 0, LEAST_ROWS - size])


def _view(graph: fx.Graph, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    return _call(graph, torch.ops.aten.reshape.default, node, [*shape])


def _call(graph: fx.Graph, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(function, args, kwargs)
    known = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = function(*known, **kwargs)  # of fake tensors
    return node
