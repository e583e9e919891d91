"""Merged drafters: sums of chances against dictionaries, weights against a slow update, and the text that stays."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import DynamicTree, Target, generate
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.merged import (
    MIN_WEIGHT,
    MergedDrafter,
    chance_of,
    find_columns,
    merge_drafts,
    to_chances,
)
from draftsmith.inference.drafters.ngram import NgramDrafter
from tests.heads.tiny_heads import tiny_heads
from tests.lossless.near_tie import assert_same_text
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

B, W, V = 2, 3, 24


def make_draft(form: str, seed: int, *, is_shared: bool = False) -> DraftLogits:
    """Random scores over all tokens, a reduced vocabulary, or a few tokens of each node, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    width = 1 if is_shared else W
    if form == "all":
        return DraftLogits(torch.randn(B, width, V, generator=generator))
    if form == "reduced":
        ids = torch.randperm(V, generator=generator)[:13]
        return DraftLogits(torch.randn(B, width, 13, generator=generator), ids)
    ids = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(B * width)]).view(B, width, 5)
    logits = torch.randn(B, width, 5, generator=generator)
    logits[0, 0, 3:] = -math.inf
    ids[0, 0, 3:] = 0  # as empty columns of n-grams are
    logits[1, -1] = -math.inf
    return DraftLogits(logits, ids, confidence=torch.rand(B, width, generator=generator))


def to_dict(draft: DraftLogits, chances: Tensor, row: int, node: int) -> dict[int, float]:
    """Token -> chance at one node; columns without one are left out."""
    chances = chances.expand(B, W, -1)[row, node]
    ids = torch.arange(V) if draft.token_ids is None else draft.token_ids
    ids = ids if ids.dim() == 1 else ids.expand(B, W, -1)[row, node]
    found: dict[int, float] = {}
    for token, chance in zip(ids.tolist(), chances.tolist(), strict=True):
        if chance > 0:
            assert token not in found, f"token {token} stands in two columns"
            found[token] = chance
    return found


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(["all", "reduced", "few"], repeat=2)))
def test_chances_are_added_by_token(first: str, second: str, is_shared: bool) -> None:
    drafts = make_draft(first, 0, is_shared=is_shared), make_draft(second, 1)
    chances = [to_chances(draft) * weight for draft, weight in zip(drafts, (0.3, 0.7), strict=True)]
    merged = merge_drafts(drafts[0], chances[0], drafts[1], chances[1])
    for row in range(B):
        for node in range(W):
            wanted: dict[int, float] = {}
            for draft, own in zip(drafts, chances, strict=True):
                for token, chance in to_dict(draft, own, row, node).items():
                    wanted[token] = wanted.get(token, 0.0) + chance
            got = to_dict(merged, merged.logits.exp(), row, node)
            assert got == pytest.approx(wanted, abs=1e-6)


def test_the_docstrings_example() -> None:
    a, b, c = 5, 6, 7
    chances = torch.tensor([[[0.3, 0.2]]]), torch.tensor([[[0.4, 0.1]]])
    drafts = [
        DraftLogits(values.log(), ids)
        for values, ids in zip(chances, (torch.tensor([a, b]), torch.tensor([[[b, c]]])), strict=True)
    ]
    merged = merge_drafts(drafts[0], chances[0], drafts[1], chances[1])
    assert merged.token_ids is not None
    assert merged.token_ids.tolist() == [[[a, b, b, c]]]
    torch.testing.assert_close(merged.logits.exp(), torch.tensor([[[0.3, 0.6, 0.0, 0.1]]]))


def test_tokens_are_found_without_comparing_all_columns() -> None:
    """Two drafters with thousands of columns at each node; the slow comparison would take gigabytes."""
    columns, wanted = (torch.stack([torch.randperm(40000)[:20000] for _ in range(3)])[None] for _ in range(2))
    chances = torch.rand(1, 3, 20000).round(decimals=1)  # some are 0
    column, is_known = find_columns(columns, chances, wanted)
    for node in range(3):
        pairs = zip(columns[0, node].tolist(), chances[0, node].tolist(), strict=True)
        places = {token: place for place, (token, chance) in enumerate(pairs) if chance > 0}
        assert column[0, node].tolist() == [places.get(token, 0) for token in wanted[0, node].tolist()]
        assert is_known[0, node].tolist() == [token in places for token in wanted[0, node].tolist()]


def test_confidence_scales_chances() -> None:
    draft = DraftLogits(torch.zeros(1, 2, 4), confidence=torch.tensor([[0.5, 0.0]]))
    assert to_chances(draft).tolist() == [[[0.125] * 4, [0.0] * 4]]
    few = DraftLogits(torch.zeros(1, 1, 2), torch.tensor([[[9, 3]]]))
    assert [float(chance_of(few, torch.tensor([token]))) for token in (3, 9, 4)] == [0.5, 0.5, 0.0]


@dataclass
class FixedDrafter(Drafter):
    """Says the same at every node; -inf at all for rows in `is_silent`."""

    logits: Tensor
    is_silent: tuple[bool, ...] = (False, False)
    feature_layers: tuple[int, ...] = ()
    max_depth: int | None = None

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None:
        return None

    def extend(self, state: None, features: Tensor | None, *_: Any, **__: Any) -> DraftLogits:
        self.features = features
        logits = self.logits.repeat(len(self.is_silent), 1, 1)
        return DraftLogits(logits.masked_fill(torch.tensor(self.is_silent)[:, None, None], -math.inf))

    def expand(self, state: None, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        return DraftLogits(self.logits.repeat(token_ids.shape[0], 1, 1))


def test_weights_follow_what_comes() -> None:
    """Row 0: by expectation maximisation; row 1, where one drafter is silent, and rows that wait: not at all."""
    chances = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    first, second = FixedDrafter(chances[0].log()), FixedDrafter(chances[1].log(), is_silent=(False, True))
    drafter = MergedDrafter(first, second, weight=0.25, rate=0.2)
    state = drafter.start(2, 16, 4)
    weights = [0.75, 0.25]
    for step, (token, count) in enumerate([(2, 3), (2, 1), (0, 1), (2, 0), (1, 2)]):
        tokens = torch.tensor([[token, 0, 0], [token, 0, 0]])
        draft = drafter.extend(state, None, tokens, torch.tensor([count, count]), max_slots=16)
        if step > 0 and count > 0:  # nothing was said before the first step
            shares = [weight * float(chance[token]) for weight, chance in zip(weights, chances, strict=True)]
            weights = [0.8 * old + 0.2 * credit / sum(shares) for old, credit in zip(weights, shares, strict=True)]
        assert state.weights is not None
        torch.testing.assert_close(state.weights, torch.tensor([weights, [0.75, 0.25]]))
        mixture = weights[0] * chances[0] + weights[1] * chances[1]
        torch.testing.assert_close(draft.logits[0, 0].exp(), mixture)
        torch.testing.assert_close(draft.logits[1, 0].softmax(-1), chances[0])


def test_weights_reach_a_floor_and_may_be_fixed() -> None:
    right, wrong = FixedDrafter(torch.tensor([0.0, -9.0])), FixedDrafter(torch.tensor([-9.0, 0.0]))
    tokens, counts = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, dtype=torch.long)
    for rate, wanted in ((0.2, MIN_WEIGHT), (0.0, 0.5)):
        drafter = MergedDrafter(right, wrong, rate=rate)
        state = drafter.start(2, 128, 4)
        for _ in range(100):
            drafter.extend(state, None, tokens, counts, max_slots=128)
        assert state.weights is not None
        assert state.weights[:, 1].tolist() == pytest.approx([wanted] * 2, abs=1e-3)


def test_each_drafter_gets_the_features_it_asked_for() -> None:
    first, second, third = (FixedDrafter(torch.zeros(3), feature_layers=layers) for layers in ((4, 1), (1, 2), ()))
    drafter = MergedDrafter(MergedDrafter(first, second), third)
    assert drafter.feature_layers == (4, 1, 2)
    features = torch.arange(2 * 5 * 6.0).view(2, 5, 6)
    tokens, counts = torch.zeros(2, 5, dtype=torch.long), torch.tensor([5, 5])
    drafter.extend(drafter.start(2, 8, 4), features, tokens, counts, max_slots=5)
    assert torch.equal(first.features, features[..., :4])  # type: ignore[arg-type]
    assert torch.equal(second.features, features[..., 2:])  # type: ignore[arg-type]
    assert third.features is None


def test_depths_and_refusals() -> None:
    one, other = FixedDrafter(torch.zeros(3), max_depth=3), FixedDrafter(torch.zeros(3))
    assert (MergedDrafter(one, other).max_depth, MergedDrafter(other, other).max_depth) == (3, None)
    assert isinstance(MergedDrafter(one, other), Drafter)
    for options in ({"weight": 0.0}, {"weight": 1.0}, {"rate": 1.0}, {"rate": -0.1}):
        with pytest.raises(ValueError, match="allowed are weights between 0 and 1 and rates"):
            MergedDrafter(one, other, **options)


def scripted(texts: list[Tensor]) -> MergedDrafter:
    """Two drafters, of which exactly one is right at each place, with features of their own."""
    return MergedDrafter(
        ScriptedDrafter(texts, VOCAB_SIZE, ranks=(0, 9, 0, 9, 1, 9)),
        ScriptedDrafter(texts, VOCAB_SIZE, ranks=(9, 0, 9, 0, 9, 1), feature_layers=(2, 4)),
        weight=0.4,
    )


def test_each_drafter_has_what_the_other_lacks() -> None:
    model = tiny_target("gemma3", initializer_range=0.3)
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=96, do_sample=False)
    drafter = scripted([expected[0]])
    options = {"tree": DynamicTree(depth=4, top_k=4, num_nodes=24), "max_new_tokens": 96, "do_sample": False}
    output = generate(model, drafter, prompt, **options)
    assert_same_text(model, expected, output.sequences)
    assert len(output.stats.accepted_histogram) == 5, "not every depth was reached"
    alone = [generate(model, one, prompt, **options).stats.acceptance_length for one in drafter.drafters]
    assert output.stats.acceptance_length > max(alone) + 0.3


def test_two_drafters_in_the_targets_cache_are_refused() -> None:
    target = Target(tiny_target("llama"))
    heads = [tiny_heads("kangaroo", target) for _ in range(2)]
    with pytest.raises(ValueError, match="KangarooHeads and KangarooHeads, which both draft in the target's own cache"):
        MergedDrafter(*heads)
    assert not MergedDrafter(NgramDrafter(), NgramDrafter()).shares_target_cache
    assert MergedDrafter(NgramDrafter(), heads[0]).shares_target_cache


def test_copied_rows_keep_their_weights() -> None:
    """The copy's first token is credited to nobody, the tokens after it are. One row waits once."""
    drafter = MergedDrafter(NgramDrafter(max_ngram=1), NgramDrafter(max_ngram=3), rate=0.3)
    assert drafter.can_copy_rows
    assert not MergedDrafter(FixedDrafter(torch.zeros(4)), NgramDrafter()).can_copy_rows
    tokens = torch.randint(2, 5, (2, 40), generator=torch.Generator().manual_seed(0))
    source = drafter.start(2, 64, 4)
    for end in (20, 24, 27):
        drafter.extend(source, None, tokens[:, end - 4 : end], torch.tensor([4, 3]), max_slots=end)
    assert source.weights is not None
    before = source.weights.clone()
    copied = drafter.start(4, 80, 2)
    rows, lengths = torch.tensor([1, 0, 1, 0]), torch.tensor([9, 12, 8, 12])
    drafter.copy_rows(copied, source, rows, lengths, max_slots=12)
    assert copied.weights is not None
    assert torch.equal(copied.weights, before[rows])

    draft = drafter.extend(copied, None, tokens[rows, 27:29], torch.tensor([2, 1, 2, 0]), max_slots=14)
    assert torch.equal(copied.weights, before[rows])
    assert draft.token_ids is not None
    likely = draft.token_ids[:, 0].gather(1, draft.logits[:, 0].argmax(-1, keepdim=True))
    drafter.extend(copied, None, likely, torch.tensor([1, 1, 1, 1]), max_slots=15)
    is_moved = (copied.weights != before[rows]).any(1)
    assert is_moved[1:].tolist() == [True, True, False], "nothing was drafted for the row that waited"
    assert torch.equal(source.weights, before)
