"""What is noted of commits: the worked example of `TokenTree`, with a second row."""

from __future__ import annotations

import torch

from draftsmith.inference.trees.token_tree import TokenTree
from tests.lossless.watched_commits import Commits


def test_ranks_are_among_the_siblings_and_padding_is_none_of_them() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 1, -1]])
    depths = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 2, 2, 0]])
    log_probs = torch.tensor([[0.0, -1.0, -2.0, -1.5, -3.0], [0.0, -1.0, -3.0, -2.0, float("-inf")]])
    tree = TokenTree(torch.zeros(2, 5, dtype=torch.long), parents, depths, log_probs)
    commits = Commits()
    commits.add(tree, torch.tensor([[0, 1, 0], [0, 1, 0]]), torch.tensor([2, 0]))  # the second row has ended
    assert (commits.paths, commits.num_moved) == ({(0,)}, 0)
    commits.add(tree, torch.tensor([[0, 1, 4], [0, 1, 2]]), torch.tensor([3, 3]))
    assert (commits.paths, commits.num_moved) == ({(0,), (0, 1)}, 1)
    commits.add(tree, torch.tensor([[0, 2, 0], [0, 1, 3]]), torch.tensor([2, 3]))
    assert (commits.paths, commits.num_moved) == ({(0,), (0, 1), (1,), (0, 0)}, 3)
