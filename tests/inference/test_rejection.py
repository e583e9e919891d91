"""Acceptance rules against the target's exact distribution.

The target and the drafter are Markov chains over a few tokens, so that the chance of every continuation is known. Each
test of a distribution draws 200,000 continuations of two tokens, step after step as the decode loop would, and fails a
correct rule with a chance of 1e-6.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inference.acceptance import Acceptance, Sampler, accept_exact
from inference.acceptance_rules import RULES, resolve_rule, typical
from inference.draft_draws import DraftDraws
from inference.drafter import DraftLogits, DraftSampling
from inference.noise import derive_seeds, row_seeds
from inference.policy import DynamicTree, StaticTree, chain
from inference.rejection import DRAFT_STREAM, accept_blocks, accept_by_rejection
from inference.tree import TokenTree
from inference.typical import accept_typical

NUM_DRAWS, VOCAB, FALSE_ALARM = 200_000, 6, 1e-6
WIDE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
LOSSLESS = {
    "exact": accept_exact,
    "rejection": accept_by_rejection,
    "block_verification": accept_blocks,
}


class MarkovDrafter:
    """Scores [V, V] by the last token; `columns` [C] hides the other tokens from it."""

    feature_layers = ()
    max_depth = None

    def __init__(self, scores: Tensor, columns: Tensor | None = None) -> None:
        self.scores, self.columns = scores, columns

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        scores = self.scores[token_ids]
        return DraftLogits(scores if self.columns is None else scores[..., self.columns], self.columns)


def random_scores(seed: int, size: int = VOCAB) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def make_sampler(processors: Sequence[Any] = (), num_rows: int = NUM_DRAWS, seed: int = 0) -> Sampler:
    return Sampler(processors, do_sample=True, row_seeds=row_seeds(seed, num_rows, "cpu"))


def take_step(
    accept: Callable[..., Acceptance],
    sampler: Sampler,
    policy: StaticTree,
    target: Tensor,
    drafter: MarkovDrafter,
    roots: Tensor,
    positions: Tensor,
    **kwargs: Any,
) -> Acceptance:
    draws = None
    if accept is not accept_exact and accept is not accept_typical:
        assert sampler.row_seeds is not None
        draws = DraftDraws(derive_seeds(sampler.row_seeds, DRAFT_STREAM, positions), VOCAB, sampler.warp_draft)
    sampling = DraftSampling(warp=sampler.warp_draft, draws=draws)
    tree = policy.grow(drafter, None, roots, drafter.expand(None, roots[:, None], roots, 0), sampling)
    return accept(sampler, tree, target[tree.token_ids], positions, **kwargs)


def draw_pairs(
    accept: Callable[..., Acceptance], sampler: Sampler, policy: StaticTree, target: Tensor, drafter: MarkovDrafter
) -> tuple[Tensor, float]:
    """The first two tokens behind token 0, [rows, 2], and the mean number of tokens of the first step."""
    zeros = torch.zeros(NUM_DRAWS, dtype=torch.long)
    first = take_step(accept, sampler, policy, target, drafter, zeros, zeros)
    second = take_step(accept, sampler, policy, target, drafter, first.next_tokens[:, 0], zeros + 1)
    behind = torch.where(first.counts > 1, first.next_tokens[:, 1], second.next_tokens[:, 0])
    return torch.stack([first.next_tokens[:, 0], behind], dim=1), first.counts.float().mean().item()


def compare(pairs: Tensor, sampler: Sampler, target: Tensor) -> tuple[float, float, float]:
    """Chi-square over its bound, total variation, and the total variation that chance alone explains."""
    p = torch.softmax(sampler.process(target), dim=-1)
    exact = (p[0][:, None] * p).flatten().double()
    seen = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    possible = exact > 0
    assert seen[~possible].sum() == 0, "tokens that the target never says"
    expected = exact[possible] * len(pairs)
    statistic = ((seen[possible] - expected) ** 2 / expected).sum().item()
    bound = float(chi2.isf(FALSE_ALARM, int(possible.sum()) - 1))
    variation = (seen / len(pairs) - exact).abs().sum().item() / 2
    return statistic / bound, variation, math.sqrt(int(possible.sum()) / len(pairs))


SETTINGS: dict[str, list[Any]] = {
    "T=1": [],
    "T=0.7": [TemperatureLogitsWarper(0.7)],
    "top-k 3": [TopKLogitsWarper(3)],
    "T=0.7, top-p 0.8": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.8)],
}


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        ("exact", WIDE),
        ("rejection", [[0], [0, 0], [0, 0, 0]]),
        ("rejection", WIDE),
        ("block_verification", [[0], [0, 0], [0, 0, 0]]),
    ],
    ids=["exact-tree", "rejection-chain", "rejection-tree", "block-chain"],
)
def test_continuations_have_the_targets_distribution(rule: str, paths: list[list[int]], setting: str) -> None:
    target, drafter = random_scores(1), MarkovDrafter(random_scores(2))
    sampler = make_sampler(SETTINGS[setting])
    pairs, _ = draw_pairs(LOSSLESS[rule], sampler, StaticTree(paths), target, drafter)
    ratio, variation, chance = compare(pairs, sampler, target)
    assert ratio < 1, (rule, setting, ratio)
    assert variation < chance


@pytest.mark.parametrize("rule", ["rejection", "block_verification"])
def test_a_drafter_that_knows_fewer_tokens(rule: str) -> None:
    target, drafter = random_scores(3), MarkovDrafter(random_scores(4), columns=torch.tensor([5, 1, 2]))
    sampler = make_sampler()
    policy = StaticTree(WIDE) if rule == "rejection" else chain(3)
    pairs, _ = draw_pairs(LOSSLESS[rule], sampler, policy, target, drafter)
    assert compare(pairs, sampler, target)[0] < 1


def _without_residual(*args: Any, **kwargs: Any) -> Acceptance:
    """A wrong rule: behind a rejected draft it draws from p itself."""
    import inference.rejection as rejection

    usual = rejection._normalise
    rejection._normalise = lambda values, otherwise: otherwise
    try:
        return accept_by_rejection(*args, **kwargs)
    finally:
        rejection._normalise = usual


def test_these_tests_catch_a_biased_rule() -> None:
    target, drafter = random_scores(1), MarkovDrafter(random_scores(2))
    sampler = make_sampler()
    pairs, _ = draw_pairs(_without_residual, sampler, chain(2), target, drafter)
    ratio, variation, chance = compare(pairs, sampler, target)
    assert ratio > 5
    assert variation > 3 * chance


def test_these_tests_catch_shared_noise() -> None:
    """Drafts drawn with the target's own noise break rejection (they are for exact acceptance alone)."""
    target, drafter = random_scores(1), MarkovDrafter(random_scores(2))
    sampler = make_sampler()

    def shared(sampler: Sampler, tree: TokenTree, logits: Tensor, positions: Tensor) -> Acceptance:
        noise = sampler.draw_noise(positions, tree.path_width, VOCAB)
        assert noise is not None
        log_q = torch.log_softmax(drafter.scores[tree.token_ids[:, 0]], -1)
        tree.token_ids[:, 1] = (log_q + noise[:, 0]).argmax(-1)
        return accept_by_rejection(sampler, tree, target[tree.token_ids], positions, noise=noise)

    pairs, _ = draw_pairs(shared, sampler, chain(1), target, drafter)
    assert compare(pairs, sampler, target)[0] > 5


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_tokens_per_step_of_token_rejection(gamma: int) -> None:
    """Independent tokens: (1 - alpha^(gamma + 1)) / (1 - alpha), alpha = sum of min(p, q) (arXiv 2211.17192, eq. 1)."""
    target, draft = (random_scores(seed)[:1].expand(VOCAB, -1).contiguous() for seed in (5, 6))
    p, q = torch.softmax(target[0], -1), torch.softmax(draft[0], -1)
    alpha = torch.minimum(p, q).sum().item()
    _, mean = draw_pairs(accept_by_rejection, make_sampler(), chain(gamma), target, MarkovDrafter(draft))
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert mean == pytest.approx(expected, abs=4 * gamma / math.sqrt(NUM_DRAWS))


def test_one_draft_accepted_by_matching_alone() -> None:
    """Exact acceptance of one fixed candidate x: 1 + p(x) tokens; of several: 1 + the sum of their p."""
    target, draft = random_scores(7), random_scores(8)
    p, order = torch.softmax(target[0], -1), draft[0].argsort(descending=True)
    for width in (1, 3):
        policy = StaticTree([[rank] for rank in range(width)])
        _, mean = draw_pairs(accept_exact, make_sampler(), policy, target, MarkovDrafter(draft))
        assert mean == pytest.approx(1 + p[order[:width]].sum().item(), abs=4 / math.sqrt(NUM_DRAWS))


def test_block_verification_accepts_no_fewer() -> None:
    target, drafter = random_scores(9), MarkovDrafter(random_scores(10))
    means = [
        draw_pairs(rule, make_sampler(), chain(5), target, drafter)[1] for rule in (accept_by_rejection, accept_blocks)
    ]
    assert means[1] > means[0] + 4 * 5 / math.sqrt(NUM_DRAWS)


def test_a_perfect_drafter_is_always_accepted() -> None:
    target = random_scores(11)
    for rule in (accept_by_rejection, accept_blocks):
        _, mean = draw_pairs(rule, make_sampler(), chain(4), target, MarkovDrafter(target))
        assert mean > 4.999


def test_a_greedy_target_is_decoded_exactly() -> None:
    target, drafter = random_scores(12), MarkovDrafter(random_scores(13))
    sampler, zeros = Sampler(), torch.zeros(1, dtype=torch.long)
    tree = StaticTree(WIDE).grow(
        drafter, None, zeros, drafter.expand(None, zeros[None], zeros[None], 0), DraftSampling()
    )
    wanted = accept_exact(sampler, tree, target[tree.token_ids], zeros)
    for rule in (accept_by_rejection, accept_blocks, accept_typical):
        got = rule(sampler, tree, target[tree.token_ids], zeros)
        assert torch.equal(got.path, wanted.path)
        assert torch.equal(got.next_tokens, wanted.next_tokens)


class Recorder(LogitsProcessor):
    """Forbids the last token, and notes what it was asked about."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.prefixes += input_ids.tolist()
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_processors_that_read_the_prefix() -> None:
    """Each is asked once per emitted token, about the row's own text; no token follows itself."""
    num_rows = 300
    target, drafter = random_scores(14), MarkovDrafter(random_scores(15))
    processor = Recorder()
    sampler = make_sampler([processor], num_rows)
    sampler.for_row = lambda row, batch_size: sampler  # type: ignore[method-assign]
    roots = torch.arange(num_rows) % VOCAB
    prefixes = [torch.tensor([[row, root]]) for row, root in enumerate(roots.tolist())]
    budgets = [3] * (num_rows - 1) + [0]
    got = take_step(
        accept_by_rejection,
        sampler,
        StaticTree(WIDE),
        target,
        drafter,
        roots,
        roots * 0,
        prefixes=prefixes,
        max_tokens=budgets,
    )
    emitted = {row: got.next_tokens[row, : got.counts[row]].tolist() for row in range(num_rows)}
    assert emitted[num_rows - 1] == []
    for row, tokens in emitted.items():
        text = [int(roots[row]), *tokens]
        assert all(one != other for one, other in itertools.pairwise(text))
        asked = sorted(prefix[1:] for prefix in processor.prefixes if prefix[0] == row)
        assert asked == sorted(text[: 1 + place] for place in range(len(tokens)))
    assert max(map(len, emitted.values())) == 3
    for rule in (accept_blocks, accept_typical):
        with pytest.raises(ValueError, match="Recorder may read the text so far"):
            take_step(rule, sampler, chain(2), target, drafter, roots, roots * 0, prefixes=prefixes)


def test_typical_acceptance_equals_a_slow_reference() -> None:
    target, drafter, policy = random_scores(16), MarkovDrafter(random_scores(17)), StaticTree(WIDE)
    num_rows, epsilon, delta = 200, 0.15, 0.4
    sampler = make_sampler(num_rows=num_rows)
    roots = torch.arange(num_rows) % VOCAB
    sampling = DraftSampling(warp=sampler.warp_draft)
    tree = policy.grow(drafter, None, roots, drafter.expand(None, roots[:, None], roots, 0), sampling)
    got = accept_typical(sampler, tree, target[tree.token_ids], roots * 0, epsilon=epsilon, delta=delta)
    noise = sampler.draw_noise(roots * 0, tree.path_width, VOCAB)
    assert noise is not None
    lengths = set()
    for row in range(num_rows):
        best: tuple[int, float, list[int]] = (0, 0.0, [0])
        for node in range(1, tree.num_nodes):
            path = [node]
            while path[0]:
                path.insert(0, int(tree.parents[row, path[0]]))
            total, is_typical = 0.0, True
            for above, below in itertools.pairwise(path):
                p = torch.softmax(target[tree.token_ids[row, above]], -1)
                entropy = -(p * p.log()).sum().item()
                chance = p[tree.token_ids[row, below]].item()
                is_typical &= chance > min(epsilon, delta * math.exp(-entropy))
                total += math.log(chance)
            if is_typical and (len(path) - 1, total) > best[:2]:
                best = (len(path) - 1, total, path)
        depth, _, path = best
        drafted = tree.token_ids[row, path[1:]].tolist()
        bonus = int((target[tree.token_ids[row, path[-1]]] + noise[row, depth]).argmax())
        assert got.path[row, : depth + 1].tolist() == path
        assert got.next_tokens[row, : depth + 1].tolist() == [*drafted, bonus]
        assert int(got.counts[row]) == depth + 1
        lengths.add(depth)
    assert len(lengths) >= 3


def test_rules_are_checked() -> None:
    with pytest.raises(
        ValueError, match="acceptance is 'exakt'; allowed are exact, rejection, block_verification, typical"
    ):
        resolve_rule("exakt")
    with pytest.raises(ValueError, match="shape does not depend on what was drafted, and the tree is a DynamicTree"):
        RULES["rejection"].check(DynamicTree())
    with pytest.raises(ValueError, match="judges chains only"):
        RULES["block_verification"].check(StaticTree(WIDE))
    with pytest.raises(ValueError, match="needs all siblings before each one"):
        RULES["rejection"].check(StaticTree([[0], [2]]))
    with pytest.raises(ValueError, match="epsilon=2"):
        typical(epsilon=2)


def test_typical_says_that_it_is_lossy(caplog: pytest.LogCaptureFixture) -> None:
    typical().check(DynamicTree())
    assert "is lossy" in caplog.text
