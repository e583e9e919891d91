"""Documents that share rows: how they are grouped, and that a target reads each by itself."""

from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.heads.modules.documents import TOKENS_PER_GROUP, cut_lengths, gather_documents, split_documents
from draftsmith.inference import Target
from draftsmith.training.features.encoding import encode
from tests.tiny_targets import random_prompt, tiny_target

ROWS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 2, -1, -1]])


def cost_of(lengths: list[int], cuts: tuple[int, ...]) -> int:
    begins = (0, *cuts[:-1])
    return sum((end - begin) * lengths[end - 1] + TOKENS_PER_GROUP for begin, end in zip(begins, cuts, strict=True))


class TestCutting:
    @pytest.mark.parametrize("seed", range(2))
    def test_nothing_is_cheaper(self, seed: int) -> None:
        torch.manual_seed(seed)
        lengths = sorted((8 * torch.randint(1, 120, (9,))).tolist())
        all_cuts = [(*inner, 9) for count in range(9) for inner in combinations(range(1, 9), count)]
        assert cost_of(lengths, tuple(cut_lengths(lengths))) == min(cost_of(lengths, cuts) for cuts in all_cuts)


class TestSplitting:
    def test_the_worked_example(self) -> None:
        (group,) = split_documents(ROWS)
        assert [row[mask].tolist() for row, mask in zip(group.places, group.mask.bool(), strict=True)] == [
            [7], [3, 4], [5, 6], [0, 1, 2],
        ]  # fmt: skip
        assert group.mask.shape == (4, 8)

    def test_padding_repeats_the_documents_own_last_token(self) -> None:
        (group,) = split_documents(ROWS)
        assert group.places[1].tolist() == [3, 4, 4, 4, 4, 4, 4, 4]

    def test_what_is_read_is_what_is_gathered(self) -> None:
        values = torch.randn(2, 5, 3)
        groups = split_documents(ROWS)
        gathered = gather_documents(groups, [group.read(values) for group in groups], ROWS.shape)
        assert torch.equal(gathered, values * (ROWS >= 0)[..., None])

    @pytest.mark.parametrize("ids", [ROWS, torch.full((1, 4), -1)])
    def test_a_given_number_of_groups_whatever_the_documents(self, ids: Tensor) -> None:
        groups = split_documents(ids, num_groups=3)
        assert len(groups) == 3
        assert sum(int(group.mask.sum()) for group in groups) == int((ids >= 0).sum())
        assert all(group.places.min() >= 0 and group.places.max() < ids.numel() for group in groups)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "gpt_oss"])
def test_a_target_reads_each_document_as_if_it_were_alone(family: str) -> None:
    """Longer and shorter than a window of 8 tokens, and in two groups."""
    target = Target(tiny_target(family))
    lengths = [21, 5, 180, 12, 9]
    documents = [random_prompt(length, seed=length)[0] for length in lengths]
    rows = [torch.cat(documents[:2]), torch.cat(documents[2:])]
    ids = [torch.arange(len(part)).repeat_interleave(torch.tensor(part)) for part in (lengths[:2], lengths[2:])]
    document_ids = pad_sequence(ids, batch_first=True, padding_value=-1)
    assert len(split_documents(document_ids)) == 2
    encoded = encode(
        target,
        pad_sequence(rows, batch_first=True),
        (document_ids >= 0).long(),
        feature_layers=[1, 3],
        document_ids=document_ids,
    )
    found = zip(
        (*encoded.features[0, :26].split([21, 5]), *encoded.features[1].split([180, 12, 9])),
        (*encoded.last_hidden[0, :26].split([21, 5]), *encoded.last_hidden[1].split([180, 12, 9])),
        strict=True,
    )
    for document, (features, last_hidden) in zip(documents, found, strict=True):
        alone = encode(target, document[None], torch.ones_like(document)[None], feature_layers=[1, 3])
        torch.testing.assert_close(features, alone.features[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last_hidden, alone.last_hidden[0], rtol=1e-4, atol=1e-4)
    assert not encoded.features[0, 26:].any()
