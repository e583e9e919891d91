"""What planners keep in files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.inference import NgramDrafter, Target
from draftsmith.inference.planning import memory
from draftsmith.inference.planning.memory import MOST_AGE, load_learned, memory_file, store_learned
from draftsmith.inference.trees.candidates import gamma_chain
from tests.tiny_targets import tiny_target

COSTS = {(False, 1, 3): [1.0, 1.2, 1.4]}
TOKENS = {False: [1.5, 1.8]}


def test_files_are_used_for_some_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "learned.json"
    assert load_learned(file) == ({}, {})
    store_learned(file, (COSTS, TOKENS))
    other = {(True, 3, 4): [1.0, 2.0, 3.0]}
    store_learned(file, (other, {}))
    assert load_learned(file) == (COSTS | other, TOKENS)
    written = file.stat().st_mtime
    for age, is_used in ((MOST_AGE - 60, True), (MOST_AGE + 60, False), (-60, False)):  # the clock was set back
        monkeypatch.setattr(memory.time, "time", lambda: written + age)  # noqa: B023
        assert (load_learned(file) == (COSTS | other, TOKENS)) == is_used


SHORT = '{"costs": [[[false, 1, 3], [1.0, 1.2]]], "tokens": [[false, [1.5, 1.8]]]}'


@pytest.mark.parametrize("content", ["{", "[]", '{"costs": []}', '{"costs": [[1]], "tokens": []}', SHORT])
def test_damaged_files_are_not_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    file.write_text(content, encoding="utf-8")
    assert load_learned(file) == ({}, {})
    store_learned(file, (COSTS, TOKENS))
    assert load_learned(file) == (COSTS, TOKENS)


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    store_learned(tmp_path / "file" / "learned.json", (COSTS, TOKENS))
    assert load_learned(tmp_path / "file" / "learned.json") == ({}, {})


def test_what_is_learned_belongs_to_drafters_trees_and_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target = Target.of(tiny_target("llama"))

    def name(drafter: Any = None, num: int = 2, runner: str = "Executor", **options: Any) -> Path:
        return memory_file(target, drafter or NgramDrafter(), gamma_chain(num).candidates, runner, **options)

    pairs = [NgramDrafter(max_ngram=n) for n in (2, 2, 4)]
    one, same, other = (name(pair) for pair in pairs)
    assert one == same
    assert len({one, other, name(), name(num=3), name(runner="CompiledExecutor"), name(is_coupled=True)}) == 6
    assert json.dumps(str(one)).find(str(tmp_path)) > 0


def test_what_is_learned_belongs_to_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained further, heads of one config, or a target, have other drafts accepted."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target = Target.of(tiny_target("llama"))
    heads = create_heads("medusa", target, num_heads=2)

    def name() -> Path:
        return memory_file(target, heads.for_target(target), gamma_chain(2).candidates, "Executor")

    names = [name(), name()]
    assert names[0] == names[1]
    for module in (heads, target.model):
        with torch.no_grad():
            [*module.parameters()][-1].mul_(1.5)
        names.append(name())
    assert len({*names}) == 3
