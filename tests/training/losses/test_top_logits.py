"""The stored teacher of few numbers, against the whole distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference import Target
from tests.training.feature_cases import COLLATE, ROWS, store_rows
from tests.training.features.test_features import loss_and_gradients
from tests.training.run.test_trainer import make_heads
from training.features.sources import OnlineFeatures, StoredFeatures
from training.losses.top_logits import restore_logits, take_top_logits


def test_worked_example() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.5, 0.3, 0.2, 1e-9]]).log() + 5
    top = take_top_logits(logits, 2)
    wanted = torch.tensor([[0.5, 0.3, 0.1, 0.1]] * 2)
    torch.testing.assert_close(restore_logits(top, None, 4).softmax(-1), wanted)
    # Draft tokens 3 and 0: their columns of the same logits.
    found = restore_logits(top, torch.tensor([3, 0]), 4)
    torch.testing.assert_close(found, restore_logits(top, None, 4)[:, [3, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens_are_exact_and_the_rest_shares_what_is_left(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(20, 50) * 4).to(dtype)
    full = logits.float().softmax(-1)
    top = take_top_logits(logits, 8)
    found = restore_logits(top, None, 50)
    assert torch.equal(found.gather(1, top.token_ids), logits.gather(1, top.token_ids))
    p = (found.float() - top.log_sum_exp[:, None]).exp()
    is_top = torch.zeros(20, 50, dtype=torch.bool).scatter_(1, top.token_ids, True)
    rest = full.masked_fill(is_top, 0).sum(-1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(p[is_top], full[is_top], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        p[~is_top].view(20, 42), (rest / 42)[:, None].expand(20, 42), rtol=10 * tolerance, atol=1e-7
    )
    torch.testing.assert_close(p.sum(-1), torch.ones(20), rtol=0, atol=tolerance)


def test_nothing_left_by_rounding_is_a_tiny_chance() -> None:
    top = take_top_logits(torch.tensor([[80.0, 0.0, -1.0, -2.0]]), 2)
    found = restore_logits(top, None, 4)
    assert bool(found.isfinite().all())
    assert float(found[0, 2:].max()) <= 0.0  # no likelier than the last of the best


def test_all_tokens_are_the_teacher_itself(target: Target, tmp_path: Path) -> None:
    """K = V: loss and gradients equal the online ones, with a draft vocabulary and without the last state too."""
    store = store_rows(target, tmp_path, [1, 3, 5], teacher_top_k=target.vocab_size, store_last_hidden=False)
    assert "last" not in store.settings.tensors
    heads = make_heads(target, "eagle3", draft_vocab_size=40, feature_layers=[1, 3, 5])
    stored, online = (
        StoredFeatures(target, heads.feature_layers, store),
        OnlineFeatures(target, heads.feature_layers),
    )
    batch = stored.collator(COLLATE)(ROWS)
    read = loss_and_gradients(heads, stored(batch), batch, "distillation")
    computed = loss_and_gradients(heads, online(batch), batch, "distillation")
    for name, value in computed.items():
        torch.testing.assert_close(read[name], value, rtol=1e-5, atol=1e-7)
