"""TreePlanner: what one step teaches about smaller trees, and which tree the costs then call for."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, DraftLogits, DraftSampling, DynamicTree, generate
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.planning.accepted_lengths import AcceptedLengths
from draftsmith.inference.planning.costs import LEAST_AGE, MOST_AGE, StepCosts
from draftsmith.inference.planning.planner import COMPARED_STEPS, TreePlanner
from draftsmith.inference.trees.auto import AutoTree, gamma_chain
from draftsmith.inference.trees.token_tree import TokenTree
from tests.lossless.restless import auto_tree
from tests.params import slow_but
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target


def make_costs(planner: TreePlanner, *, node: float, level: float) -> StepCosts:
    """A plain step takes 1 second; a tree adds so much for each node and level."""
    trees = tuple(1.0 + node * (tree.num_nodes - 1) + level * tree.max_depth for tree in planner.trees)
    return StepCosts((64, 896), (1.0, 1.0), (1.0, 1.0), trees, tuple(tree.num_nodes for tree in planner.trees))


def plan(
    planner: TreePlanner, costs: StepCosts, chance: float, *, num_steps: int = 2000, seed: int = 0
) -> Counter[Any]:
    """How often each tree is drafted (None: plain decoding), when every depth is accepted with `chance`, whatever the
    number of nodes."""
    planner._by_rows = {1: costs}
    numbers, drafted = random.Random(seed), Counter[Any]()
    for _ in range(num_steps):
        tree = planner.choose(1, 100)
        drafted[tree] += 1
        luck = 0
        while numbers.random() < chance and luck < 10:
            luck += 1
        counted = [min(luck, other.max_depth) for other in planner.trees]
        planner.learn([counted if tree else []], [1])
    return drafted


@pytest.mark.parametrize(("chance", "level"), [(0.3, 0.05), (0.6, 0.1), (0.85, 0.05), (0.85, 0.3)])
def test_it_finds_the_best_chain(chance: float, level: float) -> None:
    planner = TreePlanner(gamma_chain(8))
    costs = make_costs(planner, node=0.0, level=level)
    drafted = plan(planner, costs, chance)
    rates = {None: 1.0}
    for index, tree in enumerate(planner.trees):
        rates[tree] = sum(chance**depth for depth in range(tree.max_depth + 1)) / costs.trees[index]
    tokens = sum(rates[tree] * number for tree, number in drafted.items()) / drafted.total()
    assert tokens > 0.96 * max(rates.values())


def test_a_batch_learns_from_its_slower_rows_and_as_many_outcomes_as_it_has_steps() -> None:
    planner = TreePlanner(gamma_chain(2))
    planner._by_rows = {4: make_costs(planner, node=0.0, level=0.05)}
    num_counted = 0
    for _ in range(160):
        tree = planner.choose(4, 100)
        num_counted += planner.is_counting
        slow, fast = [0, 0], [1, min(2, tree.max_depth) if tree else 0]
        planner.learn([fast, slow, fast, slow] if planner.is_counting else [[]] * 4, [3, 9, 3, 9])
    assert planner.accepted == [0.0, 0.0]
    assert 0 < num_counted <= 160 / 4 + 8


def test_rows_in_any_order_teach_the_same() -> None:
    taught = []
    for order in itertools.permutations(range(4)):
        planner = TreePlanner(gamma_chain(2))
        planner._by_rows = {4: make_costs(planner, node=0.0, level=0.05)}
        for _ in range(40):
            tree = planner.choose(4, 100)
            rows = [[0, 0], [1, 1], [1, 2], [1, 2]] if planner.is_counting and tree else [[]] * 4
            planner.learn([rows[place] for place in order], [(90, 40, 3, 2)[place] for place in order])
        taught.append(planner.accepted)
    assert taught[0] == [0.5, 0.5], "the two rows that had most to go"
    assert all(one == taught[0] for one in taught)


@pytest.mark.parametrize("period", [1, 3, 16])
def test_changes_of_rows_give_trials_no_more_time(period: int) -> None:
    """Rows join and leave a batch in which drafting gains nothing: it loses the share of the time that trials have."""
    planner, chance = TreePlanner(gamma_chain(8)), 0.05
    costs = make_costs(planner, node=0.0, level=0.1)
    planner._by_kind = {False: {1: costs, 9: costs}}
    numbers, tokens, seconds = random.Random(0), 0.0, 0.0
    for number in range(5000):
        if number % period == 0:
            planner.change(do_sample=False)
        num_rows = 1 + number // period % 9
        tree = planner.choose(num_rows, 100)
        if number > 500:  # after the first trials of all trees
            tokens += sum(chance**depth for depth in range(1 + (tree.max_depth if tree else 0)))
            seconds += 1.0 if tree is None else costs.trees[planner.trees.index(tree)]
        luck = next(depth for depth in itertools.count() if numbers.random() > chance)
        counted = [min(luck, other.max_depth) for other in planner.trees] if planner.is_counting else []
        planner.learn([counted] * num_rows, [1] * num_rows)
    assert seconds > 4499, "trees were tried now and then"
    assert tokens / seconds > 0.99


def test_a_choice_goes_on_when_rows_change_and_trials_wait_for_its_end() -> None:
    planner = TreePlanner(gamma_chain(2))
    planner._by_kind = {False: {size: make_costs(planner, node=0.0, level=0.1) for size in (1, 9)}}
    planner.change(do_sample=False)
    left = []
    for number in range(200):
        num_rows = 1 + number % 9
        tree = planner.choose(num_rows, 100)
        left.append(planner._steps_left)
        planner.learn([[1, 2] if planner.is_counting and tree else []] * num_rows, [1] * num_rows)
    assert left[-64:] == [*range(left[-64], -1, -1), *[*range(15, -1, -1)] * 4][:64]


class Clock:
    """A clock that runs only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        for name in ("planner.time.perf_counter", "costs.time.time"):
            monkeypatch.setattr(f"draftsmith.inference.planning.{name}", lambda: self.now)


@pytest.mark.parametrize(
    ("factor", "age", "again"),
    [
        (1.0, LEAST_AGE + 1, False),
        (1.2, LEAST_AGE + 1, False),
        (2.0, LEAST_AGE + 1, True),
        (0.5, LEAST_AGE + 1, True),
        (2.0, 0.0, False),  # they were measured a moment ago
        (1.0, MOST_AGE + 1, True),
    ],
)
def test_costs_are_measured_again_when_steps_take_another_time(
    factor: float, age: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that never drafts, in which one step of four is slowed down by other work. The second measurement has
    the same result, so steps differ for another reason, and there is no third one."""
    clock, doubted = Clock(monkeypatch), []
    decoder = Decoder(tiny_target("llama", num_hidden_layers=1), NgramDrafter(), tree=gamma_chain(2))
    planner: Any = decoder.choice

    def find(step: Any, batch_size: int, sampler: Any, doubted_costs: Any) -> StepCosts:
        doubted.append(set(doubted_costs))
        return StepCosts((64, 896), (1.0, 1.0), (9.0, 9.0), (9.0, 9.0), (2, 3), measured_at=clock.now)

    monkeypatch.setattr("draftsmith.inference.planning.planner.find_costs", find)
    planner.begin(decoder.step, Sampler(), 1)
    first = planner._by_rows[1]

    def decode_and_begin_anew() -> None:
        measured_at = planner._by_rows[1].measured_at
        for number in range(COMPARED_STEPS):
            assert planner.choose(1, 50) is None
            clock.now += factor * (3.0 if number % 4 else 1.0)
            planner.learn([[]], [1])
        clock.now = measured_at + age
        planner.begin(decoder.step, Sampler(), 1)

    decode_and_begin_anew()
    assert len(doubted) == 1 + again
    assert not doubted[0]
    assert (planner._by_rows[1] != first) == again
    if again and age < MOST_AGE:
        assert doubted[1] == {first}
    assert first not in planner._doubted or not again
    if age < MOST_AGE:
        decode_and_begin_anew()
        assert len(doubted) == 1 + again


def test_a_larger_tree_never_accepts_less_than_those_it_contains() -> None:
    """Also while only small trees are drafted, whose means fall one after another."""
    trees = auto_tree((1, 2, 4), (4, 8), (2, 4)).candidates
    lengths, numbers = AcceptedLengths(trees), random.Random(0)
    for index in range(len(trees)):
        lengths.learn(index, [[min(3, tree.max_depth) for tree in trees]] * 2)
    for _ in range(30):
        small = numbers.choice([i for i, tree in enumerate(trees) if tree.num_nodes == 4])
        lengths.learn(small, [[min(1, tree.max_depth) for tree in trees]])
        found = lengths.estimate(small)
        for tree, number in zip(trees, found, strict=True):
            assert all(number >= less - 1e-9 for other, less in zip(trees, found, strict=True) if tree.contains(other))


def test_a_tree_that_is_not_drafted_keeps_its_ratio_to_those_that_are() -> None:
    trees = gamma_chain(3).candidates
    lengths = AcceptedLengths(trees)
    lengths.learn(2, [[1, 2, 3], [1, 1, 1]] * 20)
    assert lengths.estimate(2) == pytest.approx([1.0, 1.5, 2.0])
    lengths.learn(0, [[1, 0, 0], [0, 0, 0]] * 200)
    assert lengths.estimate(0) == pytest.approx([0.5, 0.75, 1.0], abs=0.05)


def test_dear_nodes_make_small_trees() -> None:
    sizes = []
    for node in (0.001, 0.05):
        planner = TreePlanner(auto_tree((1, 2, 4), (4, 8, 24), (2, 4)))
        [(tree, _)] = plan(planner, make_costs(planner, node=node, level=0.05), 0.6).most_common(1)
        sizes.append(tree.num_nodes)
    assert sizes[0] >= sizes[1]
    assert sizes[1] <= 8


def test_drafting_that_does_not_gain_is_left_out() -> None:
    planner = TreePlanner(gamma_chain(4))
    drafted = plan(planner, make_costs(planner, node=0.0, level=0.5), 0.1, num_steps=4000)
    assert drafted[None] > 0.97 * drafted.total()


def test_drafting_comes_back_when_it_gains() -> None:
    planner = TreePlanner(gamma_chain(4))
    costs = make_costs(planner, node=0.0, level=0.1)
    plan(planner, costs, 0.02, num_steps=1000)
    drafted = plan(planner, costs, 0.9, num_steps=3000)
    assert drafted[None] < 0.5 * drafted.total()


def test_trees_that_looked_bad_at_first_are_tried_again() -> None:
    planner = TreePlanner(gamma_chain(8))
    costs = make_costs(planner, node=0.0, level=0.05)
    plan(planner, costs, 0.4, num_steps=100)
    drafted = plan(planner, costs, 0.9, num_steps=600)
    assert sum(number for tree, number in drafted.items() if tree and tree.max_depth >= 6) > 0.75 * drafted.total()


def test_trees_that_can_never_gain_are_never_tried() -> None:
    planner = TreePlanner(gamma_chain(2))
    assert set(plan(planner, make_costs(planner, node=0.0, level=3.0), 0.99)) == {None}


class TableDrafter(NgramDrafter):
    """Scores [V, V] by the last token."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def expand(self, state: Any, token_ids: Any, parents: Any, depth: Any) -> Any:
        return DraftLogits(self.table[token_ids])


def grow(tree: DynamicTree, table: torch.Tensor) -> TokenTree:
    drafter, root = TableDrafter(table), torch.zeros(1, dtype=torch.long)
    return tree.grow(drafter, None, root, drafter.expand(None, root[:, None], None, 0), DraftSampling())


def walk(tree: TokenTree, truth: torch.Tensor) -> list[int]:
    """The nodes along which the tree carries the truth."""
    path, node = [0], 0
    for token in truth.tolist():
        fits = [
            child
            for child in range(1, tree.num_nodes)
            if tree.parents[0, child] == node and tree.token_ids[0, child] == token
        ]
        if not fits:
            return path
        node = fits[0]
        path.append(node)
    return path


def test_one_step_tells_what_smaller_trees_would_have_accepted() -> None:
    """Against trees that are really grown from the same scores."""
    policy = auto_tree((1, 2, 3), (3, 5, 8), (1, 2, 4))
    vocab, generator = 12, torch.Generator().manual_seed(0)
    largest = DynamicTree(3, 4, 8)
    num_kept = num_wrong = 0
    for _ in range(40):
        table = torch.randn(vocab, vocab, generator=generator) * 2
        truth, last = [], 0
        for _ in range(4):
            last = int(table[last].topk(3).indices[torch.randint(3, (1,), generator=generator)])
            truth.append(last)
        tree, text = grow(largest, table), torch.tensor(truth)
        path = walk(tree, text)
        padded = torch.tensor([path + [0] * (4 - len(path))])
        [counted] = policy.count_accepted(tree, padded, torch.tensor([len(path)])).tolist()
        contained = [(one, number) for one, number in zip(policy.trees, counted, strict=True) if largest.contains(one)]
        assert len(contained) == len(policy.trees)
        for one, number in contained:
            accepted = len(walk(grow(one, table), text)) - 1
            if (one.max_depth, one.top_k) == (largest.max_depth, largest.top_k):
                assert number == accepted
            num_wrong += number != accepted  # of narrower and shallower trees it tells nearly all
        num_kept += sum(counted)
    assert num_kept > 40
    assert num_wrong < 0.08 * 40 * len(policy.trees)


def test_a_shrinking_batch_is_planned_with_the_costs_of_its_rows() -> None:
    planner = TreePlanner(gamma_chain(2))
    planner._by_rows = {1: StepCosts((1, 2), (1.0, 1.0), (1.0, 1.0), (2.0, 3.0), (2, 3))}
    planner._by_rows[5] = StepCosts((1, 2), (3.0, 3.0), (1.0, 1.0), (6.0, 9.0), (2, 3))
    assert planner._seconds(None, 5, 1) == 3.0
    assert planner._seconds(None, 3, 1) == 2.0
    assert planner._seconds(1, 2, 1) == 4.5


@pytest.mark.parametrize(
    "tree", slow_but({"auto"}, {"auto": auto_tree((1, 3), (4, 8), (2, 3)), "gamma": gamma_chain(3)})
)
def test_decoding_with_chosen_trees(tree: AutoTree) -> None:
    """Rows that end at different times, twice with one decoder."""
    model = tiny_target("llama", initializer_range=0.3)
    prompts = [random_prompt(length, seed=length) for length in (4, 11, 7)]
    options = {"max_new_tokens": 60, "do_sample": True, "seed": [1, 2, 3]}
    decoder = Decoder(model, NgramDrafter(), tree=tree)
    expected = generate(model, None, **pad_prompts(prompts), **options).sequences
    for _ in range(2):
        assert torch.equal(decoder.generate(**pad_prompts(prompts), **options).sequences, expected)


def test_no_trees_to_choose_from() -> None:
    with pytest.raises(ValueError, match="at least one DynamicTree"):
        AutoTree([])
    with pytest.raises(ValueError, match="at least 1 token"):
        gamma_chain(0)


def test_trees_are_cut_to_the_drafters_depth() -> None:
    limited = auto_tree((1, 2, 4), (4, 8), (2, 4)).limit_depth(2)
    assert limited.max_depth == 2
    assert len({(one.max_depth, one.num_nodes, one.num_scratch) for one in limited.candidates}) > 1
