"""Acceptance against a walk in plain Python that knows nothing of batches, depths or noise tables."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.inference.acceptance.exact import Acceptance, accept_exact
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.noise import gumbel_noise, row_seeds
from draftsmith.inference.request.processors import NO_TOKEN
from draftsmith.inference.trees.token_tree import TokenTree
from tests.inference.plain_passes import compute_depths
from tests.inference.ragged_texts import texts_of

VOCAB = 12


class PreviousToken:
    """Reads the prefix, records every prefix, and favours the successor of the last token."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape[0] == prefix.shape[0] == 1
        assert scores.dtype == torch.float32
        self.asked.append(prefix[0].tolist())
        favoured = (prefix[:, -1:] + 1) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 3.0, dtype=torch.float32))


def make_tree(logits: Tensor, sampler: Sampler, positions: Tensor, generator: torch.Generator) -> TokenTree:
    """A random tree whose nodes often, but not always, carry what the target draws at their parent; padding in row 1.

    Siblings carry distinct tokens, as drafters' candidates do.
    """
    batch, num_nodes, vocab = logits.shape
    token_ids = torch.randint(0, vocab, (batch, num_nodes), generator=generator)
    parents = torch.full((batch, num_nodes), -1)
    for row in range(batch):
        for node in range(1, num_nodes - (2 if row == 1 else 0)):
            parents[row, node] = torch.randint(max(0, node - 3), node, (), generator=generator)
    depths = compute_depths(parents)
    for row in range(batch):
        for node in range(1, num_nodes):
            parent = int(parents[row, node])
            if parent < 0:
                continue
            scores = sampler.process(logits[row, parent][None])[0].float()
            if sampler.row_seeds is not None:
                drawn_at = positions[row] + depths[row, parent] + 1
                scores = scores + gumbel_noise(sampler.row_seeds[row : row + 1], drawn_at.view(1, 1), vocab)[0, 0]
            taken = {int(token_ids[row, n]) for n in range(node) if int(parents[row, n]) == parent}
            wanted = int(scores.argmax()) if torch.rand((), generator=generator) < 0.7 else int(token_ids[row, node])
            while wanted in taken:
                wanted = (wanted + 1) % vocab
            token_ids[row, node] = wanted
    return TokenTree(token_ids, parents, depths, torch.zeros(batch, num_nodes), max_depth=int(depths.max()))


def walk_in_python(tree: TokenTree, row: int, draw: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """The path and the emitted tokens of one row; draw(node, depth) is the target's own token."""
    node, path, emitted = 0, [0], list[int]()
    while True:
        token = draw(node, len(emitted))
        emitted.append(token)
        children = [
            child
            for child in range(tree.num_nodes)
            if int(tree.parents[row, child]) == node and int(tree.token_ids[row, child]) == token
        ]
        if not children:
            return path, emitted
        node = children[0]
        path.append(node)


def check(acceptance: Acceptance, tree: TokenTree, draw: Callable[[int, int, int], int]) -> list[int]:
    """Compare every row; returns how many nodes were accepted."""
    width = tree.path_width
    assert acceptance.path.shape == acceptance.next_tokens.shape == (tree.token_ids.shape[0], width)
    counts = []
    for row in range(tree.token_ids.shape[0]):
        path, emitted = walk_in_python(tree, row, partial(draw, row))
        assert acceptance.counts[row] == len(path) == len(emitted)
        assert acceptance.path[row].tolist() == path + [0] * (width - len(path))
        assert acceptance.next_tokens[row].tolist() == emitted + [0] * (width - len(path))
        counts.append(len(path))
    return counts


PREFIX_FREE_CASES: list[tuple[bool, list[Any]]] = [
    (False, []),
    (False, [SuppressTokensLogitsProcessor([0, 3], device="cpu")]),
    (True, []),
    (True, [TemperatureLogitsWarper(0.7)]),
    (True, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(4), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]),
    (True, [TopPLogitsWarper(0.5), SuppressTokensLogitsProcessor([1], device="cpu"), LogitNormalization()]),
]


@pytest.mark.parametrize(("do_sample", "processors"), PREFIX_FREE_CASES, ids=range(len(PREFIX_FREE_CASES)))
def test_random_trees_equal_the_python_walk(do_sample: bool, processors: list[Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = row_seeds(7, 3, "cpu") if do_sample else None
    sampler = Sampler(LogitsProcessorList(processors), do_sample=do_sample, row_seeds=seeds)
    assert not sampler.is_lazy
    counts: list[int] = []
    for _ in range(12):
        logits = torch.randn(3, 10, VOCAB, generator=generator) * 2
        positions = torch.randint(0, 1000, (3,), generator=generator)
        tree = make_tree(logits, sampler, positions, generator)

        def draw(row: int, node: int, depth: int, logits: Tensor = logits, at: Tensor = positions) -> int:
            scores = logits[row, node][None]
            for processor in processors:
                scores = processor(None, scores)
            if seeds is not None:
                scores = scores + gumbel_noise(seeds[row : row + 1], at[row].view(1, 1) + depth + 1, VOCAB)[0]
            # The last case may forbid all that top-p has left.
            return int(scores.argmax()) if bool((scores > float("-inf")).any()) else NO_TOKEN

        acceptance = accept_exact(sampler, tree, logits, positions)
        counts += check(acceptance, tree, draw)
        noise = sampler.draw_noise(positions, tree.path_width + 2, VOCAB)  # a longer table, as policies use
        again = accept_exact(sampler, tree, logits, positions, noise=noise)
        assert torch.equal(again.path, acceptance.path)
        assert torch.equal(again.next_tokens, acceptance.next_tokens)
    assert {1, 2, 3, 4} <= set(counts)  # every depth was reached


def test_greedy_ties_go_to_the_first_token_in_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(1, 1, 50, dtype=dtype)
        logits[0, 0, [20, 30]] = 2.0
        tree = TokenTree.from_root(torch.tensor([1]))
        assert accept_exact(Sampler(), tree, logits, torch.tensor([0])).next_tokens.tolist() == [[20]]


def test_half_precision_logits_are_processed_in_float32() -> None:
    sampler = Sampler([TemperatureLogitsWarper(0.3)], do_sample=True, row_seeds=row_seeds(0, 1, "cpu"))
    logits = torch.randn(1, 1, 500).bfloat16()
    kept = logits.clone()
    tree = TokenTree.from_root(torch.tensor([1]))
    token = int(accept_exact(sampler, tree, logits, torch.tensor([4])).next_tokens)
    wanted = logits[0].float() / 0.3 + gumbel_noise(sampler.row_seeds, torch.tensor([[5]]), 500)[0]
    assert token == int(wanted.argmax())
    assert torch.equal(logits, kept)  # processors may write into what they get


@pytest.mark.parametrize(
    ("drafted", "eos", "num_new", "num_asked"),
    [(7, (6,), 9, 2), (7, (), 2, 2), (7, (), 0, 0), (7, (), 9, 4), (0, (), 9, 3)],
)
def test_a_processor_is_asked_once_per_emitted_token_in_order(
    drafted: int, eos: tuple[int, ...], num_new: int, num_asked: int
) -> None:
    """And stops where plain decoding does, or where the last draft is another token."""
    processor = PreviousToken()
    parents = torch.tensor([[-1, 0, 1, 2]])
    tree = TokenTree(torch.tensor([[4, 5, 6, drafted]]), parents, compute_depths(parents), torch.zeros(1, 4))
    sampler = Sampler([processor], eos_token_ids=eos, texts=texts_of([[9, 4]], [num_new]))
    acceptance = accept_exact(sampler, tree, torch.zeros(1, 4, 10), torch.tensor([1]))
    assert processor.asked == [[9, 4], [9, 4, 5], [9, 4, 5, 6], [9, 4, 5, 6, 7]][:num_asked]
    assert int(acceptance.counts) == num_asked
    assert acceptance.next_tokens[0].tolist() == [5, 6, 7, 8][:num_asked] + [0] * (4 - num_asked)


class TestSampler:
    def test_exact_types_alone_are_trusted(self) -> None:
        class ReadingTopK(TopKLogitsWarper):
            """Looks like TopK and reads the prefix."""

        assert not Sampler([TopKLogitsWarper(3)]).is_lazy
        assert Sampler([ReadingTopK(3)]).is_lazy

    def test_noise_belongs_to_the_drawn_tokens_position(self) -> None:
        seeds = row_seeds(0, 2, "cpu")
        noise = Sampler(do_sample=True, row_seeds=seeds).draw_noise(torch.tensor([10, 4]), 3, VOCAB)
        assert torch.equal(noise, gumbel_noise(seeds, torch.tensor([[11, 12, 13], [5, 6, 7]]), VOCAB))
        assert Sampler().draw_noise(torch.tensor([10]), 3, VOCAB) is None

    def test_drafts_are_warped_by_what_ignores_columns_and_prefix(self) -> None:
        processors = [
            RepetitionPenaltyLogitsProcessor(2.0),
            TemperatureLogitsWarper(0.5),
            SuppressTokensLogitsProcessor([0], device="cpu"),
            TopKLogitsWarper(2),
        ]
        logits = torch.tensor([[4.0, 3.0, 1.0]])
        sampling = Sampler(processors, do_sample=True, row_seeds=row_seeds(0, 1, "cpu"))
        assert sampling.warp_draft(logits).tolist() == [[8.0, 6.0, -torch.inf]]
        assert Sampler(processors).warp_draft(logits).tolist() == logits.tolist()
