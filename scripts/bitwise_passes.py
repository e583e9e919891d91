"""The same text through passes of different shapes: one token a pass, chains, trees; every row of logits is kept.

The text is known beforehand, so every way gets the same tokens, and how many of them a pass keeps is drawn, not
accepted. Each way fills a cache of its own behind the same prompt, and commits what it keeps, as a decode loop does.

Legend: N tree nodes, T tokens of a text behind its prompt, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference import Target
from inference.kv_cache import TreeCache
from inference.target import TargetOutput
from inference.tree import TokenTree, compute_depths

Verify = Callable[[TreeCache, TokenTree], TargetOutput]  # behind `cache.open_slots(N)`
ONE_TOKEN = ("padding", "decoys")


@dataclass(frozen=True)
class Shape:
    """How a pass of `num_nodes` rows is filled.

    Attributes:
        kind: "padding" (the root, and nodes that hang on nothing), "decoys" (the root, and wrong children of it),
            "chain" (the text's tokens and, behind the last one that is kept, wrong ones), "tree" (those tokens stand at
            any nodes, wrong ones between them), "front" (a tree in which they are the first nodes).
        view: slots of the cache that the attention sees; None = as many as are needed, in the cache's usual steps.
    """

    kind: str
    num_nodes: int
    view: int | None = None


def make_tree(
    shape: Shape, text: Sequence[int], start: int, vocab_size: int, draw: random.Random
) -> tuple[TokenTree, list[int]]:
    """The pass whose root is text[start], and the nodes that carry text[start], text[start + 1], ...

    >>> tree, path = make_tree(Shape("tree", 6), [10, 11, 12, 13, 14, 15], 0, 100, random.Random(2))
    >>> path, tree.parents[0, path].tolist(), tree.token_ids[0, path].tolist()
    ([0, 1, 3], [-1, 0, 1], [10, 11, 12])
    """
    size, left = shape.num_nodes, len(text) - start
    num_kept = 1 if shape.kind in ONE_TOKEN else draw.randint(1, min(size, left))
    places = draw.sample(range(1, size), num_kept - 1) if shape.kind == "tree" else range(1, num_kept)
    tokens, parents, path = [text[start]], [-1], [0]
    for node in range(1, size):
        if node in places:
            tokens.append(text[start + len(path)])
            parents.append(path[-1])
            path.append(node)
        else:
            tokens.append(draw.randrange(vocab_size))
            above = {"padding": -1, "decoys": 0, "chain": node - 1}
            parents.append(above[shape.kind] if shape.kind in above else draw.randrange(node))
    ids = torch.tensor([tokens])
    depths = compute_depths(torch.tensor([parents]))
    # One bound of the depth for all kinds: compiled, passes of one size are then one graph.
    return TokenTree(ids, torch.tensor([parents]), depths, torch.zeros(ids.shape), max_depth=size - 1), path


@torch.no_grad()
def read_text(
    target: Target,
    verify: Verify,
    shape: Shape,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    capacity: int,
    refill: Shape | None = None,
    seed: int = 0,
) -> Tensor:
    """Logits [T, V] behind each token of a text, from passes of one shape.

    Args:
        capacity: of the cache, at least prompt + text + N.
        refill: the tokens a pass keeps are read again by passes of this shape, which are what is committed: a
            difference of one pass then does not reach the next.
        seed: of what is drawn: how many tokens a pass keeps, where they stand, and the wrong ones.
    """
    draw = random.Random(seed)
    cache = target.new_cache(1, capacity)
    # In one pass without a tree, the same for all shapes.
    target.prefill(cache, torch.tensor([list(prompt)]), torch.tensor([len(prompt)]))
    usual = cache.view_multiple
    rows: list[Tensor] = []
    done = 0

    def run(shape: Shape, start: int) -> tuple[Tensor, list[int]]:
        tree, path = make_tree(shape, text, start, target.vocab_size, draw)
        cache.length_bound = cache.length_floor = len(prompt) + start
        cache.view_multiple = usual if shape.view is None else shape.view
        cache.open_slots(tree.num_nodes)
        return verify(cache, tree).logits[0, path].clone(), path

    def keep(path: list[int]) -> None:
        cache.commit(torch.tensor([path]), torch.tensor([len(path)]), is_chain=path == list(range(len(path))))

    while done < len(text):
        logits, path = run(shape, done)
        rows.append(logits)
        if refill is None:
            keep(path)
        else:
            for place in range(len(path)):
                keep(run(refill, done + place)[1])
        done += len(path)
    return torch.cat(rows)
