"""`tree="auto"` and `tree="gamma"` made to do everything they can: all sizes in turn, and steps without the drafter."""

import itertools
from collections.abc import Sequence
from typing import Any

from draftsmith.inference import Decoder, DynamicTree, TreePolicy
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.trees.candidates import CandidateTrees


def auto_tree(depths: tuple[int, ...], sizes: tuple[int, ...], width: int) -> CandidateTrees:
    """Nested dynamic trees: every depth with the fewest nodes that it can have, then every size with the most depth."""
    pairs = [(depth, next(size for size in sizes if size > depth)) for depth in depths]
    pairs += [(depths[-1], size) for size in sizes if size > pairs[-1][1]]
    return CandidateTrees([DynamicTree(depth, width, size) for depth, size in pairs])


TREE = auto_tree((1, 2, 4), (8, 24), 4)


class RestlessPlanner(Planner):
    """Takes all trees in turn, and now and then leaves the drafter out for some steps."""

    def __init__(self, policies: Sequence[TreePolicy]) -> None:
        super().__init__(policies)
        places = range(1, len(self.policies))
        self.turns = itertools.cycle([*places, *reversed(places)])
        self.rests = itertools.cycle([0, 0, 1, 0, 3, 0, 9, 0])
        self.resting = 0
        self.taken: set[TreePolicy | None] = set()
        self.newest: TreePolicy | None = None

    def choose(self, num_rows: int, length: int, num_waiting: int = 0) -> TreePolicy | None:
        if self.resting:
            self.resting -= 1
            place = 0
        else:
            self.resting, place = next(self.rests), next(self.turns)
        self.is_counting = 0 < place <= self._num_nested
        self.newest = self.policies[place]
        self.taken.add(self.newest)
        return self.newest

    def learn(self, *_: Any) -> None:
        pass


def make_restless(decoder: Decoder) -> RestlessPlanner:
    """Gives a decoder with trees to choose from such a planner."""
    planner = RestlessPlanner([*decoder.policy.candidates, *decoder.step.batch_trees])
    decoder.planner = planner
    return planner


def restless(model: Any, drafter: Any, **options: Any) -> tuple[Decoder, RestlessPlanner]:
    """A decoder with such a planner, which takes trees of `TREE`; options of `Decoder`."""
    decoder = Decoder(model, drafter, tree=TREE, **options)
    return decoder, make_restless(decoder)
