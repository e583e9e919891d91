"""From conversations and heads to a tree file that a decoder takes; options that cannot work say so at once."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, StaticTree
from draftsmith.scripts import build_tree
from draftsmith.scripts.build_tree import best_static_tree
from tests.conftest import CHAT_TARGET
from tests.tiny_targets import tiny_target
from tests.training.conversation_cases import sharegpt, write
from tests.training.runner import words_of

MAX_POSITIONS = 32


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A target of 32 positions with the embedded target's tokenizer, heads for it, and longer conversations."""
    model = tiny_target("llama", vocab_size=4096, max_position_embeddings=MAX_POSITIONS)
    model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(CHAT_TARGET).save_pretrained(tmp_path / "target")
    create_heads("medusa", model, num_heads=2).save_pretrained(tmp_path / "heads")
    data = write(tmp_path / "data.jsonl", [sharegpt("Count, please.", "one two three four " * 20)])
    return {
        "target": tmp_path / "target",
        "heads": tmp_path / "heads",
        "dataset": data,
        "output": tmp_path / "trees" / "tree.yaml",
        "num_nodes": 5,
        "num_ranks": 3,
        "dtype": "float32",
    }


def test_from_conversations_to_a_tree_that_decodes(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured, widths = [], []
    measure = build_tree.measure_rank_accuracy

    def spy(heads: Any, batches: Any, *, num_ranks: int) -> torch.Tensor:
        widths.extend(batch["input_ids"].shape[1] for batch in batches)
        measured.append(measure(heads, batches, num_ranks=num_ranks))
        return measured[-1]

    monkeypatch.setattr(build_tree, "measure_rank_accuracy", spy)
    build_tree.main(words_of(**options))
    assert widths == [MAX_POSITIONS], "rows are cut where the target's positions end"
    (accuracy,) = measured
    assert accuracy.shape == (2, 3)
    text = options["output"].read_text()
    paths = yaml.safe_load(text)["paths"]
    assert paths == build_tree.best_static_tree(accuracy.tolist(), 5)
    assert len(paths) == 5
    assert capsys.readouterr().out == text
    assert "max_length is 384, and the target takes only 32 tokens (max_position_embeddings=32)" in caplog.text
    assert "cut at 32 tokens" in text
    assert [place.name for place in options["output"].parent.iterdir()] == ["tree.yaml"]

    target, _ = build_tree.load_target(str(options["target"]), device="cpu")
    decoder = Decoder(target, build_tree.load_heads(str(options["heads"]), target), tree=str(options["output"]))
    assert isinstance(decoder.policy, StaticTree)
    prompt = torch.tensor([[5, 6, 7]])
    expected = target.model.generate(prompt, max_new_tokens=8, do_sample=False)
    found = decoder.generate(prompt, torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert torch.equal(found.sequences, expected)


# The tree against an exhaustive search.


def gain(path: tuple[int, ...], accuracy: list[list[float]]) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= accuracy[depth][rank]
    return product


@pytest.mark.parametrize("num_nodes", [1, 5, 17])
def test_expected_tokens_are_the_most_possible(num_nodes: int) -> None:
    """The best set of nodes is that of the largest gains, whatever the order of the ranks' accuracies."""
    generator = torch.Generator().manual_seed(0)
    accuracy = (torch.rand(3, 4, generator=generator) / 4).tolist()
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    best = sum(sorted((gain(path, accuracy) for path in paths), reverse=True)[:num_nodes])
    tree = best_static_tree(accuracy, num_nodes)
    assert len(tree) == num_nodes
    assert sum(gain(tuple(path), accuracy) for path in tree) == pytest.approx(best)
    assert StaticTree(tree).num_nodes == num_nodes + 1  # every parent is there
