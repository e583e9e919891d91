"""Acceptance rules against the target's exact distribution.

The target and the drafter are Markov chains over a few tokens, so that the chance of every continuation is known. Each
test of a distribution draws 50,000 continuations of two tokens, step after step as the decode loop would, and fails a
correct rule with a chance of 1e-6 (cells of fewer than 5 expected draws are pooled). `test_sampled_texts.py` draws
whole texts.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from draftsmith.inference import DraftLogits, DraftSampling, DynamicTree, NgramDrafter, StaticTree, Target, chain
from draftsmith.inference.acceptance.exact import Acceptance, accept_exact
from draftsmith.inference.acceptance.rejection import DRAFT_STREAM, accept_by_rejection
from draftsmith.inference.acceptance.rules import RULES, resolve_rule
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.acceptance.typical import accept_typical
from draftsmith.inference.noise import derive_seeds, row_seeds
from draftsmith.inference.request.text_processors import read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.step import Step
from tests.inference.ragged_texts import texts_of
from tests.tiny_targets import tiny_target

NUM_DRAWS, VOCAB, FALSE_ALARM = 50_000, 6, 1e-6
ROOT = 0
WIDE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
LOSSLESS = {"exact": accept_exact, "rejection": accept_by_rejection}


class MarkovDrafter:
    """Scores [V, V] by the last token; `columns` [C] hides the other tokens from it."""

    feature_layers = ()
    max_depth = None

    def __init__(self, scores: Tensor, columns: Tensor | None = None) -> None:
        self.scores, self.columns = scores, columns

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        scores = self.scores[token_ids]
        return DraftLogits(scores if self.columns is None else scores[..., self.columns], self.columns)


def random_scores(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def make_sampler(
    processors: Sequence[Any] = (), num_rows: int = NUM_DRAWS, texts: TokenHistory | None = None
) -> Sampler:
    read = processors if texts is None else read_processors(processors, texts, VOCAB)
    return Sampler(read, do_sample=True, row_seeds=row_seeds(0, num_rows, "cpu"), texts=texts)


def take_step(
    accept: Callable[..., Acceptance],
    sampler: Sampler,
    policy: StaticTree,
    target: Tensor,
    drafter: MarkovDrafter,
    roots: Tensor,
    positions: Tensor,
) -> Acceptance:
    seeds = None
    if accept is not accept_exact and accept is not accept_typical:
        seeds = derive_seeds(sampler.row_seeds, DRAFT_STREAM, positions)
    sampling = DraftSampling(warp=sampler.warp_draft, seeds=seeds, vocab_size=VOCAB)
    tree = policy.grow(drafter, None, roots, drafter.expand(None, roots[:, None], roots, 0), sampling)
    noise = sampler.draw_noise(positions, tree.path_width, VOCAB)
    return accept(sampler, tree, target[tree.token_ids], positions, noise=noise)


def draw_pairs(policy: StaticTree, target: Tensor, drafter: MarkovDrafter) -> tuple[Tensor, float]:
    """The first two tokens after ROOT, [NUM_DRAWS, 2], and the mean number of tokens of the first step."""
    sampler, zeros = make_sampler(), torch.zeros(NUM_DRAWS, dtype=torch.long)
    first = take_step(accept_by_rejection, sampler, policy, target, drafter, zeros + ROOT, zeros)
    second = take_step(accept_by_rejection, sampler, policy, target, drafter, first.next_tokens[:, 0], zeros + 1)
    second_token = torch.where(first.counts > 1, first.next_tokens[:, 1], second.next_tokens[:, 0])
    return torch.stack([first.next_tokens[:, 0], second_token], dim=1), first.counts.float().mean().item()


def compare(pairs: Tensor, target: Tensor) -> float:
    """`chi_square` of two tokens after ROOT."""
    chances = torch.softmax(target.double(), dim=-1)
    return chi_square(pairs, chances[ROOT, :, None] * chances)


def chi_square(pairs: Tensor, chances: Tensor) -> float:
    """Chi-square of pairs of tokens [N, 2] over its bound; chances: of each pair [V, V] float64."""
    seen = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).double()
    expected = chances.flatten() * len(pairs)
    assert seen[expected == 0].sum() == 0, "tokens that the target never says"
    is_large = expected >= 5
    seen, expected = (torch.cat([x[is_large], x[~is_large].sum()[None]]) for x in (seen, expected))
    is_possible = expected > 0
    statistic = ((seen - expected) ** 2 / expected)[is_possible].sum().item()
    return statistic / float(chi2.isf(FALSE_ALARM, int(is_possible.sum()) - 1))


def test_a_drafter_that_knows_fewer_tokens() -> None:
    target, drafter = random_scores(3), MarkovDrafter(random_scores(4), columns=torch.tensor([5, 1, 2]))
    pairs, _ = draw_pairs(StaticTree(WIDE), target, drafter)
    assert compare(pairs, target) < 1


class CandidateDrafter(MarkovDrafter):
    """Scores the three best tokens after each token only, in an order of their own (DFlash 2)."""

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        best, ids = self.scores[token_ids].topk(3, dim=-1)
        return DraftLogits(best.flip(-1), ids.flip(-1))


def test_a_drafter_with_other_candidates_at_each_node() -> None:
    target, drafter = random_scores(5), CandidateDrafter(random_scores(6))
    pairs, _ = draw_pairs(StaticTree(WIDE), target, drafter)
    assert compare(pairs, target) < 1


def test_siblings_behind_a_sharp_draft_are_judged_by_what_is_left_of_q() -> None:
    """Behind the likeliest token, q holds 1e-60: no float32, and yet the second child is drawn from it."""
    target, drafter = random_scores(20), MarkovDrafter(random_scores(21))
    drafter.scores[:, 0] += 140
    pairs, _ = draw_pairs(StaticTree([[0], [1], [2]]), target, drafter)
    assert compare(pairs, target) < 1


@pytest.mark.parametrize("gamma", [1, 4])
def test_tokens_per_step_of_token_rejection(gamma: int) -> None:
    """Independent tokens: (1 - alpha^(gamma + 1)) / (1 - alpha), alpha = sum of min(p, q) (arXiv 2211.17192, eq. 1)."""
    target, draft = (random_scores(seed)[:1].expand(VOCAB, -1).contiguous() for seed in (5, 6))
    p, q = torch.softmax(target[0], -1), torch.softmax(draft[0], -1)
    alpha = torch.minimum(p, q).sum().item()
    _, mean = draw_pairs(chain(gamma), target, MarkovDrafter(draft))
    expected = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert mean == pytest.approx(expected, abs=4 * gamma / math.sqrt(NUM_DRAWS))


def test_siblings_that_are_all_there_is_are_always_accepted() -> None:
    """Two tokens, both drafted: the second has all of what is left of p."""
    p, q = torch.full((2, VOCAB, VOCAB), -torch.inf)
    p[:, :2], q[:, :2] = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.2, 0.8]).log()
    _, mean = draw_pairs(StaticTree([[0], [1]]), p, MarkovDrafter(q))
    assert mean == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize(
    "processors", [[], [RepetitionPenaltyLogitsProcessor(2.0)], ["Recorder"]], ids=["none", "stock", "own"]
)
@pytest.mark.parametrize("rule", list(LOSSLESS))
def test_rows_do_not_depend_on_one_another(rule: str, processors: list[Any]) -> None:
    """Texts of different lengths, together and each by itself."""
    if processors == ["Recorder"]:
        processors = [Recorder()]
    num_rows = 24
    target, drafter = random_scores(22), MarkovDrafter(random_scores(23))
    policy = StaticTree(WIDE)
    positions = torch.arange(num_rows) % 3 + 1
    texts = [torch.randint(0, VOCAB, (1 + int(position),)).tolist() for position in positions]
    roots = torch.tensor([text[-1] for text in texts])
    sampler = make_sampler(processors, num_rows, texts=texts_of(texts))
    together = take_step(LOSSLESS[rule], sampler, policy, target, drafter, roots, positions)
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = make_sampler(processors, 1, texts=texts_of(texts[one]))
        alone.row_seeds = sampler.row_seeds[one]
        own = take_step(LOSSLESS[rule], alone, policy, target, drafter, roots[one], positions[one])
        assert own.next_tokens[0].tolist() == together.next_tokens[row].tolist()
        assert own.path[0].tolist() == together.path[row].tolist()
    assert len(set(together.counts.tolist())) > 1


class Recorder(LogitsProcessor):
    """Forbids the last token, and records every prefix."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.prefixes += input_ids.tolist()
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_processors_that_read_the_prefix() -> None:
    """A processor that may keep a state runs once per emitted token, on its own row's text."""
    num_rows = 300
    target, drafter = random_scores(14), MarkovDrafter(random_scores(15))
    processor = Recorder()
    roots = torch.arange(num_rows) % VOCAB
    texts = texts_of([[row, root] for row, root in enumerate(roots.tolist())], [3] * (num_rows - 1) + [0])
    sampler = make_sampler([processor], num_rows, texts=texts)
    sampler.groups[0][0]._of_row = lambda number: [processor]
    got = take_step(accept_by_rejection, sampler, StaticTree(WIDE), target, drafter, roots, roots * 0)
    emitted = {row: got.next_tokens[row, : got.counts[row]].tolist() for row in range(num_rows)}
    assert emitted[num_rows - 1] == []
    for row, tokens in emitted.items():
        text = [int(roots[row]), *tokens]
        assert all(one != other for one, other in itertools.pairwise(text))
        asked = sorted(prefix[1:] for prefix in processor.prefixes if prefix[0] == row)
        assert asked == sorted(text[: 1 + place] for place in range(len(tokens)))
    assert max(map(len, emitted.values())) == 3
    with pytest.raises(ValueError, match=r"Recorder may keep a state.*acceptance='exact' or 'rejection'"):
        take_step(accept_typical, sampler, chain(2), target, drafter, roots, roots * 0)


def test_typical_acceptance_equals_a_slow_reference() -> None:
    target, drafter, policy = random_scores(16), MarkovDrafter(random_scores(17)), StaticTree(WIDE)
    num_rows, epsilon, delta = 200, 0.15, 0.4
    sampler = make_sampler(num_rows=num_rows)
    roots = torch.arange(num_rows) % VOCAB
    sampling = DraftSampling(warp=sampler.warp_draft)
    tree = policy.grow(drafter, None, roots, drafter.expand(None, roots[:, None], roots, 0), sampling)
    noise = sampler.draw_noise(roots * 0, tree.path_width, VOCAB)
    got = accept_typical(sampler, tree, target[tree.token_ids], roots * 0, noise=noise, epsilon=epsilon, delta=delta)
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
    with pytest.raises(ValueError, match="acceptance is 'exakt'"):
        resolve_rule("exakt")
    with pytest.raises(ValueError, match="the tree is a DynamicTree"):
        RULES["rejection"].check(DynamicTree())
    with pytest.raises(ValueError, match="needs all siblings"):
        RULES["rejection"].check(StaticTree([[0], [2]]))


def test_typical_says_that_it_is_lossy(caplog: pytest.LogCaptureFixture) -> None:
    RULES["typical"].check(DynamicTree())
    assert "is lossy" in caplog.text


def test_only_exact_acceptance_lets_drafts_read_the_targets_noise() -> None:
    target = Target(tiny_target("llama", num_hidden_layers=1))
    for name, rule in RULES.items():
        step = Step(target, NgramDrafter(), chain(2), is_coupled=True, rule=rule)
        assert step.is_coupled == (name == "exact")
