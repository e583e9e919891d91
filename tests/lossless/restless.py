"""`tree="auto"` and `tree="gamma"` made to do everything they can: all sizes in turn, and steps without the drafter."""

from __future__ import annotations

import itertools
from typing import Any

from inference import Decoder
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import NO_TREE, CostModel, Plan
from inference.planning.tree_planner import TreePlanner

TREE = AutoTree(depths=(1, 2, 4), sizes=(8, 24), widths=(2, 4))


class RestlessPlanner(TreePlanner):
    """Takes all plans in turn, and now and then leaves the drafter out for some steps."""

    def __init__(self, tree: AutoTree) -> None:
        super().__init__(tree)
        self.turns = itertools.cycle([*self.plans, NO_TREE, *reversed(self.plans)])
        self.rests = itertools.cycle([0, 0, 1, 0, 3, 0, 9, 0])
        self.resting = 0
        self.taken: set[Plan] = set()

    @property
    def is_drafting(self) -> bool:
        return self.resting == 0

    def choose(self, *_: Any) -> Plan:
        plan = next(self.turns)
        self.taken.add(plan)
        return plan

    def learn(self, plan: Plan, *args: Any) -> None:
        super().learn(plan, *args)
        self.resting = self.resting or next(self.rests)

    def pass_step(self) -> None:
        self.resting -= 1


def make_restless(decoder: Decoder) -> RestlessPlanner:
    """Gives a decoder whose tree is an `AutoTree` such a planner, and costs that nobody measures."""
    tree = decoder.policy
    assert isinstance(tree, AutoTree)
    sizes = (1, *tree.sizes)
    verify = tuple(1.0 + 0.01 * size for size in sizes)
    levels = tuple(0.1 for _ in tree.widths)
    costs = CostModel((8,), sizes, (verify,), 0.1, 0.0, tree.widths, levels, 0.0, 0.0)
    planner = RestlessPlanner(tree)
    decoder._planner = planner
    decoder.costs = lambda *_, **__: costs  # type: ignore[method-assign]
    return planner


def restless(model: Any, drafter: Any, **options: Any) -> tuple[Decoder, RestlessPlanner]:
    """A decoder with such a planner, which takes sizes of `TREE`; options of `Decoder`."""
    decoder = Decoder(model, drafter, tree=TREE, **options)
    return decoder, make_restless(decoder)
