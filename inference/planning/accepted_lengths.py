"""AcceptedLengths: how many drafted tokens each candidate tree accepts in a step, from the steps so far."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.inference.trees.policy import TreePolicy

WINDOW = 128  # rows that a mean is of, about


class AcceptedLengths:
    """Running means. A step tells what its tree and every tree that it contains would have accepted.

    About larger trees it tells nothing. These keep their ratio to the largest tree that they contain, which was
    measured in the same steps: ratios change less from text to text than lengths.

    Attributes:
        counts: for each candidate the rows it was seen on.
        weights: for each candidate how many rows its mean is of. It falls while others are drafted: texts change.
    """

    def __init__(self, trees: Sequence[TreePolicy]) -> None:
        self.counts = [0] * len(trees)
        self.weights = [0.0] * len(trees)
        self._means = [0.0] * len(trees)
        self._contents = [[i for i, other in enumerate(trees) if tree.contains(other)] for tree in trees]
        # From small to large, so that a tree comes after those that it contains.
        self._order = sorted(range(len(trees)), key=lambda i: (len(self._contents[i]), trees[i].num_nodes))
        self._smaller = [[i for i in self._order if i in own and i != n] for n, own in enumerate(self._contents)]
        self._base_means = [0.0] * len(trees)  # of the largest tree that each contains, over the same rows

    def learn(self, drafted: int, counted: Sequence[Sequence[int]]) -> None:
        """Takes in a step's rows [rows][candidates]; `drafted` is the candidate that the step drafted."""
        for row in counted:
            for index in range(len(row)):
                if index not in self._contents[drafted]:
                    self.weights[index] *= 1.0 - 1.0 / WINDOW
                    continue
                self.counts[index] += 1
                weight = self.weights[index] = min(self.weights[index] + 1.0, WINDOW)
                self._means[index] += (row[index] - self._means[index]) / weight
                if smaller := self._smaller[index]:
                    self._base_means[index] += (row[smaller[-1]] - self._base_means[index]) / weight

    def forget(self, num_rows: float) -> None:
        """The past now weighs as much as this many rows, at most."""
        self.weights = [min(weight, num_rows) for weight in self.weights]

    def estimate(self, drafted: int) -> list[float]:
        """What each candidate accepts in texts of which the last steps drafted `drafted`. 0 for those never seen."""
        found = [0.0] * len(self._means)
        for index in self._order:
            smaller, mean = self._smaller[index], self._means[index]
            if smaller and self._base_means[index] and index not in self._contents[drafted]:
                mean = found[smaller[-1]] * mean / self._base_means[index]
            found[index] = max([mean, *(found[i] for i in smaller)]) if self.weights[index] else 0.0
        return found
