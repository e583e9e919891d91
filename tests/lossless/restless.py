"""`tree="auto"` and `tree="gamma"` made to do everything they can: all sizes in turn, and steps without the drafter."""

from __future__ import annotations

import itertools
from typing import Any

from draftsmith.inference import Decoder, DynamicTree
from draftsmith.inference.planning.planner import TreePlanner
from draftsmith.inference.trees.auto import AutoTree
from draftsmith.inference.trees.policy import TreePolicy


def auto_tree(depths: tuple[int, ...], sizes: tuple[int, ...], widths: tuple[int, ...]) -> AutoTree:
    """Every dynamic tree of these depths, numbers of nodes and beams that can have so many nodes."""
    every = [(DynamicTree(depth, width, size), size) for depth, size, width in itertools.product(depths, sizes, widths)]
    return AutoTree([tree for tree, size in every if tree.max_depth < size == tree.num_nodes])


TREE = auto_tree((1, 2, 4), (8, 24), (2, 4))


class RestlessPlanner(TreePlanner):
    """Takes all trees in turn, and now and then leaves the drafter out for some steps. It needs no costs."""

    def __init__(self, policy: TreePolicy) -> None:
        super().__init__(policy)
        self.turns = itertools.cycle([*range(len(self.trees)), *reversed(range(len(self.trees)))])
        self.rests = itertools.cycle([0, 0, 1, 0, 3, 0, 9, 0])
        self.resting = 0
        self.taken: set[int | None] = set()

    def begin(self, *_: Any) -> None:
        pass

    def choose(self, *_: Any) -> TreePolicy | None:
        if self.resting:
            self.resting -= 1
            self._chosen = None
        else:
            self.resting, self._chosen = next(self.rests), next(self.turns)
        self.taken.add(self._chosen)
        return None if self._chosen is None else self.trees[self._chosen]

    def learn(self, *_: Any) -> None:
        pass


def make_restless(decoder: Decoder) -> RestlessPlanner:
    """Gives a decoder with trees to choose from such a planner."""
    assert decoder.policy is not None
    planner = RestlessPlanner(decoder.policy)
    decoder._choice = planner
    return planner


def restless(model: Any, drafter: Any, **options: Any) -> tuple[Decoder, RestlessPlanner]:
    """A decoder with such a planner, which takes trees of `TREE`; options of `Decoder`."""
    decoder = Decoder(model, drafter, tree=TREE, **options)
    return decoder, make_restless(decoder)
