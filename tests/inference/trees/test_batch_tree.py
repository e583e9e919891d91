"""Rows that share a budget of nodes: texts are those of plain decoding, and the nodes are the best of all rows."""

from dataclasses import replace
from statistics import median
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Decoder, Drafter, DynamicTree, NgramDrafter, SmallModelDrafter, Target, generate
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.targets.masks import plant
from draftsmith.inference.targets.ragged import RaggedRows
from draftsmith.inference.trees import node_costs
from draftsmith.inference.trees.batch_tree import BatchTree, keep_nodes
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.node_costs import NodeCosts
from draftsmith.inference.trees.survival import GUESS, ROUND, Survival
from draftsmith.inference.trees.token_tree import TokenTree
from tests.heads.tiny_heads import tiny_heads
from tests.lossless.restless import make_restless
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, target_of, tiny_target

LENGTHS = (3, 20, 9, 41, 5, 12, 6, 30)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each packed pass, its nodes and those of padded rows."""
    seen: list[tuple[int, int]] = []
    init = RaggedRows.__init__

    def note(rows: RaggedRows, widths: list[int], num_nodes: int) -> None:
        init(rows, widths, num_nodes)
        seen.append((len(rows.places), len(widths) * num_nodes))

    monkeypatch.setattr(RaggedRows, "__init__", note)
    return seen


def drafter_of(name: str, target: Target, texts: list[Tensor]) -> Drafter:
    if name == "scripted":
        return ScriptedDrafter(texts, VOCAB_SIZE)
    if name == "ngrams":
        return NgramDrafter()
    return SmallModelDrafter(target) if name == "oracle" else tiny_heads(name, target)


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", slow_but({"oracle", "ngrams", "eagle3"}, ["oracle", "ngrams", "eagle3", "mtp"]))
def test_texts_are_those_of_plain_decoding(
    name: str, options: dict[str, Any], num_rows: int, packed: list[tuple[int, int]]
) -> None:
    target = target_of("llama", initializer_range=0.3)
    inputs = pad_prompts([random_prompt(length, seed=length) for length in LENGTHS[:num_rows]])
    options = {**options, "max_new_tokens": 40, "seed": 5}
    plain = generate(target, None, **inputs, **options).sequences
    output = Decoder(target, drafter_of(name, target, []), tree=BatchTree()).generate(**inputs, **options)
    assert torch.equal(output.sequences, plain)
    assert output.stats.num_drafted > 0
    assert all(nodes < padded for nodes, padded in packed)


@pytest.mark.parametrize("family", slow_but({"gemma3", "qwen3"}, ["gemma3", "qwen3", "mistral", "gpt2"]))
def test_rows_of_different_sizes_are_read_as_one(
    family: str, packed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is trusted less than the one before, so that it gets fewer nodes. All of them are learned from."""
    predict, learn, noted = Survival.predict, Survival.learn, list[int]()
    monkeypatch.setattr(Survival, "predict", lambda own, tree: trust_less(predict(own, tree)))

    def note(survival: Survival, tree: TokenTree, path: Tensor) -> None:
        noted.append(int((tree.parents >= 0).sum()))
        learn(survival, tree, path)

    monkeypatch.setattr(Survival, "learn", note)
    target = Target(tiny_target(family, initializer_range=0.3))
    inputs = pad_prompts([random_prompt(length, seed=length) for length in LENGTHS[:4]])
    plain = generate(target, None, **inputs, max_new_tokens=40, do_sample=False).sequences
    start = inputs["input_ids"].shape[1]
    texts = [torch.cat([random_prompt(n, seed=n)[0], row[start:]]) for n, row in zip(LENGTHS, plain, strict=False)]
    decoder = Decoder(target, drafter_of("scripted", target, texts), tree=BatchTree())
    output = decoder.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert torch.equal(output.sequences, plain)
    assert packed
    assert output.stats.num_drafted == sum(noted) > 0
    assert len(noted) == output.stats.num_verify_passes


def trust_less(survival: Tensor) -> Tensor:
    return survival ** (1.0 + torch.arange(len(survival)))[:, None]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"acceptance": "typical"}),
        ("llama", {"batch_invariant": True}),
        ("llama", {"compile": True}),
        ("mamba2", {}),
        ("llama", {"drafter": ScriptedDrafter([], VOCAB_SIZE, can_copy_rows=False)}),
    ],
    ids=["typical", "batch-invariant", "compiled", "recurrent", "rows stay"],
)
def test_rows_share_no_budget_where_that_would_not_work(family: str, options: dict[str, Any]) -> None:
    options = {"drafter": NgramDrafter(), **options}
    decoder = Decoder(target_of(family), tree="auto", **options)
    assert decoder.step.batch_trees == ()
    assert decoder.planner is not None
    assert decoder.planner.policies == (None, *decoder.policy.candidates)
    with pytest.raises(ValueError, match="BatchTree, which needs exact acceptance, eager steps"):
        Decoder(target_of(family), tree=BatchTree(), **options)


@pytest.mark.parametrize("place", ["device", "planes"])
def test_rows_of_different_sizes_are_read_on_cpus_only(place: str) -> None:
    target = Target(tiny_target("llama"))
    assert target.reads_ragged_rows
    if place == "device":
        target.device = torch.device("meta")
    else:
        first, *others = target.capabilities.layer_specs
        assert first is not None
        elsewhere = replace(first, keys=replace(first.keys, device=torch.device("meta")))
        target.capabilities = replace(target.capabilities, layer_specs=(elsewhere, *others))
    assert not target.reads_ragged_rows


def test_auto_learns_from_the_steps_in_which_rows_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    times = list[tuple[int, int, float]]()
    monkeypatch.setattr(NodeCosts, "learn", lambda _, *args: times.append(args))
    target = target_of("llama", initializer_range=0.3)
    decoder = Decoder(target, SmallModelDrafter(target), tree="auto")
    planner = make_restless(decoder)
    decoder.generate(**pad_prompts([random_prompt(n, seed=n) for n in LENGTHS[:4]]), max_new_tokens=60, do_sample=False)
    assert decoder.policy.batch_tree in planner.taken
    rows, nodes, seconds = zip(*times, strict=True)
    assert max(rows) == 4
    assert max(nodes) > 4
    assert min(seconds) > 0.0


def test_decoders_learn_by_themselves() -> None:
    given, target = BatchTree(), target_of("llama")
    for tree in (given, CandidateTrees(batch_tree=given)):
        decoders = [Decoder(target, NgramDrafter(), tree=tree) for _ in range(2)]
        assert len({given, *(decoder.step.batch_trees[0] for decoder in decoders)}) == 3


def test_the_best_nodes_of_all_rows_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worked example of `BatchTree`."""
    monkeypatch.setattr(NodeCosts, "fixed", lambda *_: 4.0)
    survival = torch.tensor([[1.0, 0.9, 0.8, 0.7], [1.0, 0.3, 0.1, 0.0]])
    assert BatchTree().choose(survival).tolist() == [[True, True, True, True], [True, False, False, False]]


def test_kept_nodes_keep_their_parents() -> None:
    tree = TokenTree(
        torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]),
        torch.tensor([[-1, 0, 0, 2, 3], [-1, 0, 1, 1, 0]]),
        torch.tensor([[0, 1, 1, 2, 3], [0, 1, 2, 2, 1]]),
        torch.zeros(2, 5),
        max_depth=3,
    )
    kept = keep_nodes(tree, torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 0, 0]]).bool())
    assert kept.token_ids[0].tolist() == [5, 7, 8, 9]
    assert kept.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert kept.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert kept.widths == [4, 2]
    assert kept.num_read == 6
    assert kept.measure_depths() == [3, 1]
    even = keep_nodes(tree, torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool())
    assert even.num_read == 8
    assert replace(kept, token_ids=torch.zeros(4, 3), widths=[3, 3, 3, 2]).num_read == 12, "packing would not pay"


def test_survival_learns_from_verified_nodes() -> None:
    """Of three siblings the drafter's favourite is always accepted, never its child. The others' are not judged."""
    tree = TokenTree(
        torch.tensor([[1, 2, 3, 9, 4, 5]]),
        torch.tensor([[-1, 0, 0, 0, 1, 2]]),
        torch.tensor([[0, 1, 1, 1, 2, 2]]),
        torch.tensor([[0.0, -0.05, -0.05, -9.0, -0.1, -0.3]]),
    )
    survival = Survival(2)
    sure, likely = GUESS[-1], GUESS[-3]
    expected = [1.0, 1.0, 1.0, GUESS[0], sure**2, sure * likely]
    assert survival.predict(tree)[0].tolist() == pytest.approx(expected), "two of depth 1 are tried"
    survival.learn(tree, torch.tensor([[0, 1, 0]]))
    best, other = (8 * sure + 1) / 9, 8 * sure / 9
    expected = [1.0, best, other, 8 * GUESS[0] / 9, best, other]
    assert survival.predict(tree)[0].tolist() == pytest.approx(expected), "and those of depth 2"
    for _ in range(80):
        survival.learn(tree, torch.tensor([[0, 1, 0]]))
    best, other = (8 * sure + 81) / 89, 8 * sure / 89
    expected = [1.0, best, other, 8 * GUESS[0] / 89, best * other, other * likely]
    assert survival.predict(tree)[0].tolist() == pytest.approx(expected)


def test_survival_forgets() -> None:
    """In many rows a node is accepted for some steps, and then no more."""
    parents, zeros = torch.tensor([[-1, 0]]).repeat(64, 1), torch.zeros(64, 2)
    tree, survival = TokenTree(zeros.long(), parents, parents + 1, zeros), Survival(1)
    for place in (1, 0):
        for _ in range(30):
            survival.learn(tree, torch.tensor([[0, place]]).repeat(64, 1))
    assert survival.predict(tree)[0, 1] < 0.02


def draft(
    policy: BatchTree, score: float, num_rows: int, num_steps: int, *, is_right: bool, is_sampled: bool = False
) -> list[float]:
    """Drafts a path of four nodes, each of which has a sibling with the same log-probability; all of the path is right,
    or nothing. Returns how many nodes of a row were verified, step by step."""
    nodes = plant(torch.arange(9).repeat(num_rows, 1), [-1, 0, 0, 1, 1, 3, 3, 5, 5])
    drafted = TokenTree(nodes.token_ids, nodes.parents, nodes.depths, score * nodes.depths, max_depth=4)
    sampling, verified = DraftSampling(warp=(lambda scores: scores) if is_sampled else None), []
    for _ in range(num_steps):
        with patch.object(DynamicTree, "grow", return_value=drafted):
            tree = policy.grow(*[cast(Any, None)] * 4, sampling)
        is_path = ((tree.token_ids % 2 == 1) & (tree.parents >= 0)).tolist()
        paths = [[place for place, is_node in enumerate(row) if is_node and is_right] for row in is_path]
        path = torch.tensor([[0, *row, *[0] * (4 - len(row))] for row in paths])
        policy.learn(tree, path, 20.0 + 2 * num_rows + tree.num_read - num_rows)
        verified.append(tree.num_read / num_rows - 1)
    return verified


@pytest.mark.parametrize("num_rows", [2, 8, 16])
def test_what_seemed_hopeless_is_tried_again(num_rows: int) -> None:
    """At little cost, and greedy texts know nothing of sampled ones."""
    policy = BatchTree()
    hard = draft(policy, -0.05, num_rows, 4 * ROUND + 20, is_right=False, is_sampled=True)
    assert 0 < num_rows * sum(hard[-2 * ROUND :]) < 0.01 * 2 * ROUND * (20 + 2 * num_rows)
    assert min(draft(policy, -0.05, num_rows, 3, is_right=True)) >= 2
    assert min(draft(policy, -0.05, num_rows, 2 * ROUND, is_right=True, is_sampled=True)[-40:]) >= 4


@pytest.mark.parametrize("num_rows", [8, 16])
def test_a_drafter_without_confidence_is_tried(num_rows: int) -> None:
    """Its best nodes are right, and are told from their siblings."""
    verified = draft(BatchTree(), -1.4, num_rows, ROUND + 12, is_right=True)
    assert verified[12] >= 2
    assert verified[-1] == 4


def test_costs_are_a_line_through_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is drawn every eight steps; a clock that stands still tells nothing."""
    drawn = list[int]()
    monkeypatch.setattr(node_costs, "median", lambda times: drawn.append(1) or median(times))
    costs = NodeCosts()
    for _ in range(8):
        costs.learn(8, 5, 0.0)
    assert costs.fixed(8) == 36.0
    for step in range(200):
        nodes = 4 + step % 17
        costs.learn(8, nodes, 60.0 + nodes if step % 20 else 900.0)
    assert costs.fixed(8) == pytest.approx(60.0, rel=0.1)
    assert costs.fixed(4) == 28.0
    assert len(drawn) == 200 / 8


def test_auto_shares_a_budget_in_batches_only() -> None:
    policy = CandidateTrees()
    now = [0.0]
    assert policy.batch_tree is not None
    planner = Planner([*policy.candidates, policy.batch_tree], clock=lambda: now[0])

    def run(num_rows: int) -> list[Any]:
        taken = []
        for _ in range(300):
            taken.append(planner.choose(num_rows, 100))
            is_shared = taken[-1] is policy.batch_tree
            now[0] += 1.2 if is_shared else 1.0 if taken[-1] is None else 1.5
            planner.learn(taken[-1], [[1]] * num_rows if is_shared else [[0] * 5] * num_rows)
        return taken

    assert policy.batch_tree not in run(1)
    assert run(8)[-100:].count(policy.batch_tree) > 80
