"""Recorded acceptance, replayed through the planner of `tree="auto"`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import CHAT_TARGET, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import replay_planner
from replay_planner import Record

from inference.auto_tree import AutoTree
from inference.cost_model import CostModel
from inference.tree_planner import TreePlanner

HEADS = REPOSITORY / "examples" / "heads" / "medusa"
PROMPTS = REPOSITORY / "examples" / "prompts.jsonl"
OPTIONS = ["--target", str(CHAT_TARGET), "--heads", str(HEADS), "--prompts", str(PROMPTS), "--num_prompts", "1"]


def test_a_recorded_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    output = tmp_path / "new" / "table.md"
    assert replay_planner.main([*OPTIONS, "--max_new_tokens", "12", "--markdown", str(output)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines == output.read_text().strip().splitlines()
    assert lines[2].startswith("| medusa | prompts | (")
    shares = [float(cell) for cell in lines[2].strip("| ").split(" | ")[3:]]
    assert len(shares) == 3
    assert all(0.3 < share < 1.1 for share in shares)


def test_places_nothing_is_known_of_count_for_nobody() -> None:
    """Nothing is ever accepted and drafts are free, so everybody is as fast as plain decoding."""
    policy = AutoTree((1,), (4,), (2,))
    costs = CostModel((1,), (1, 4), ((1.0, 1.0),), 0.0, 0.0, (2,), (0.0,), 0.0, 0.0)
    texts = [[Record(1, 0.9, 0, [0]), None, None], [Record(1, 0.9, 0, [0])]]
    assert replay_planner.judge(policy, costs, texts, 2) == "(1, 4, 2) | 1.00 | 1.00 | 1.00"
    with pytest.raises(ValueError, match="no text is long enough"):
        replay_planner.judge(policy, costs, [[None]], 2)


def test_free_drafts_that_are_always_right() -> None:
    """Every plan's speed is its depth, and the planner finds the deepest."""
    policy = AutoTree((1, 2), (4,), (2,))
    costs = CostModel((1,), (1, 4), ((1.0, 1.0),), 0.0, 0.0, (2,), (0.0,), 0.0, 0.0)
    counted = [plan.depth for plan in policy.plans]
    texts = [[Record(at, 0.9, 2, counted) for at in range(300)]]
    speeds = [replay_planner.replay_fixed(place, plan, costs, texts) for place, plan in enumerate(policy.plans)]
    assert speeds == [1 + plan.depth for plan in policy.plans]
    planner = TreePlanner(policy)
    replay_planner.replay_planner(planner, costs, texts)
    assert replay_planner.replay_planner(planner, costs, texts) == 3


@pytest.mark.parametrize(("option", "value"), [("--passes", "1"), ("--max_new_tokens", "3"), ("--temperature", "-1")])
def test_options_that_cannot_work_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match=r"replay_planner.py: got --max_new_tokens"):
        replay_planner.main([*OPTIONS, option, value])
