"""NodeCosts: what a step takes beside a node that it verifies more, from the times of steps."""

from collections import Counter, deque
from statistics import fmean, median

NUM_KEPT = 96  # steps
NUM_NEW = 8  # steps after which the line is drawn anew
SLOW = 2.0  # steps that took this multiple of the median tell nothing
FIRST_FIXED, FIRST_PER_ROW = 20.0, 2.0  # a first guess, in nodes: what a step without drafts takes


class NodeCosts:
    """A line through the times of steps with so many rows, over the drafted nodes that they verified."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._fixed: dict[int, float] = {}
        self._counts = Counter[int]()

    def fixed(self, num_rows: int) -> float:
        """What a step takes that verifies no drafts, in the time that a node takes."""
        return self._fixed.get(num_rows, FIRST_FIXED + FIRST_PER_ROW * num_rows)

    def learn(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        if seconds <= 0.0:  # a clock that is too coarse
            return
        steps = self._steps.setdefault(num_rows, deque(maxlen=NUM_KEPT))
        steps.append((num_drafted, seconds))
        self._counts[num_rows] += 1
        if self._counts[num_rows] % NUM_NEW:
            return
        usual = median(time for _, time in steps)
        kept = [(nodes, time) for nodes, time in steps if time < SLOW * usual]
        nodes, time = (fmean(each) for each in zip(*kept, strict=True))
        # The guess counts as some steps with a node a row more than the mean, and some with one less.
        guess = time / (FIRST_FIXED + FIRST_PER_ROW * num_rows + nodes)
        weight = 4.0 * num_rows**2
        moved = sum((n - nodes) * (t - time) for n, t in kept) + weight * guess
        slope = moved / (sum((n - nodes) ** 2 for n, _ in kept) + weight)
        slope = min(max(slope, guess / 3.0), 3.0 * guess)
        self._fixed[num_rows] = max(time / slope - nodes, 1.0)
