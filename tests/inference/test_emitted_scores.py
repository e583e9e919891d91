"""Scores and logits of the emitted tokens: what transformers' generate returns."""

from typing import Any

import pytest
import torch

from draftsmith.inference import NgramDrafter, SmallModelDrafter, chain, generate
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("qwen3", initializer_range=0.3)
PROMPT = random_prompt(6)
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
STATIC = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("tree", "options"),
    [("static", {}), ("dynamic", {"repetition_penalty": 1.3}), ("dynamic", {"suppress_tokens": [5, 9]})],
    ids=str,
)
def test_greedy_scores_are_transformers(tree: str, options: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 17, "do_sample": False, **options}
    expected = MODEL.generate(PROMPT, **settings, **ASKED)
    drafter = ScriptedDrafter([expected.sequences[0]], VOCAB_SIZE)
    found = generate(MODEL, drafter, PROMPT, tree=STATIC if tree == "static" else tree, **settings, **ASKED)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert len(ours) == len(theirs) == 17
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-4, rtol=0)
    chances = MODEL.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    assert chances.shape == (1, 17)


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
def test_sampled_scores_are_the_targets(acceptance: str) -> None:
    """With any rule, a token's scores are the target's processed scores after the text before the token."""
    settings = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 1}
    found = generate(MODEL, SmallModelDrafter(MODEL), PROMPT, tree=chain(3), acceptance=acceptance, **settings, **ASKED)
    assert found.stats.acceptance_length > 1
    with torch.no_grad():
        wanted = MODEL(found.sequences).logits[0, 5:-1].float()
    torch.testing.assert_close(torch.cat(found.logits), wanted, atol=1e-4, rtol=0)
    kept = wanted.topk(20).values[:, -1:]
    processed = (wanted / 0.8).masked_fill(wanted < kept, float("-inf"))
    torch.testing.assert_close(torch.cat(found.scores), processed, atol=1e-4, rtol=0)


def test_rows_that_have_ended_have_zeros() -> None:
    prompts = random_prompt(6, batch_size=3, seed=2)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [8, 21, 50, 61, 77, 100], "pad_token_id": 0}
    alone = [generate(MODEL, None, row[None], **options, **ASKED) for row in prompts]
    found = generate(MODEL, NgramDrafter(), prompts, **options, **ASKED)
    scores = torch.stack(found.scores, dim=1)
    assert len({len(one.scores or ()) for one in alone}) > 1
    for row, one in enumerate(alone):
        torch.testing.assert_close(scores[row, : len(one.scores)], torch.cat(one.scores), atol=1e-4, rtol=0)
        assert not scores[row, len(one.scores) :].any()
