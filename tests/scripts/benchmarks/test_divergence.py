"""divergence.py: divergences of planted decodings are counted and judged, and the program runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.scripts.benchmarks import divergence
from draftsmith.scripts.benchmarks.divergence import REFERENCES, Tally, compare, make_judge
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
