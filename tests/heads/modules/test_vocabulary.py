"""The reduced draft vocabulary: which tokens are chosen, and the map between the two numberings."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from draftsmith.heads.modules.vocabulary import most_frequent_tokens, move_rows, principal_embeddings


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([0, 9, 2, 0, 5, 7], 3, [1, 4, 5]),
        ([3, 3, 3, 3], 2, [0, 1]),  # ties go to the lower id
        ([1, 2, 2, 0, 2], 2, [1, 2]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([0, 0, 1], 2, [0, 2]),  # unseen tokens fill up
    ],
)
def test_the_most_frequent_are_chosen(counts: list[int], size: int, expected: list[int]) -> None:
    assert most_frequent_tokens(torch.tensor(counts), size).tolist() == expected


@pytest.mark.parametrize("rank", [3, 8, 20])
def test_principal_embeddings_keep_what_tells_tokens_apart(rank: int) -> None:
    table = torch.randn(40, 2) @ torch.randn(2, 8) + 5.0  # all differences lie in a plane
    target = SimpleNamespace(embed_tokens=nn.Embedding.from_pretrained(table), vocab_size=40, device="cpu")
    found = principal_embeddings(target, rank)
    assert found.shape == (40, min(rank, 8))
    torch.testing.assert_close(found.square().mean(-1), torch.ones(40))
    centred = table - table.mean(0)
    angles = nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1)
    torch.testing.assert_close(
        nn.functional.cosine_similarity(found[:, None], found[None], dim=-1), angles, atol=1e-3, rtol=1e-3
    )


def test_rows_of_other_tokens_continue_the_map_of_the_old_ones() -> None:
    torch.manual_seed(0)
    table, fit = torch.randn(60, 8), torch.randn(8, 6)
    rows = table[:40] @ fit
    before, after = torch.arange(0, 40), torch.tensor([50, 3, 59, 58, *range(4, 40)])
    rows[3] += 1.0  # as learned, not as mapped
    moved = move_rows(rows, before, after, table)
    stays = after < 40
    assert torch.equal(moved[stays], rows[after[stays]])
    torch.testing.assert_close(moved[~stays], table[after[~stays]] @ fit, rtol=0.2, atol=0.3)
