"""Drafting steps: reading ahead, and packed batches, in which documents that share rows learn as in rows of their
own."""

from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.heads import DraftHeads, DraftStep
from draftsmith.inference import Target
from draftsmith.training.features.encoding import TargetStates
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, compute_loss, tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

LENGTHS = [9, 14, 5, 3, 60]  # those of the last are in a group of their own; the third and fourth have few losses


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target("llama", vocab_size=200))  # more than tokens in a batch


class Batch:
    """Documents in rows: `layout` names those of each row. Two of three tokens have a loss, a document's first too."""

    def __init__(self, layout: list[list[int]]) -> None:
        documents = [random_prompt(length, seed=length)[0] for length in LENGTHS]
        shape = (len(layout), 2 + max(sum(LENGTHS[d] for d in row) for row in layout))
        self.input_ids, self.loss_mask = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        self.document_ids = torch.full(shape, -1)
        self.owners = torch.full(shape, -1)  # which of LENGTHS a token belongs to
        for row, names in enumerate(layout):
            start = 0
            for index, name in enumerate(names):
                part = slice(start, start := start + LENGTHS[name])
                self.input_ids[row, part] = documents[name]
                self.loss_mask[row, part] = (torch.arange(LENGTHS[name]) % 3 != 1).long()
                self.document_ids[row, part] = index
                self.owners[row, part] = name


ALONE = Batch([[0], [1], [2], [3], [4]])
PACKED = Batch([[2, 1, 0], [3, 4]])


def make_states(heads: DraftHeads, target: Target, batch: Batch) -> TargetStates:
    """Those of a token are the same in every batch that it is in."""
    width = len(heads.feature_layers) * target.hidden_size
    drawn = [torch.randn(length, width, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    features = torch.zeros(*batch.input_ids.shape, width)
    for name, values in enumerate(drawn):
        features[batch.owners == name] = values
    return TargetStates(features, features[..., -target.hidden_size :])


# Neighbours differ in how documents are grouped and depths are weighted: each kind has both.
@pytest.mark.parametrize(
    ("head_type", "overrides", "num_groups", "depth_weights"),
    [(*variant, *((None, None), (7, "d_pace"))[index % 2]) for index, variant in enumerate(VARIANTS)],
    ids=VARIANT_IDS,
)
def test_loss_and_gradients_are_those_of_rows_of_their_own(
    head_type: str, overrides: dict[str, Any], num_groups: int | None, depth_weights: str | None, target: Target
) -> None:
    results = []
    for batch, options in ((ALONE, {}), (PACKED, {"document_ids": PACKED.document_ids, "num_groups": num_groups})):
        heads = tiny_heads(head_type, target, **overrides)
        states = make_states(heads, target, batch)
        options |= {"loss_type": heads.default_loss, "depth_weights": depth_weights}
        output = compute_loss(heads, states, batch.input_ids, batch.loss_mask, **options)
        output.loss.backward()
        gradients = {name: parameter.grad for name, parameter in heads.named_parameters()}
        results.append((output, gradients))
    (alone, expected), (packed, found) = results
    torch.testing.assert_close(packed.loss, alone.loss)
    for name in ("loss_sums", "top1", "top5", "positions"):
        torch.testing.assert_close(torch.stack(getattr(packed, name)), torch.stack(getattr(alone, name)))
    assert all(total > 0 for total in alone.loss_sums)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


class TestReadAhead:
    def test_stops_at_the_end_of_a_document_and_of_a_row(self) -> None:
        """Rows [0 0 1 1] and [1 1 1 -]: neighbouring documents of two rows may carry one number."""
        ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, -1]])
        slots = torch.tensor([[0, 1, 2, 3, 4, 5, 6, -1]])
        step = DraftStep(2, torch.zeros(1, 8, 4), nn.Identity(), slots=slots, document_ids=ids)
        values = torch.arange(8).view(2, 4)
        assert step.read_ahead(values, 1, fill=-9).tolist() == [[1, -9, 3, -9, 5, 6, -9, -9]]
        assert step.read_ahead(values, 2, fill=-9).tolist() == [[-9, -9, -9, -9, 6, -9, -9, -9]]
        assert step.read_ahead(values, 0, fill=-9).tolist() == [[0, 1, 2, 3, 4, 5, 6, -9]]
