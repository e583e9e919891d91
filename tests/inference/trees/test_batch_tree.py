"""Rows that share a budget of nodes: texts are those of plain decoding, and the nodes are the best of all rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Decoder, Drafter, NgramDrafter, SmallModelDrafter, Target, generate
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.targets.ragged import RaggedRows
from draftsmith.inference.trees.batch_tree import BatchTree, keep_nodes
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.node_costs import NodeCosts
from draftsmith.inference.trees.survival import GUESS, Survival
from draftsmith.inference.trees.token_tree import TokenTree
from tests.heads.tiny_heads import tiny_heads
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

    def note(rows: RaggedRows, widths: Tensor, num_nodes: int) -> None:
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


@pytest.mark.parametrize("family", slow_but({"gemma3", "qwen3"}, ["gemma3", "qwen3", "mistral", "gpt2", "mamba2"]))
def test_every_family_reads_ragged_rows_or_pads_them(
    family: str, packed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is trusted less than the one before, so that it gets fewer nodes."""
    predict = Survival.predict
    monkeypatch.setattr(Survival, "predict", lambda own, tree: _trust_less(predict(own, tree)))
    target = Target(tiny_target(family, initializer_range=0.3))
    inputs = pad_prompts([random_prompt(length, seed=length) for length in LENGTHS[:4]])
    plain = generate(target, None, **inputs, max_new_tokens=40, do_sample=False).sequences
    start = inputs["input_ids"].shape[1]
    texts = [torch.cat([random_prompt(n, seed=n)[0], row[start:]]) for n, row in zip(LENGTHS, plain, strict=False)]
    drafter = drafter_of("scripted", target, texts)
    output = Decoder(target, drafter, tree=BatchTree(), batch_invariant=False).generate(
        **inputs, max_new_tokens=40, do_sample=False
    )
    assert torch.equal(output.sequences, plain)
    assert bool(packed) == target.reads_ragged_rows


def _trust_less(survival: Tensor) -> Tensor:
    return survival ** (1.0 + torch.arange(len(survival)))[:, None]


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
    assert kept.widths is not None
    assert kept.widths.tolist() == [4, 2]
    assert kept.count_drafted() == [3, 1]


def test_survival_learns_from_verified_nodes() -> None:
    """Of two siblings that the drafter finds alike one is accepted each time; their child never is."""
    tree = TokenTree(
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[-1, 0, 0, 1]]),
        torch.tensor([[0, 1, 1, 2]]),
        torch.tensor([[0.0, -0.05, -0.05, -0.1]]),
    )
    survival = Survival(2, torch.device("cpu"))
    first = survival.predict(tree)[0].tolist()
    assert first == pytest.approx([1.0, GUESS[-1], GUESS[-1], GUESS[-1] ** 2])
    for _ in range(300):
        survival.learn(tree, torch.tensor([[0, 1, 0]]))
    rates = survival.predict(tree)[0].tolist()
    assert rates[1] == pytest.approx(0.5, abs=0.02)
    assert rates[3] < 0.02


def test_costs_are_a_line_through_times() -> None:
    costs = NodeCosts()
    assert costs.fixed(8) == 36.0
    for step in range(96):
        nodes = 4 + step % 17
        costs.learn(8, nodes, 60.0 + nodes if step % 20 else 900.0)
    assert costs.fixed(8) == pytest.approx(60.0, rel=0.1)
    assert costs.fixed(4) == 28.0


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
