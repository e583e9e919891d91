"""Targets that count, and trees whose drafts are right to a given depth."""

import itertools

import pytest
import torch

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Decoder, DynamicTree
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.scripts.benchmarks.counting import ScriptedTree, make_counting_target, make_random_heads, script_tree

CPU = torch.device("cpu")


def test_the_worked_example_of_a_scripted_tree() -> None:
    drafted = TokenTree(
        torch.tensor([[7, 3, 8, 4, 9]]),
        torch.tensor([[-1, 0, 0, 1, 2]]),
        torch.tensor([[0, 1, 1, 2, 2]]),
        torch.zeros(1, 5),
    )
    tree = script_tree(drafted, torch.tensor(2), 100)
    assert tree.token_ids.tolist() == [[7, 8, 9, 4, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 1]]
    nothing = script_tree(drafted, torch.tensor(0), 100)
    assert nothing.token_ids.tolist() == [[7, 3, 7, 4, 9]], "8 would have been right"


@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(sorted(HEAD_TYPES), itertools.cycle([torch.float32, torch.bfloat16]), strict=False)]
)
def test_every_kind_accepts_as_many_tokens_as_one_asks(kind: str, dtype: torch.dtype) -> None:
    """Beyond the last token the target counts on from 0."""
    target = make_counting_target("tiny", dtype, CPU)
    heads = make_random_heads(kind, target)
    tree = DynamicTree(min(4, heads.max_depth or 4), 3, 8)
    script = ScriptedTree(tree, target.vocab_size, CPU)
    decoder = Decoder(target, heads, tree=script)
    for length in (one for one in (1, 2, 4) if one <= 1 + script.most_right):
        script.num_right.fill_(length - 1)
        output = decoder.generate(torch.arange(505)[None], max_new_tokens=1 + 3 * length)
        assert output.sequences[0].tolist() == [place % 512 for place in range(506 + 3 * length)]
        assert output.stats.acceptance_length == length
