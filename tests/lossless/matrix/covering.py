"""Pairwise covering designs: a small set of combinations in which every two values of every two factors meet."""

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

TRIES = 400  # random completions of a pair before it counts as impossible
CANDIDATES = 30  # valid completions; the best one is chosen

Pair = tuple[str, Any, str, Any]


def pairs_of(values: Mapping[str, Any]) -> set[Pair]:
    """All pairs of values of one combination."""
    return {(one, values[one], other, values[other]) for one, other in itertools.combinations(sorted(values), 2)}


def cover(
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Mapping[str, Any]], bool],
    *,
    apart: Collection[frozenset[str]] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Valid combinations in which every pair of values occurs that some valid one has; greedy, the same each time.

    Args:
        factors: name -> values.
        is_valid: which combinations make sense.
        apart: pairs of factors whose values need not meet.

    >>> design = cover({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, lambda values: True)
    >>> len(design), {(row["a"], row["b"]) for row in design} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    (4, True)
    """
    generator = random.Random(seed)
    names = sorted(factors)
    meeting = [pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in apart]
    open_pairs: dict[Pair, None] = {  # in order, unlike a set
        (one, value, other, another): None
        for one, other in meeting
        for value, another in itertools.product(factors[one], factors[other])
    }
    design: list[dict[str, Any]] = []
    while open_pairs:
        one, value, other, another = pair = next(iter(open_pairs))
        best: dict[str, Any] = {}
        best_gain, num_valid = 0, 0
        for _ in range(TRIES):
            candidate = {name: generator.choice(factors[name]) for name in names} | {one: value, other: another}
            if not is_valid(candidate):
                continue
            gain = sum((a, candidate[a], b, candidate[b]) in open_pairs for a, b in meeting)
            if gain > best_gain:
                best, best_gain = candidate, gain
            num_valid += 1
            if num_valid == CANDIDATES:
                break
        if not best:
            del open_pairs[pair]
            continue
        design.append(best)
        for covered in pairs_of(best):
            open_pairs.pop(covered, None)
    return design
