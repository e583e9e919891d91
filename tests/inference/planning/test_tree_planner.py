"""TreePlanner: what one step teaches about every smaller tree, and which tree the costs then call for."""

from __future__ import annotations

import random

import pytest
import torch

from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import CostModel
from inference.planning.tree_planner import FIRST_PLAIN_STEPS, MAX_SLEEP_STEPS, NO_TREE, Plan, TreePlanner
from inference.trees.token_tree import TokenTree

DEPTHS, SIZES, WIDTHS = (1, 2, 4), (4, 8, 16), (2, 4)


def make_costs(
    *,
    node: float = 0.0,
    level: float = 0.0,
    wide: float = 0.0,
    extend: float = 0.0,
    plain: float = 1.0,
    contexts: tuple[int, ...] = (8,),
) -> CostModel:
    sizes = (1, *SIZES)
    row = tuple(plain + node * (size - 1) for size in sizes)
    return CostModel(contexts, sizes, (row,) * len(contexts), extend, 0.0, WIDTHS, (level, level + wide), 0.0, 0.0)


def make_planner() -> TreePlanner:
    return TreePlanner(AutoTree(DEPTHS, SIZES, WIDTHS))


def count_best(planner: TreePlanner, accepted: int, needed_width: int = 1) -> list[int]:
    """What each plan accepts when every accepted node is the best of its level and all, drafted from a width on."""
    return [min(accepted, plan.depth) if plan.width >= needed_width else 0 for plan in planner.plans[1:]]


def run(
    planner: TreePlanner, costs: CostModel, chance: float, *, num_steps: int, seed: int = 0, needed_width: int = 1
) -> list[Plan | None]:
    """A world in which each depth is accepted with `chance`. The accepted node is always its level's best one, and no
    beam narrower than `needed_width` drafts it."""
    coin = random.Random(seed)
    plans: list[Plan | None] = []
    for _ in range(num_steps):
        if not planner.is_drafting:
            planner.pass_step()
            plans.append(None)
            continue
        plan = planner.choose(costs, 8, [0.6])
        accepted = 0
        while accepted < plan.depth and plan.width >= needed_width and coin.random() < chance:
            accepted += 1
        planner.learn(plan, [0.6], [accepted], [count_best(planner, accepted, needed_width)], costs, 8)
        plans.append(plan)
    return plans


def test_one_step_tells_what_smaller_trees_would_have_accepted() -> None:
    # root; a, b at depth 1; c (child of a), d (child of b) at depth 2; e (child of d) at depth 3; one node of padding.
    tree = TokenTree(
        torch.tensor([[9, 1, 2, 3, 4, 5, 0]]),
        torch.tensor([[-1, 0, 0, 1, 2, 4, -1]]),
        torch.tensor([[0, 1, 1, 2, 2, 3, 0]]),
        torch.tensor([[0.0, -2.0, -1.0, -2.5, -1.5, -1.6, -torch.inf]]),
        widths=torch.tensor([[1, 1, 1, 2, 1, 1, 1]]),
    )
    policy = AutoTree(depths=(1, 2, 3), sizes=(2, 3, 4, 5), widths=(1, 2))

    def count(path: list[int], num_real: int) -> dict[Plan, int]:
        counted = policy.count_accepted(tree, torch.tensor([path]), torch.tensor([num_real]))
        return dict(zip(policy.plans, counted[0].tolist(), strict=True))

    # Scores fall from b over d, e and a to c.
    counts = count([0, 2, 4, 5], 4)
    assert counts[Plan(3, 4, 1)] == 3
    assert counts[Plan(2, 4, 1)] == 2
    assert counts[Plan(2, 3, 1)] == 2, "two drafted nodes: b and d"
    assert counts[Plan(1, 2, 1)] == 1
    counts = count([0, 1, 3, 0], 3)
    assert counts[Plan(1, 2, 1)] == 0, "b alone is drafted"
    assert counts[Plan(1, 3, 1)] == 1
    assert counts[Plan(3, 5, 2)] == 1, "c is the fifth of five, behind a"
    assert counts[Plan(2, 5, 2)] == 2, "without e, it is the fourth"
    assert counts[Plan(2, 4, 2)] == 1, "of three drafted nodes, a is the last"
    assert counts[Plan(2, 4, 1)] == 1, "a beam of one does not draft c at all"
    assert set(count([0, 2, 4, 5], 1).values()) == {0}, "nothing was accepted; the rest of the path is padding"
    assert set(count([0, 2, 4, 5], 0).values()) == {0}, "a finished row"


def test_free_drafts_are_deep_and_dear_levels_are_few() -> None:
    last = run(make_planner(), make_costs(), 0.8, num_steps=200)[-1]
    assert last is not None
    assert (last.depth, last.num_nodes) == (4, 16), "of any width: here all cost the same"
    dear_levels = run(make_planner(), make_costs(level=0.6), 0.5, num_steps=200)
    assert {plan.depth for plan in dear_levels[100:] if plan} <= {1, 2, 4}
    assert sum(plan == NO_TREE or (plan is not None and plan.depth == 1) for plan in dear_levels[100:]) > 80


def test_the_width_is_chosen() -> None:
    """Wide levels are dearer; they are drafted where what is accepted needs them."""
    for needed, expected in ((1, 2), (4, 4)):
        plans = run(make_planner(), make_costs(level=0.02, wide=0.2), 0.8, num_steps=200, needed_width=needed)
        drafted = [plan for plan in plans[100:] if plan is not None and plan.depth > 1]
        assert sum(plan.width == expected for plan in drafted) > 80, needed


def test_dear_nodes_make_small_trees() -> None:
    plans = run(make_planner(), make_costs(node=0.05), 0.7, num_steps=200)
    assert sum(plan is not None and plan.num_nodes > 8 for plan in plans[100:]) < 10


def test_the_clock_corrects_the_costs() -> None:
    """Costs that make drafting look cheap, while its steps take twice as long: in the end nobody asks the drafter."""
    costs, planner = make_costs(extend=0.05), make_planner()
    num_drafted = 0
    for _ in range(1000):
        if planner.is_drafting:
            plan = planner.choose(costs, 8, [0.6])
            accepted = int(num_drafted % 2 == 0 and plan.depth > 0)
            planner.learn(
                plan, [0.6], [accepted], [count_best(planner, accepted)], costs, 8, 2.0 * costs.step_seconds(plan, 8)
            )
            num_drafted += 1
        else:
            planner.pass_step()
            planner.learn_plain(costs, 8, costs.plain_seconds(8))
    assert num_drafted < 200


def test_plain_steps_are_timed_before_drafting_is_judged() -> None:
    """A drafter that gains a third by the costs loses by the clock: plain steps take half of what the costs say."""
    costs, planner = make_costs(extend=0.5), make_planner()
    num_drafted = 0
    for step in range(400):
        if planner.is_drafting:
            assert step >= FIRST_PLAIN_STEPS
            plan = planner.choose(costs, 8, [0.6])
            accepted = int(plan.depth > 0)
            planner.learn(
                plan, [0.6], [accepted], [count_best(planner, accepted)], costs, 8, costs.step_seconds(plan, 8)
            )
            num_drafted += 1
        else:
            planner.pass_step()
            planner.learn_plain(costs, 8, 0.5 * costs.plain_seconds(8))
    assert num_drafted < 80


class Careful(TreePlanner):
    """Sees to it that the outcome of a probe is that of the probe."""

    num_probes = 0

    def _settle(self) -> None:
        if self._is_probe:
            assert len(self._records) == 1
            self.num_probes += 1
        super()._settle()


def test_a_probe_is_judged_by_itself() -> None:
    """In the loop's own order: a step is learned from when the next one has been begun."""
    planner, costs = Careful(AutoTree(DEPTHS, SIZES, WIDTHS)), make_costs(node=0.02, level=0.1, extend=0.2)
    coin, last = random.Random(0), None
    for step in range(6000):
        is_drafting = planner.is_drafting
        if last is not None:
            plan, accepted = last
            planner.learn(plan, [0.6], [accepted], [count_best(planner, accepted)], costs, 8)
            last = None
        if is_drafting:
            plan = planner.choose(costs, 8, [0.6])
            accepted, chance = 0, 0.9 if step // 300 % 2 else 0.0
            while accepted < plan.depth and coin.random() < chance:
                accepted += 1
            last = plan, accepted
        else:
            planner.pass_step()
    assert planner.num_probes > 20


def test_plain_steps_are_timed_again() -> None:
    """They took twice as long while the first were timed; since then drafting, which seemed to gain half, loses."""
    costs, planner = make_costs(extend=0.6), make_planner()
    num_drafted, num_plain = 0, 0
    for _ in range(6000):
        if planner.is_drafting:
            plan = planner.choose(costs, 8, [0.6])
            accepted = int(plan.depth > 0 and num_drafted % 4 == 0)
            planner.learn(
                plan, [0.6], [accepted], [count_best(planner, accepted)], costs, 8, costs.step_seconds(plan, 8)
            )
            num_drafted += 1
        else:
            planner.pass_step()
            planner.learn_plain(costs, 8, (2.0 if num_plain < FIRST_PLAIN_STEPS else 1.0) * costs.plain_seconds(8))
            num_plain += 1
    assert 8 < num_drafted < 1000


def test_other_costs_make_seconds_known_so_far_meaningless() -> None:
    """A batch of eight, then a row alone with steps an eighth as long."""
    planner = make_planner()
    for costs in (make_costs(plain=8.0), make_costs(plain=1.0)):
        planner.begin_text(costs)
        for _ in range(FIRST_PLAIN_STEPS):
            planner.pass_step()
        for _ in range(53):
            plan = planner.choose(costs, 8, [0.6])
            planner.learn(plan, [0.6], [1], [count_best(planner, 1)], costs, 8, costs.step_seconds(plan, 8))
    assert planner.seconds.of_plan(planner.largest, costs, 8) == pytest.approx(costs.step_seconds(planner.largest, 8))
    assert planner._spent.value < 2


def test_hostile_text_stops_drafting_and_easy_text_starts_it_again() -> None:
    planner, costs = make_planner(), make_costs(node=0.02, level=0.1, extend=0.2)
    hostile = run(planner, costs, 0.0, num_steps=2000)
    asked = [plan for plan in hostile if plan is not None]
    assert len(asked) / len(hostile) < 0.05
    longest = max(len(part) for part in "".join("x" if plan is None else " " for plan in hostile).split())
    assert longest == MAX_SLEEP_STEPS
    easy = run(planner, costs, 0.9, num_steps=400)
    assert sum(plan is not None for plan in easy[-200:]) > 190


def test_the_best_fixed_plan_is_nearly_reached() -> None:
    """Tokens a second within 5% of the best single plan's, in worlds from hostile to easy."""
    costs = make_costs(node=0.02, level=0.12, extend=0.15)
    for chance in (0.05, 0.3, 0.6, 0.9):
        planner = make_planner()
        run(planner, costs, chance, num_steps=300)
        tokens = seconds = 0.0
        for plan in run(planner, costs, chance, num_steps=3000, seed=1):
            tokens += 1 + (sum(chance**depth for depth in range(1, plan.depth + 1)) if plan else 0)
            seconds += costs.plain_seconds(8) if plan is None else costs.step_seconds(plan, 8)
        best = max(
            [1 / costs.plain_seconds(8)]
            + [
                (1 + sum(chance**depth for depth in range(1, plan.depth + 1))) / costs.step_seconds(plan, 8)
                for plan in planner.plans
            ]
        )
        assert tokens / seconds > 0.95 * best, f"chance {chance}: {tokens / seconds:.3f} of {best:.3f}"


def test_trees_nobody_could_draft_are_refused() -> None:
    with pytest.raises(ValueError, match="no tree has"):
        TreePlanner(AutoTree((4,), (3,)))


@pytest.mark.parametrize("wrong", [{"depths": ()}, {"sizes": (1,)}, {"depths": (0, 2)}, {"widths": (0,)}])
def test_auto_tree_refuses_what_is_no_tree(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        AutoTree(**wrong)  # type: ignore[arg-type]


def test_auto_tree_keeps_to_the_drafters_depth() -> None:
    limited = AutoTree((1, 2, 4, 6)).limit_depth(3)
    assert isinstance(limited, AutoTree)
    assert limited.depths == (1, 2, 3)


def test_rows_leave_and_drafting_begins_to_pay() -> None:
    """Of many rows, nodes are too dear to draft; of the last ones they are nearly free: nobody sleeps on, and no row of
    the next batch is drafted for at the last ones' prices."""
    many, few = make_costs(node=1.0, plain=2.0), make_costs(node=0.01)
    planner = make_planner()
    planner.begin_text(many)
    assert all(plan is None or plan.num_nodes < 16 for plan in run(planner, many, 0.8, num_steps=400)), "5 tokens in 17"
    for _ in range(3):
        planner.change_costs(many, 8)
        while planner.is_drafting:
            run(planner, many, 0.0, num_steps=1)
        assert planner._asleep > 1
        planner.change_costs(few, 8)
        planner.pass_step()
        assert planner.is_drafting
        plans = run(planner, few, 0.8, num_steps=60)
        assert sum(plan is not None and plan.num_nodes > 4 for plan in plans) > 40
        planner.begin_text(many)


def test_steps_made_so_far_count_with_what_they_would_take_now() -> None:
    planner, many, few = make_planner(), make_costs(plain=8.0, extend=0.8), make_costs(plain=1.0, extend=0.1)
    planner.begin_text(many)
    run(planner, many, 0.8, num_steps=100)
    rate = planner._tokens.value / planner._spent.value
    planner.change_costs(few, 8)
    assert planner._tokens.value / planner._spent.value == pytest.approx(8 * rate)
    planner.begin_text(many)
    assert planner._tokens.value / planner._spent.value == pytest.approx(rate), (
        "the next batch begins where this one did"
    )
