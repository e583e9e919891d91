"""divergence.py: divergences of planted decodings are counted and judged, and the program runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.inference import GenerationStats, Target
from draftsmith.inference.noise import gumbel_noise, row_seeds
from draftsmith.inference.text_difference import find_step
from draftsmith.scripts.benchmarks import divergence
from draftsmith.scripts.benchmarks.divergence import REFERENCES, Tally, compare, make_judge, time_steps
from draftsmith.scripts.measuring.contenders import OurDecoding
from draftsmith.scripts.measuring.measure import PLAIN, Batch, Prompt, Run, Settings
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.tiny_targets import random_prompt, tiny_target

PROMPT, TEXT = [1, 2, 3], [5, 6, 7, 8, 9, 4]


def test_each_position_is_compared_once() -> None:
    """Decoding starts again after the text's own token, and every divergence has the text before it."""
    calls: list[tuple[list[int], int]] = []
    judged: list[tuple[list[int], tuple[int, ...]]] = []

    def decode(prefixes: list[list[int]], count: int) -> list[list[int]]:
        starts = [len(prefix) - len(PROMPT) for prefix in prefixes]
        assert prefixes == [[*PROMPT, *TEXT[:start]] for start in starts]
        calls.append((starts, count))
        found = [9 if place in (2, 3) else token for place, token in enumerate(TEXT)]
        return [row[start : start + count] for row, start in zip((TEXT, found), starts, strict=True)]

    def judge(prefix: list[int], tokens: tuple[int, ...]) -> float:
        judged.append((prefix, tokens))
        return [0.5, 300.0][len(judged) - 1]

    tally = Tally()
    compare(tally, decode, [PROMPT] * 2, [TEXT] * 2, judge)  # type: ignore[arg-type]
    assert calls == [([0, 0], 6), ([0, 3], 3), ([0, 4], 2)], "the first row keeps its place"
    assert judged == [([*PROMPT, 5, 6], (7, 9)), ([*PROMPT, 5, 6, 7], (8, 9))]
    assert (tally.num_tokens, len(tally.gaps), tally.num_near_ties) == (12, 2, 1)
    assert (tally.num_texts, tally.num_equal) == (2, 1)


def test_a_decoding_that_stops_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="decoding ended after 4 of 6 tokens"):
        compare(Tally(), lambda prefixes, count: [TEXT[:4]], [PROMPT], [TEXT], lambda prefix, tokens: 0.0)


@torch.no_grad()
def test_gaps_are_counted_in_steps_of_the_models_own_dtype() -> None:
    model = tiny_target("llama", initializer_range=0.3, dtype=torch.bfloat16)
    prompt = random_prompt(9)
    first, second = model.float()(prompt).logits[0, -1].topk(2).indices.tolist()
    logits = model(prompt).logits[0, -1]
    gap = float(logits[first] - logits[second])
    found = make_judge(model.bfloat16())(prompt[0].tolist(), (first, second))
    step = 2.0 ** (torch.frexp(logits[first].abs()).exponent.item() - 1) * 2.0**-7
    assert found == pytest.approx(gap / step, rel=1e-4)


@torch.no_grad()
def test_the_gap_of_sampled_tokens_counts_their_noise() -> None:
    """The token that plain decoding samples has the best score with noise, by the gap to any other token."""
    model = tiny_target("llama", initializer_range=0.3)
    prompt, settings = random_prompt(9), Settings(1, temperature=0.7)
    target = Target.of(model)
    (chosen,) = OurDecoding(target, None)(Batch.of(Prompt("", 0, prompt)), settings).texts[0]
    scores = model(prompt).logits[0, -1] / 0.7
    scores += gumbel_noise(row_seeds(0, 1, "cpu"), torch.tensor([[9]]), len(scores))[0, 0]
    assert chosen == int(scores.argmax())
    other = int(scores.topk(2).indices[1])
    step = find_step(float(model(prompt).logits[0, -1, [chosen, other]].abs().max()), torch.float32)
    gap = make_judge(model, 0.7)(prompt[0].tolist(), (chosen, other))
    assert gap == pytest.approx(0.7 * float(scores[chosen] - scores[other]) / step, rel=1e-3)


def test_the_cost_is_that_of_steps_after_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts take 5 s in both modes. A text takes 4 steps of 3 s, or 2 of 2 s. The first run compiles for 60 s."""
    clock, graphs = [0.0], [1]

    def make(num_steps: int, seconds: float) -> Callable[..., Run]:
        def decode(batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
            clock[0] += 5 + (0 if max_new_tokens == 1 else num_steps * seconds) + (60 if graphs[0] == 1 else 0)
            graphs[0] = 2
            return Run([[1]], 0.0, 1, GenerationStats(num_verify_passes=num_steps))

        return decode

    monkeypatch.setattr(divergence, "count_graphs", lambda: graphs[0])
    monkeypatch.setattr(divergence.time, "process_time", lambda: clock[0])
    tally = Tally()
    time_steps(tally, [make(4, 3.0), make(2, 2.0)], Batch.of(Prompt("", 0, random_prompt(3))), Settings())
    assert (tally.seconds, tally.num_steps, tally.cost) == ([12.0, 4.0], [4, 2], 1.5)
    assert Tally().cost is None


@pytest.mark.slow
def test_the_program_decodes_in_batch_invariant_mode(
    chat_target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "divergence.md"
    words = ["--target", str(CHAT_TARGET), "--prompts", str(REPOSITORY / "examples" / "prompts.jsonl")]
    words += ["--num_prompts", "3", "--max_new_tokens", "8", "--tree", "chain:2", "--temperature", "0.7"]
    divergence.main([*words, "--batch_invariant", "true", "--batch_size", "2", "--output", str(table)])
    page = table.read_text()
    assert f"chat-13m, bfloat16, batch-invariant, T=0.7, batch 2, against {PLAIN}**" in page
    assert page.count("against") == 1, "transformers samples other texts"
    for name in (PLAIN, "n-grams, chain:2"):
        assert re.search(rf"\| {name} \| 4 of 4 \| [0-9]+ \| 0 \(< [0-9]+\) \| 0/0 \| – \| [0-9.]+ \|", page), page


def test_the_program_writes_a_table_for_each_reference(
    chat_target: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "out" / "divergence.md"
    words = ["--target", str(CHAT_TARGET), "--prompts", str(REPOSITORY / "examples" / "prompts.jsonl")]
    words += ["--num_prompts", "1", "--max_new_tokens", "8", "--tree", "chain:2", "--dtype", "float32"]
    divergence.main([*words, "--output", str(table)])
    page = table.read_text()
    for reference in REFERENCES:
        assert f"chat-13m, float32, against {reference}**" in page
    assert page.count("| n-grams, chain:2 | 1 of 1 | 8 | 0 (< 3750) | 0/0 |") == 2
    assert "ordinary" not in page
    assert f"wrote {table}" in capsys.readouterr().out
