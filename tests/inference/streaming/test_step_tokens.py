"""StepTokens: which tokens of a step were drafted, at what depth, and how probable the drafter found them."""

from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, DynamicTree, StaticTree, StepTokens, chain, generate, stream
from draftsmith.inference.drafters.sampling import GREEDY_TEMPERATURE
from draftsmith.inference.engine import Emission, Engine
from draftsmith.inference.step import StepOutput
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("llama", initializer_range=0.3)
PROMPTS = random_prompt(6, batch_size=3)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "seed": 5}
TREES = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [2], [0, 0], [1, 0], [1, 1]]),
    "dynamic": DynamicTree(3, 4, 16),
}


def scripted(texts: torch.Tensor, **options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(list(texts), VOCAB_SIZE, **options)


def rank_probabilities(temperature: float) -> list[float]:
    """Of the scripted drafter's candidates, by rank."""
    return torch.softmax(torch.arange(4) * -1.2 / temperature, 0).tolist()


def assert_told(steps: list[StepTokens], ranks: torch.Tensor, temperature: float) -> None:
    """Compares steps with the script, which knows the rank at which it offered each position's token.

    Args:
        ranks: [T] of the text; the steps begin at position 6.
    """
    position, by_rank = 6, rank_probabilities(temperature)
    for step in steps:
        assert len(step) == len(step.depths) == len(step.probabilities)
        for place, (depth, probability) in enumerate(zip(step.depths, step.probabilities, strict=True)):
            assert depth == (place + 1 if place < step.num_drafted else 0)
            assert probability == (pytest.approx(by_rank[ranks[position]], rel=1e-4) if depth else None)
            position += 1


@pytest.mark.parametrize(("tree", "options"), [("chain", GREEDY), ("static", SAMPLED), ("dynamic", GREEDY)])
def test_streams_tell_which_tokens_were_drafted(tree: str, options: dict[str, Any]) -> None:
    text = generate(MODEL, None, PROMPTS[:1], **{**options, "max_new_tokens": 40}).sequences
    drafter = scripted(text)
    tokens = stream(MODEL, drafter, PROMPTS[:1], tree=TREES[tree], is_coupled=False, **options)
    steps = list(tokens)
    assert list(tokens) == []
    assert [token for step in steps for token in step] == text[0, 6:30].tolist()
    assert_told(steps, drafter._write_script().ranks[0], 1.0 if options is SAMPLED else GREEDY_TEMPERATURE)
    assert steps[0].depths == [0]
    # The limit may cut the last step.
    assert all(step.depths[-1] == 0 and step.num_drafted == len(step) - 1 for step in steps[1:-1])
    histogram = tokens.output.stats.accepted_histogram
    assert sum(number * count for number, count in enumerate(histogram)) >= sum(step.num_drafted for step in steps) > 4
    if tree != "chain":
        assert len({round(p, 3) for step in steps for p in step.probabilities if p is not None}) > 1


def test_plain_decoding_drafts_nothing() -> None:
    assert {tuple(step.depths) for step in stream(MODEL, None, PROMPTS[:1], **GREEDY)} == {(0,)}


def test_a_step_that_is_cut_within_its_drafts() -> None:
    text = generate(MODEL, None, PROMPTS[:1], **{**GREEDY, "max_new_tokens": 40}).sequences
    options = {**GREEDY, "max_new_tokens": 4}
    first, second = stream(MODEL, scripted(text, ranks=(0,)), PROMPTS[:1], tree=chain(4), **options)
    assert (first.depths, second.depths, second.num_drafted) == ([0], [1, 2, 3], 3)
    assert second == text[0, 7:10].tolist()
    assert None not in second.probabilities


@pytest.mark.parametrize("options", [{"acceptance": "rejection"}, {}], ids=["rejection", "coupled"])
def test_drafts_drawn_with_noise(options: dict[str, Any]) -> None:
    """Rejected siblings do not change the probability that a draft was drawn with; coupled drafts know the noise."""
    text = generate(MODEL, None, PROMPTS[:1], **{**SAMPLED, "max_new_tokens": 40}).sequences
    drafter = scripted(text, is_strict=False)
    steps = list(stream(MODEL, drafter, PROMPTS[:1], tree=TREES["static"], **options, **SAMPLED))
    found = [p for step in steps for p in step.probabilities if p is not None]
    assert len(found) >= 2
    assert all(0 < p <= 1 for p in found)
    if options:
        by_rank = rank_probabilities(1.0)
        assert all(any(p == pytest.approx(q, rel=1e-4) for q in by_rank) for p in found)


def test_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different lengths, and the last ones move into the places of those that left."""
    texts = generate(MODEL, None, PROMPTS, **{**GREEDY, "max_new_tokens": 40}).sequences
    kept: list[list[StepTokens]] = [[], [], []]
    emit, make = Engine.emit, Engine.__init__

    def note(engine: Engine, output: StepOutput) -> Emission:
        emission = emit(engine, output)
        for _, row, _, step in emission.given:
            kept[row.index].append(step)
        return emission

    monkeypatch.setattr(Engine, "emit", note)
    monkeypatch.setattr(
        Engine, "__init__", lambda *args, **options: make(*args, **options | {"records_probabilities": True})
    )
    drafter = scripted(texts)
    Decoder(MODEL, drafter, tree=TREES["dynamic"]).generate(PROMPTS, eos_token_id=int(texts[0, 14]), **GREEDY)
    for row, steps in enumerate(kept):
        new = [token for step in steps for token in step]
        assert new == texts[row, 6 : 6 + len(new)].tolist()
        assert_told(steps, drafter._write_script().ranks[row], GREEDY_TEMPERATURE)
        assert sum(step.num_drafted for step in steps) > 0
    assert len({sum(map(len, steps)) for steps in kept}) > 1
