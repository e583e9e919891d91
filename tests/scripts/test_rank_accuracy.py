"""The measured accuracy of each rank against a loop over single positions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.scripts.build_tree import measure_rank_accuracy
from draftsmith.training.features.encoding import encode
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.params import slow_but
from tests.tiny_targets import VOCAB_SIZE, random_prompt, target_of

LENGTHS = (18, 11)  # the second row is padded
NUM_RANKS = 16


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


def make_batch(seed: int) -> dict[str, Tensor]:
    input_ids = random_prompt(max(LENGTHS), seed=seed, batch_size=len(LENGTHS))
    attention_mask = torch.zeros_like(input_ids)
    loss_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(LENGTHS):
        attention_mask[row, :length] = 1
        loss_mask[row, 2:5] = 1
        loss_mask[row, 7:length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}


# By default all slots, and drawn ones, of all tokens and of a vocabulary of their own.
QUICK = {"medusa-0", "eagle3-1", "block-0", "parallel-1"}


@pytest.mark.parametrize(("head_type", "overrides"), slow_but(QUICK, dict(zip(VARIANT_IDS, VARIANTS, strict=True))))
def test_equals_a_loop_over_positions(
    head_type: str, overrides: dict[str, Any], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny_heads(head_type, target, **overrides)
    batches = [make_batch(seed) for seed in range(3)]
    token_ids = list(range(VOCAB_SIZE)) if heads.draft_token_ids is None else heads.draft_token_ids.tolist()
    hits: dict[int, list[int]] = {}
    positions: dict[int, int] = {}
    for batch in batches:
        for row, length in enumerate(LENGTHS):
            ids, loss_mask = batch["input_ids"][row : row + 1, :length], batch["loss_mask"][row]
            with torch.no_grad():
                encoded = encode(target, ids, torch.ones_like(ids), feature_layers=heads.feature_layers)
                steps = heads.unroll_where(encoded.features, ids, loss_mask[None, :length])
            for depth, step in enumerate(steps):
                slots = range(length) if step.slots is None else step.slots[0].tolist()
                for place, slot in enumerate(slots):
                    if slot < 0 or slot + step.shift >= length or not loss_mask[slot + step.shift]:
                        continue
                    wanted = int(target.lm_head(encoded.last_hidden[0, slot + step.shift - 1]).argmax())
                    scores = step.score(step.hidden[0, place])
                    ranking = scores.argsort(descending=True)[: min(NUM_RANKS, scores.isfinite().sum())].tolist()
                    positions[depth] = positions.get(depth, 0) + 1
                    counts = hits.setdefault(depth, [0] * NUM_RANKS)
                    for rank, column in enumerate(ranking):
                        counts[rank] += token_ids[column] == wanted
    expected = torch.tensor(
        [[count / positions[depth] for count in hits[depth]] for depth in sorted(hits)], dtype=torch.float64
    )
    assert (expected.sum(1) > 0).all(), "every depth must hit something for this test to mean anything"

    # Chunks of three rows, the last one smaller; and one chunk for all.
    for elements in (3 * len(token_ids), 2**25):
        monkeypatch.setattr("draftsmith.training.losses.teacher.CHUNK_ELEMENTS", elements)
        assert torch.equal(measure_rank_accuracy(heads, batches, num_ranks=NUM_RANKS), expected)


def test_ranks_beyond_the_draft_vocabulary_are_never_right(target: Target) -> None:
    heads = tiny_heads("eagle3", target, draft_vocab_size=4)
    accuracy = measure_rank_accuracy(heads, [make_batch(0)], num_ranks=6)
    assert accuracy.shape[1] == 6
    assert not accuracy[:, 4:].any()


def test_a_depth_without_positions_is_refused(target: Target) -> None:
    heads = tiny_heads("medusa", target, num_heads=2)
    batch = make_batch(0)
    batch["loss_mask"][:, 3:] = 0  # token 2 is the first that depth 1 predicts, and before those of depth 2
    with pytest.raises(ValueError, match="give conversations with longer replies"):
        measure_rank_accuracy(heads, [batch], num_ranks=2)
