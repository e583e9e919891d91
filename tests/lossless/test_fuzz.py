"""Random decoders on random batches: every row gets the text it gets by itself, or differs at a demonstrated near-tie.

The cases are the same each time. LOSSLESS_EXAMPLES is how many (`make lossless` runs more), and each LOSSLESS_SEED has
others.
"""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from draftsmith.inference import DynamicTree, StaticTree, TreePolicy, chain
from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.candidates import CandidateTrees, gamma_chain
from draftsmith.inference.trees.dynamic import ROOT_FACTOR
from tests.lossless.matrix.cases import Call, Case, run_case
from tests.lossless.matrix.drafters import DRAFTERS
from tests.lossless.matrix.references import SAMPLING, Row, attentions_of, do_sample
from tests.tiny_targets import FAMILIES

NUM_EXAMPLES = int(os.environ.get("LOSSLESS_EXAMPLES", "8"))
SEED = 1_000_000 * int(os.environ.get("LOSSLESS_SEED", "0"))
NEW_TOKENS = 20
# Few prompts, so that examples share their references; some begin alike.
ROWS = tuple(
    Row(length, index, shared)
    for index, (length, shared) in enumerate(
        [(1, 0), (2, 0), (7, 0), (8, 4), (9, 4), (17, 4), (30, 0), (33, 20), (40, 20), (64, 20)]
    )
)
MAX_DEPTH = 4  # every drafter of the matrix goes so deep


@st.composite
def static_trees(draw: st.DrawFn, *, has_all_ranks: bool) -> TreePolicy:
    """Trees of up to 14 nodes, grown node by node; without `has_all_ranks`, better siblings may be missing."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 13))):
        parent = draw(st.sampled_from([(), *(path for path in paths if len(path) < MAX_DEPTH)]))
        taken = {path[-1] for path in paths if path[:-1] == parent}
        free = [rank for rank in range(5) if rank not in taken]
        if free:
            paths.append((*parent, free[0] if has_all_ranks else draw(st.sampled_from(free))))
    return StaticTree(paths)


def dynamic_trees() -> st.SearchStrategy[TreePolicy]:
    return st.builds(
        DynamicTree, st.integers(1, MAX_DEPTH), st.integers(1, 5), st.integers(2, 30), root_factor=st.integers(1, 3)
    )


@st.composite
def auto_trees(draw: st.DrawFn) -> TreePolicy:
    """Up to 5 nested trees; rows may share a budget of the last one's nodes where it has the width of a `BatchTree`."""
    top_k, root_factor = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_trees = draw(st.integers(1, 5))
    depths, sizes = (
        sorted(draw(st.lists(st.integers(*limits), min_size=num_trees, max_size=num_trees)))
        for limits in ((1, MAX_DEPTH), (2, 30))
    )
    pairs = zip(depths, sizes, strict=True)
    trees = [DynamicTree(depth, top_k, size, root_factor=root_factor) for depth, size in pairs]
    return CandidateTrees(trees, BatchTree(depths[-1], top_k, sizes[-1]) if root_factor == ROOT_FACTOR else None)


CHAINS: st.SearchStrategy[TreePolicy] = st.integers(1, MAX_DEPTH).map(chain)
GAMMAS: st.SearchStrategy[TreePolicy] = st.integers(1, MAX_DEPTH).map(gamma_chain)


@st.composite
def policies(draw: st.DrawFn, drafter: str, acceptance: str) -> TreePolicy:
    if acceptance == "rejection":
        return draw(CHAINS if drafter == "staged" else st.one_of(CHAINS, static_trees(has_all_ranks=True)))
    if drafter == "staged":
        return draw(st.one_of(CHAINS, GAMMAS))
    return draw(st.one_of(CHAINS, static_trees(has_all_ranks=False), dynamic_trees(), auto_trees(), GAMMAS))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    rows = tuple(draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=6)))
    max_new_tokens = draw(st.integers(1, NEW_TOKENS))
    ends = st.tuples(st.integers(0, len(rows) - 1), st.integers(0, max_new_tokens - 1))
    return Call(rows, tuple(draw(st.lists(ends, max_size=2))), max_new_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(FAMILIES))
    sampling = draw(st.sampled_from(list(SAMPLING)))
    # Sampled, the other rules keep the distribution at most, not the text.
    others = ["exact uncoupled"] if do_sample(sampling) else ["rejection", "typical"]
    acceptance = draw(st.sampled_from(["exact", *others]))
    # Half of the examples with the one that reaches everything.
    drafter = draw(st.one_of(st.just("scripted"), st.sampled_from(DRAFTERS)))
    return Case(
        family,
        tuple(draw(st.lists(calls(), min_size=1, max_size=2))),
        attention=draw(st.sampled_from(attentions_of(family))),
        drafter=drafter,
        policy=draw(policies(drafter, acceptance)),
        acceptance=acceptance,
        sampling=sampling,
        padding=draw(st.sampled_from(["left", "right"])),
        prefill_chunk=draw(st.sampled_from([1, 3, 8, 32, 512])),
        ranks=tuple(draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 9]), min_size=1, max_size=8))),
        text_length=NEW_TOKENS,
        seed=draw(st.integers(0, 2)),
    )


def check(case: Case) -> None:
    note(describe(case))
    run_case(case)


def describe(case: Case) -> str:
    """With the shape of its tree, of which there is no repr."""
    policy: Any = case.policy
    shape = policy.paths if isinstance(policy, StaticTree) else vars(policy)
    return f"{case}\nwith the tree {type(policy).__name__} {shape}"


# What random cases have found, made as small as it gets.


def test_a_right_padded_row_repeats_no_bigram_across_its_prompts_end() -> None:
    """The prompt's last token comes again, and the first new token must not follow it a second time."""
    run_case(
        Case(
            "qwen2",
            (Call((Row(7, 31), Row(30, 6)), max_new_tokens=NEW_TOKENS),),
            drafter="none",
            policy="none",
            sampling="greedy, no repeated bigram",
            padding="right",
            text_length=NEW_TOKENS,
        )
    )


def test_random_cases() -> None:
    """Each case is a run of its own, of the simplest example and a random one: within a run hypothesis makes examples
    out of earlier ones, so that a hundred would be of few families. A failing case is still made smaller."""
    for number in range(NUM_EXAMPLES):
        run = settings(
            max_examples=2,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(given(cases())(check))
        seed(SEED + number)(run)()
