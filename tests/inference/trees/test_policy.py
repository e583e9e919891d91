"""Tree policies against a slow reference that writes every path out."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Drafter, DraftLogits, DraftSampling, DynamicTree, StaticTree, TreePolicy, chain
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.drafters.sampling import GREEDY_TEMPERATURE
from draftsmith.inference.request.processors import COLUMN_FREE
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.inference.trees.token_tree import TokenTree
from tests.conftest import REPOSITORY

V = 11
ROOT = 3


class TableDrafter(Drafter):
    """Scores depend on the whole path, by a hash: any mix-up of parents changes them."""

    feature_layers: tuple[int, ...] = ()
    max_depth: int | None = None

    def __init__(self, *, peaked: bool = False, width: int = V) -> None:
        self.peaked, self.width = peaked, width

    def scores(self, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(path) % 2**31)
        logits = torch.randn(self.width, generator=generator) * 2
        return logits * 200 if self.peaked else logits  # peaked: probabilities of exactly 1 and 0

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> list[list[tuple[int, ...]]]:
        return [[()] for _ in range(batch_size)]

    def extend(
        self, state: Any, features: Any, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        state[:] = [[(int(row[-1]),)] for row in next_token_ids]
        return DraftLogits(torch.stack([self.scores(paths[0])[None] for paths in state]))

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        for row, paths in enumerate(state):
            state[row] = [
                (*paths[int(parent)], int(token)) for parent, token in zip(parents[row], token_ids[row], strict=True)
            ]
            assert all(len(path) == depth + 1 for path in state[row])
        return DraftLogits(torch.stack([torch.stack([self.scores(path) for path in paths]) for paths in state]))


def grow(policy: TreePolicy, drafter: TableDrafter, roots: list[int]) -> TokenTree:
    state = drafter.start(len(roots), 8, policy.num_scratch)
    root_ids = torch.tensor(roots)
    draft = drafter.extend(state, None, root_ids[:, None], torch.ones(len(roots)), max_slots=1)
    return policy.grow(drafter, state, root_ids, draft, DraftSampling())


def paths_of(tree: TokenTree, row: int) -> dict[tuple[int, ...], float]:
    """Token path -> log-probability of every node that is not padding; asserts that parents stand before children."""
    token_ids, parents, depths = (x[row].tolist() for x in (tree.token_ids, tree.parents, tree.depths))
    paths: list[tuple[int, ...]] = [(token_ids[0],)]
    found = {paths[0]: 0.0}
    assert (parents[0], depths[0]) == (-1, 0)
    for node in range(1, tree.num_nodes):
        assert parents[node] < node
        if parents[node] < 0:
            paths.append(())
            continue
        paths.append((*paths[parents[node]], token_ids[node]))
        assert depths[node] == len(paths[node]) - 1
        assert paths[node] not in found
        found[paths[node]] = float(tree.log_probs[row, node])
    return found


def ranked_children(drafter: TableDrafter, path: tuple[int, ...], top_k: int) -> list[tuple[float, int]]:
    log_probs = torch.log_softmax(drafter.scores(path) / GREEDY_TEMPERATURE, -1)
    top = log_probs.topk(min(top_k, drafter.width))
    return list(zip(top.values.tolist(), top.indices.tolist(), strict=True))


def reference_dynamic(
    drafter: TableDrafter, root: int, depth: int, top_k: int, num_nodes: int
) -> dict[tuple[int, ...], float]:
    level, pool = [((root,), 0.0)], []
    for _ in range(depth):
        children = [
            ((*path, token), score + log_prob)
            for path, score in level
            for log_prob, token in ranked_children(drafter, path, 2 * top_k if len(path) == 1 else top_k)
        ]
        pool += children
        level = sorted(children, key=lambda node: -node[1])[:top_k]
    best = sorted(pool, key=lambda node: -node[1])[: num_nodes - 1]  # stable: earlier levels first
    return {(root,): 0.0, **{path: score for path, score in best if score > -math.inf}}


@pytest.mark.parametrize(("depth", "top_k", "num_nodes"), [(1, 3, 4), (3, 2, 8), (4, 3, 12), (5, 4, 60), (2, 20, 30)])
def test_dynamic_tree(depth: int, top_k: int, num_nodes: int) -> None:
    drafter = TableDrafter()
    tree = grow(DynamicTree(depth, top_k, num_nodes), drafter, [ROOT, 7])
    for row, root in enumerate((ROOT, 7)):
        expected = reference_dynamic(drafter, root, depth, top_k, num_nodes)
        found = paths_of(tree, row)
        assert found.keys() == expected.keys()
        for path, score in found.items():
            assert score == pytest.approx(expected[path], abs=1e-5)


def test_parents_outrank_children_of_probability_one() -> None:
    """Ties between a parent and its certain child are broken by index; candidates of probability 0 are padding."""
    found = paths_of(grow(DynamicTree(6, 3, 5), TableDrafter(peaked=True), [ROOT]), 0)
    assert max(map(len, found)) >= 4
    assert all(path[:-1] in found for path in found if len(path) > 1)


PATHS = [[0], [2], [0, 0], [0, 3], [2, 1], [0, 3, 0], [2, 1, 1], [2, 1, 0]]


def test_static_tree() -> None:
    drafter = TableDrafter()
    policy = StaticTree(PATHS)
    tree = grow(policy, drafter, [ROOT, 5])
    for row, root in enumerate((ROOT, 5)):
        expected = {(root,): 0.0}
        for ranks in PATHS:
            path, score = (root,), 0.0
            for rank in ranks:
                log_prob, token = ranked_children(drafter, path, V)[rank]
                path, score = (*path, token), score + log_prob
            expected[path] = score
        found = paths_of(tree, row)
        assert found == pytest.approx(expected, abs=1e-5)
    assert (policy.num_nodes, policy.max_depth) == (9, 3)
    assert policy.num_scratch == 2 + 2  # frontier nodes of depths 1 and 2; leaves are not expanded
    assert not policy.is_chain


def test_static_tree_with_more_ranks_than_candidates() -> None:
    tree = grow(StaticTree([[0], [1], [2], [3], [3, 0]]), TableDrafter(width=2), [ROOT])
    assert len(paths_of(tree, 0)) == 3  # the root and two candidates; the rest is padding


def test_chain() -> None:
    policy = chain(4)
    assert (policy.is_chain, policy.num_nodes, policy.max_depth) == (True, 5, 4)
    (longest,) = [path for path in paths_of(grow(policy, TableDrafter(), [ROOT]), 0) if len(path) == 5]
    for depth in range(1, 5):
        assert longest[depth] == ranked_children(TableDrafter(), longest[:depth], 1)[0][1]


def test_coupled_candidates_carry_the_targets_noise() -> None:
    """With noise g, the candidates are the largest of log q + g (arXiv 2408.07978)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 3, V, generator=generator) * 3
    logits = torch.randn(1, 1, V, generator=generator)
    sampling = DraftSampling(warp=lambda rows: rows / 0.7, noise=noise)
    for depth in range(3):
        expected = torch.log_softmax(logits[0, 0] / 0.7, -1) + noise[0, depth]
        assert torch.equal(sampling.at_depth(depth).score(DraftLogits(logits))[0, 0].argsort(), expected.argsort())
    ids = torch.tensor([4, 9, 2])
    reduced = sampling.at_depth(1).score(DraftLogits(logits[..., :3], ids))[0, 0]
    expected = torch.log_softmax(logits[0, 0, :3] / 0.7, -1) + noise[0, 1, ids]
    assert torch.allclose(reduced, torch.log_softmax(expected, -1))


def test_greedy_scores_are_sharper() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0]]])
    assert torch.equal(DraftSampling().score(DraftLogits(logits)), (logits / GREEDY_TEMPERATURE).log_softmax(-1))
    uncoupled = DraftSampling(warp=lambda rows: rows)
    assert torch.equal(uncoupled.score(DraftLogits(logits)), logits.log_softmax(-1))


SETTINGS: dict[str, tuple[Any, ...]] = {
    "EpsilonLogitsWarper": (1e-3,),
    "EtaLogitsWarper": (1e-3,),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
    "MinPLogitsWarper": (0.1,),
    "TemperatureLogitsWarper": (0.7,),
    "TopHLogitsWarper": (0.5,),
    "TopKLogitsWarper": (2,),
    "TopPLogitsWarper": (0.9,),
    "TypicalLogitsWarper": (0.9,),
}


@pytest.mark.parametrize("kind", sorted(COLUMN_FREE, key=str), ids=lambda kind: kind.__name__)
def test_processors_never_see_a_node_without_candidates(kind: type) -> None:
    """Some of them fail on it, and one makes candidates of its empty columns."""
    processors = [kind(*SETTINGS[kind.__name__])]
    sampler = Sampler(processors, do_sample=True, row_seeds=torch.zeros(1, dtype=torch.long))
    sampling = DraftSampling(warp=sampler.warp_draft)
    logits = torch.tensor([[[1.0, 0.5, -math.inf, 0.0], [-math.inf] * 4, [-math.inf, 2.0, -math.inf, -math.inf]]])
    scores = sampling.score(DraftLogits(logits))
    assert not scores.isnan().any()
    assert scores[logits.isneginf()].isneginf().all()
    for node in (0, 2):
        assert torch.equal(scores[:, node : node + 1], sampling.score(DraftLogits(logits[:, node : node + 1])))
        assert scores[0, node].exp().sum() == pytest.approx(1.0)


NEITHER = "(?s)neither a file nor.*dynamic:DEPTH,TOP_K,NODES.*chain:LENGTH"


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ("chian", NEITHER),
        ("dynamic:4", NEITHER),
        ([[0], [0, 0, 0]], "no parent"),
        *((tree, rf"got the tree {re.escape(repr(tree))}: a static tree is a list of") for tree in (4, [0, 1], [None])),
        (chain(4), "4 levels deep.*at most 3"),
    ],
)
def test_refused_trees(tree: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        resolve_policy(tree, 3)


@pytest.mark.parametrize(
    ("tree", "limit", "size"),
    [
        ("dynamic", None, (6, 32)),
        ("auto", 2, (2, 25)),
        ("dynamic:4,6,16", None, (4, 16)),
        ("chain", None, (5, 6)),
        ("gamma:4", None, (4, 5)),
        ([[0], [1]], 1, (1, 3)),
        (str(REPOSITORY / "configs" / "trees" / "static12.yaml"), None, (4, 13)),
    ],
)
def test_trees_by_name(tree: Any, limit: int | None, size: tuple[int, int]) -> None:
    policy = resolve_policy(tree, limit)
    assert (policy.max_depth, policy.num_nodes) == size
