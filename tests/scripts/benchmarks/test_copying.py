"""copying.py: planted steps are counted where the text repeats and where not, and the program runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from scripts.benchmarks import copying
from scripts.measuring.measure import Prompt
from tests.conftest import CHAT_TARGET, REPOSITORY

PROMPT = [1, 2, 3, 4, 5]


class PlantedDecoder:
    """Emits 1 2 3 4 9 after the prompt: the prompt pass 1, then steps of 2, 1 and 1 tokens. The 4 repeats 1 2 3 4."""

    def generate(self, input_ids: torch.Tensor, *, on_step: Callable[..., None], **_: int) -> SimpleNamespace:
        for tokens, drafted in (([1], 0), ([2, 3], 1), ([4], 0), ([9], 0)):
            on_step(tokens, drafted)
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor([[1, 2, 3, 4, 9]])], dim=1))


def test_steps_are_counted_at_their_token() -> None:
    prompt = Prompt("p", 0, torch.tensor([PROMPT]))
    found = copying.count_accepted(PlantedDecoder(), [prompt, prompt], 5)  # type: ignore[arg-type]
    assert found == {"repeated": [2, 0], "new": [4, 2]}


def test_the_program_runs(tmp_path: Path) -> None:
    heads, file = str(REPOSITORY / "examples/heads/mtp"), tmp_path / "copying.json"
    prompts = str(REPOSITORY / "examples/prompts.jsonl")
    words = ["--heads", heads, "--target", str(CHAT_TARGET), "--prompts", prompts, "--num_prompts", "2"]
    copying.main([*words, "--max_new_tokens", "24", "--json", str(file)])
    counts = json.loads(file.read_text())["counts"][heads]
    drafted, accepted = (sum(count[i] for count in counts.values()) for i in (0, 1))
    # A step gives one token, and one more if the drafted one was accepted.
    assert 0 < accepted <= drafted <= 2 * 23
