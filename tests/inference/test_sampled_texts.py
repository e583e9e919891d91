"""Chi-square of sampled texts against the target's exact distribution, through generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chi2

from inference import DraftLogits, DynamicTree, StaticTree, TreePolicy, chain, generate
from inference.noise import gumbel_noise
from inference.rejection import accept_by_rejection
from tests.tiny_targets import tiny_target

VOCAB, NUM_ROWS, FALSE_ALARM = 6, 20_000, 1e-6
TREES: dict[str, TreePolicy] = {
    "chain": chain(2),
    "static": StaticTree([[0], [1], [0, 0], [1, 0]]),
    "dynamic": DynamicTree(2, 3, 8),
}
CASES = [
    ("exact", "chain"),
    ("exact", "static"),
    ("exact", "dynamic"),
    ("rejection", "chain"),
    ("rejection", "static"),
    ("block_verification", "chain"),
]
PROMPT = torch.tensor([[2, 5, 3]])


class FixedDrafter:
    """Gives every node the same distribution, whatever the text: rows disagree with it, and with each other, often."""

    feature_layers: tuple[int, ...] = ()
    max_depth: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.scores = torch.linspace(0, 2, vocab_size)

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None:
        return None

    def extend(self, state: None, features: None, next_token_ids: Any, counts: Any, *, max_slots: int) -> DraftLogits:
        return DraftLogits(self.scores.expand(next_token_ids.shape[0], 1, -1))

    def expand(self, state: None, token_ids: Any, parents: Any, depth: int) -> DraftLogits:
        return DraftLogits(self.scores.expand(token_ids.shape[0], 1, -1))


def measure(acceptance: str, tree: str, **options: Any) -> float:
    """Chi-square of the second and third new token together, as a share of its bound."""
    model = tiny_target("llama", vocab_size=VOCAB, initializer_range=0.3, pad_token_id=0, bos_token_id=1)
    output = generate(
        model,
        FixedDrafter(VOCAB),
        PROMPT.expand(NUM_ROWS, -1),
        tree=TREES[tree],
        acceptance=acceptance,
        seed=11,
        max_new_tokens=3,
        do_sample=True,
        top_k=0,
        **options,
    )
    assert sum(output.stats.accepted_histogram[1:]) > NUM_ROWS / 10
    new = output.sequences[:, 3:]

    def probabilities(input_ids: torch.Tensor) -> torch.Tensor:
        return torch.softmax(model(input_ids).logits[:, -1] / options["temperature"], -1)

    with torch.no_grad():
        first = probabilities(PROMPT)[0]
        second = probabilities(torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1))
        pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
        third = probabilities(torch.cat([PROMPT.expand(VOCAB**2, -1), pairs], 1)).view(VOCAB, VOCAB, VOCAB)
    expected = (first[:, None, None] * second[:, :, None] * third).sum(0).flatten() * NUM_ROWS
    observed = torch.bincount(new[:, 1] * VOCAB + new[:, 2], minlength=VOCAB**2).float()
    is_large = expected >= 5
    observed = torch.cat([observed[is_large], observed[~is_large].sum()[None]])
    expected = torch.cat([expected[is_large], expected[~is_large].sum()[None].clamp(min=1e-9)])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic / float(chi2.isf(FALSE_ALARM, df=len(expected) - 1))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize(("acceptance", "tree"), CASES)
def test_texts_have_the_targets_distribution(acceptance: str, tree: str, temperature: float) -> None:
    assert measure(acceptance, tree, temperature=temperature) < 1


def test_noise_that_is_too_small_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """15% less noise: a temperature that is too low."""
    monkeypatch.setattr("inference.acceptance.gumbel_noise", lambda *args: 0.85 * gumbel_noise(*args))
    assert measure("exact", "dynamic", temperature=1.3) > 1


def test_drafts_that_are_accepted_too_easily_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform draws a tenth too small."""
    import inference.rejection as rejection

    usual = rejection._uniforms
    monkeypatch.setattr(rejection, "_uniforms", lambda *args: 0.9 * usual(*args))
    assert accept_by_rejection is rejection.accept_by_rejection
    assert measure("rejection", "chain", temperature=1.3) > 1
