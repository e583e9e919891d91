"""Results in the files of other projects, from runs whose steps are known."""

import csv
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.inference import GenerationStats
from draftsmith.scripts.measuring.measure import Contender, Prompt, Run
from draftsmith.scripts.measuring.result_formats import ResultFiles
from draftsmith.training.synthesis.prompts import Conversation

TOKENIZER: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
PROMPTS = [Prompt(name, index, torch.ones(1, 2, dtype=torch.long)) for index, name in enumerate(("q1", "q2"))]


def run_of(accepted: list[int], seconds: float) -> Run:
    """A text whose steps accept these numbers of drafts of 3."""
    stats = GenerationStats(num_drafted=3 * len(accepted), steps=[[1 + number for number in accepted]])
    stats.seconds["prefill"] = 0.5
    for number in accepted:
        stats.count_step(number)
    return Run([list(range(1 + len(accepted) + sum(accepted)))], seconds, 1 + len(accepted), stats)


@pytest.fixture
def contenders() -> list[Contender]:
    heads = Contender("heads", "chain:3", runs=[[run_of([0, 3, 1], 2.0), run_of([2], 1.0)]])
    unknown = Contender("prompt look-up", runs=[[Run([[1, 2, 3, 4]], 1.0, 2)] * 2])
    return [heads, unknown, Contender("broken", problem="no")]


def test_spec_bench(contenders: list[Contender], tmp_path: Path) -> None:
    ResultFiles("spec-bench", tmp_path).add("math", contenders, PROMPTS, TOKENIZER, {})
    assert [path.name for path in tmp_path.iterdir()] == ["heads-chain-3.jsonl"]
    answers = [json.loads(line) for line in (tmp_path / "heads-chain-3.jsonl").read_text().splitlines()]
    assert [(one["question_id"], one["category"]) for one in answers] == [("q1", "math"), ("q2", "math")]
    (choice,) = answers[0]["choices"]
    assert choice["accept_lengths"] == [1, 4, 2]
    assert (choice["decoding_steps"], choice["new_tokens"], choice["wall_time"]) == ([3], [8], [2.0])
    assert choice["turns"] == ["0 1 2 3 4 5 6 7"]


def test_speculators(contenders: list[Contender], tmp_path: Path) -> None:
    """Two sets of prompts are two rows of one table."""
    files = ResultFiles("speculators", tmp_path)
    files.add("math", contenders, PROMPTS, TOKENIZER, {})
    files.add("chat", contenders, PROMPTS, TOKENIZER, {})
    with (tmp_path / "heads-chain-3" / "acceptance.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["subset"] for row in rows] == ["math", "chat"]
    numbers = {name: float(value) for name, value in rows[0].items() if name != "subset"}
    assert numbers == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "acceptance_length": 2.5,
        "acceptance_at_pos_0": 0.75,
        "acceptance_at_pos_1": 0.5,
        "acceptance_at_pos_2": 0.25,
    }


def test_specdec_bench(contenders: list[Contender], tmp_path: Path) -> None:
    """The prompt's token is a step there, and the mean is over requests."""
    ResultFiles("specdec_bench", tmp_path).add("math", contenders, PROMPTS, TOKENIZER, {"device": "cpu"})
    (rates,) = json.loads((tmp_path / "heads-chain-3" / "acceptance_rate.json").read_text())
    assert rates["Request_AL"] == {"q1": {"0": 2.0}, "q2": {"0": 2.0}}
    assert rates["Acceptance_Length_Histogram"] == {"1": 3, "2": 1, "3": 1, "4": 1}
    assert rates["Joint_Acceptance_Rate"]["2"] == 0.5
    assert rates["Conditional_Acceptance_Rate"]["3"] == pytest.approx(2 / 3)
    (timing,) = json.loads((tmp_path / "heads-chain-3" / "timing.json").read_text())
    assert timing["Output TPS"] == f"{12 / 3:.4f}"
    assert timing["E2E Request Time"]["mean"] == "1.5000"
    assert timing["Request Generation Step Time"] == timing["TTFT Time"]
    made = json.loads((tmp_path / "heads-chain-3" / "configuration.json").read_text())
    assert made == {"contender": "heads, chain:3", "device": "cpu"}


def test_turns_of_a_conversation_are_one_question(contenders: list[Contender], tmp_path: Path) -> None:
    """Of Spec-Bench's own file, with its category."""
    conversation = Conversation("81", "question.jsonl", deque(), category="writing")
    turns = [Prompt("81", turn, torch.ones(1, 2), conversation, turn) for turn in range(2)]
    ResultFiles("spec-bench", tmp_path).add("question", contenders[:1], turns, TOKENIZER, {})
    (answer,) = [json.loads(line) for line in (tmp_path / "heads-chain-3.jsonl").read_text().splitlines()]
    assert (answer["question_id"], answer["category"]) == ("81", "writing")
    (choice,) = answer["choices"]
    assert choice["decoding_steps"] == [3, 1]
    assert choice["accept_lengths"] == [1, 4, 2, 3]
    assert (choice["new_tokens"], choice["wall_time"], len(choice["turns"])) == ([8, 4], [2.0, 1.0], 2)
