"""From conversations and heads to a tree file that a decoder takes; options that cannot work say so at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, StaticTree
from draftsmith.scripts import build_tree
from tests.conftest import CHAT_TARGET
from tests.tiny_targets import tiny_target

MAX_POSITIONS = 32


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A target of 32 positions with the embedded target's tokenizer, heads for it, and longer conversations."""
    model = tiny_target("llama", vocab_size=4096, max_position_embeddings=MAX_POSITIONS)
    model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(CHAT_TARGET).save_pretrained(tmp_path / "target")
    create_heads("medusa", model, num_heads=2).save_pretrained(tmp_path / "heads")
    turns = [{"from": "human", "value": "Count, please."}, {"from": "gpt", "value": "one two three four " * 20}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    return {
        "target": tmp_path / "target",
        "heads": tmp_path / "heads",
        "dataset": tmp_path / "data.jsonl",
        "output": tmp_path / "trees" / "tree.yaml",
        "num_nodes": 5,
        "num_ranks": 3,
        "dtype": "float32",
    }


def words(options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def test_from_conversations_to_a_tree_that_decodes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, widths = [], []
    measure = build_tree.measure_rank_accuracy

    def spy(heads: Any, batches: Any, *, num_ranks: int) -> torch.Tensor:
        widths.extend(batch["input_ids"].shape[1] for batch in batches)
        measured.append(measure(heads, batches, num_ranks=num_ranks))
        return measured[-1]

    monkeypatch.setattr(build_tree, "measure_rank_accuracy", spy)
    assert build_tree.main(words(options)) == 0
    assert widths == [MAX_POSITIONS], "rows are cut where the target's positions end"
    (accuracy,) = measured
    assert accuracy.shape == (2, 3)
    text = options["output"].read_text()
    paths = yaml.safe_load(text)["paths"]
    assert paths == build_tree.best_static_tree(accuracy.tolist(), 5)
    assert len(paths) == 5
    told = capsys.readouterr()
    assert told.out == text
    assert "--max_length is 384, but the target reads only 32 tokens (max_position_embeddings=32)" in told.err
    assert "cut at 32 tokens" in text
    assert [place.name for place in options["output"].parent.iterdir()] == ["tree.yaml"]

    target, _ = build_tree.load_target(str(options["target"]), device="cpu")
    decoder = Decoder(target, build_tree.load_heads(str(options["heads"]), target), tree=str(options["output"]))
    assert isinstance(decoder.policy, StaticTree)
    prompt = torch.tensor([[5, 6, 7]])
    expected = target.model.generate(prompt, max_new_tokens=8, do_sample=False)
    found = decoder.generate(prompt, torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize(
    ("changes", "message"), [({"num_nodez": 3}, "num_nodez"), ({"num_ranks": 0}, "got --num_ranks 0: give at least 1")]
)
def test_options_that_cannot_work_end_it_before_anything_is_loaded(
    options: dict[str, Any], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tree, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(SystemExit) as exit_:
        build_tree.main(words({**options, **changes}))
    assert str(exit_.value.code).startswith("draftsmith tree: ")
    assert message in str(exit_.value.code)
