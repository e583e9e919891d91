"""Processors that read the text, at every node of random trees, against transformers' classes for each text."""

import re
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.generation import logits_process as stock

from draftsmith.inference.request.text_processors import OccurrencePenalties, TextProcessor, read_processors
from draftsmith.inference.targets.masks import compute_ancestors
from draftsmith.inference.trees.token_tree import TokenTree
from tests.inference.plain_passes import compute_depths
from tests.inference.ragged_texts import texts_of
from tests.params import slow_but

VOCAB, NUM_ROWS, NUM_NODES, NUM_TREES, LONGEST = 7, 50, 6, 400, 9
HIGHEST = VOCAB + 1  # the target knows a token more than its scores have columns
PADDING = torch.randint(0, LONGEST, (NUM_ROWS,), generator=torch.Generator().manual_seed(5))
BIASES = {(3,): 1.5, (1, 2): -0.7, (2, 2): 0.1, (0, 2): 0.3, (4, 1, 2): float("-inf"), (5, 5, 5, 6): 2.0, (6,): -1.0}

# One processor for all rows, or one of the batch, cut to a row by the second function.
PROCESSORS: dict[str, Any] = {
    "repetition": stock.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition below 1": stock.RepetitionPenaltyLogitsProcessor(0.7, prompt_ignore_length=2),
    "n-grams of 1": stock.NoRepeatNGramLogitsProcessor(1),
    "n-grams of 2": stock.NoRepeatNGramLogitsProcessor(2),
    "n-grams of 3": stock.NoRepeatNGramLogitsProcessor(3),
    "biases": stock.SequenceBiasLogitsProcessor(BIASES),
    "bad words": stock.NoBadWordsLogitsProcessor([[1], [2, 3], [4, 0, 4], [0, 0], [5]], eos_token_id=5),
    "minimum": stock.MinLengthLogitsProcessor(7, [2, 40]),
    "new minimum": stock.MinNewTokensLengthLogitsProcessor(4, 3, torch.tensor([1, 5])),
    "first": stock.ForcedBOSTokenLogitsProcessor(3),
    "last": stock.ForcedEOSTokenLogitsProcessor(8, [1, 4]),
    "occurrences": OccurrencePenalties(presence=0.7, frequency=-1.5, begin=torch.tensor(4)),
}
with suppress(ValueError):  # older releases know one number for all rows
    PROCESSORS["repetition, padded"] = stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=PADDING)


def penalise_occurrences(text: Tensor, scores: Tensor) -> Tensor:
    counts = text[0, 4:].bincount(minlength=HIGHEST)[:VOCAB]
    return scores - -1.5 * counts - 0.7 * (counts > 0)


def of_row(processor: Any, row: int) -> Any:
    """transformers' own processor for one row of the batch."""
    if isinstance(processor, OccurrencePenalties):
        return penalise_occurrences
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        return stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=int(PADDING[row]))
    return processor


def make_tree(generator: torch.Generator) -> TokenTree:
    parents = torch.full((NUM_ROWS, NUM_NODES), -1)
    for node in range(1, NUM_NODES):  # one node in ten is padding
        drawn = torch.randint(0, node, (NUM_ROWS,), generator=generator)
        is_node = torch.rand(NUM_ROWS, generator=generator) < 0.9
        is_node &= (drawn == 0) | (parents.gather(1, drawn[:, None])[:, 0] >= 0)
        parents[:, node] = torch.where(is_node, drawn, -1)
    token_ids = torch.randint(0, HIGHEST, (NUM_ROWS, NUM_NODES), generator=generator)
    return TokenTree(token_ids, parents, compute_depths(parents), torch.zeros(NUM_ROWS, NUM_NODES))


def make_scores(*shape: int, generator: torch.Generator) -> Tensor:
    """With zeros, ties and tokens that another processor has forbidden."""
    scores = torch.randn(*shape, VOCAB, generator=generator).mul(4).round(decimals=2)
    return scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.1, float("-inf"))


def path_of(tree: TokenTree, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, int(tree.token_ids[row, node]))
        node = int(tree.parents[row, node])
    return path if node == 0 else []  # padding has the root's text


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older classes fail at ids beyond the vocabulary, and read texts shorter than a sequence differently",
)
# By default without the longer n-grams.
@pytest.mark.parametrize(
    "name", slow_but({name for name in PROCESSORS if not re.search("of [23]", name)}, list(PROCESSORS))
)
def test_all_nodes_of_random_trees_get_transformers_scores(name: str) -> None:
    generator, processor, num_changed = torch.Generator().manual_seed(1), PROCESSORS[name], 0
    for _ in range(NUM_TREES // NUM_ROWS):
        lengths = torch.randint(1, LONGEST, (NUM_ROWS,), generator=generator).tolist()
        rows = [torch.randint(0, HIGHEST, (length,), generator=generator).tolist() for length in lengths]
        tree, texts = make_tree(generator), texts_of(rows, junk=3)
        scores = make_scores(NUM_ROWS, NUM_NODES, generator=generator)
        (own,) = read_processors([processor], texts, VOCAB)
        assert isinstance(own, TextProcessor)
        got = own(texts.at_nodes(tree.token_ids, tree.depths, compute_ancestors(tree.parents)), scores.flatten(0, 1))
        for row in range(NUM_ROWS):
            alone = of_row(processor, row)
            for node in range(NUM_NODES):
                text = torch.tensor([rows[row] + path_of(tree, row, node)])
                expected = alone(text, scores[row, node][None].clone())[0]
                assert torch.equal(got[row * NUM_NODES + node], expected), (rows[row], node)
                num_changed += not torch.equal(expected, scores[row, node])
    assert num_changed > NUM_TREES / 10


def test_tokens_that_the_target_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary size"):
        read_processors([stock.NoBadWordsLogitsProcessor([[VOCAB]])], texts_of([[0]]), VOCAB)
