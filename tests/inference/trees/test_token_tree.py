"""Trees against walks from node to parent."""

import random

import pytest
import torch

from draftsmith.inference.targets.masks import compute_ancestors
from draftsmith.inference.trees.static import _StaticPlan, order_paths
from tests.inference.plain_passes import compute_depths


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("shape", ["chain", "star", "random", "padded"])
def test_ancestors_equal_a_walk(num_nodes: int, shape: str) -> None:
    generator = random.Random(num_nodes)
    rows = []
    for _ in range(3):
        parents = [-1]
        for node in range(1, num_nodes):
            parents.append({"chain": node - 1, "star": 0}.get(shape, generator.randrange(node)))
        if shape == "padded":
            parents[num_nodes // 2 + 1 :] = [-1] * len(parents[num_nodes // 2 + 1 :])
        rows.append(parents)
    parents_BN = torch.tensor(rows)
    ancestors = compute_ancestors(parents_BN)
    deepest = int(compute_depths(parents_BN).max())
    assert torch.equal(compute_ancestors(parents_BN, max_depth=deepest), ancestors)
    for row, parents in enumerate(rows):
        for node in range(num_nodes):
            above, current = {node}, node
            while parents[current] >= 0:
                current = parents[current]
                above.add(current)
            assert ancestors[row, node].nonzero().flatten().tolist() == sorted(above)


class TestStaticShapes:
    def test_the_docstrings_examples(self) -> None:
        paths = order_paths([[1], [0], [0, 1], [0, 0]])
        assert paths == ((), (0,), (1,), (0, 0), (0, 1))
        plan = _StaticPlan.build(paths, torch.device("cpu"))
        assert plan.parents.tolist() == [[-1, 0, 0, 1, 1]]
        assert plan.depths.tolist() == [[0, 1, 1, 2, 2]]
        assert plan.draft_rows.tolist() == [0, 1, 0, 0, 0]
        assert [level.frontier.tolist() for level in plan.levels] == [[0], [0]]
        assert [level.child_frontier.tolist() for level in plan.levels] == [[0, 0], [0, 0]]
        assert [level.child_ranks.tolist() for level in plan.levels] == [[0, 1], [0, 1]]
        assert plan.num_ranks == 2

    def test_order_of_the_paths_does_not_matter(self) -> None:
        paths = [[0], [1], [2], [0, 0], [1, 0], [0, 3], [0, 0, 0], [1, 0, 5], [1, 0, 5, 2]]
        wanted = order_paths(paths)
        for seed in range(5):
            random.Random(seed).shuffle(paths)
            assert order_paths(paths) == wanted
        assert sorted(map(list, wanted[1:])) == sorted(paths)

    @pytest.mark.parametrize(
        ("paths", "message"),
        [
            ([[0], [0, -1]], r"path \[0, -1\]: ranks are integers from 0"),
            ([[0], [1], [0]], r"path \[0\] stands twice"),
            ([[0], [1, 0]], r"path \[1, 0\] has no parent: add \[1\]"),
        ],
    )
    def test_refusals(self, paths: list[list[int]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            order_paths(paths)
