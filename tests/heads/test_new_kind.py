"""A kind of an outsider: one class, one config and one registration are all it takes."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import HEAD_TYPES, DraftHeads, DraftHeadsConfig, create_heads, register
from draftsmith.heads.registration import find_kind, known_kinds
from draftsmith.inference import Target, generate
from tests.conftest import REPOSITORY
from tests.heads.test_overfit import learn
from tests.tiny_targets import random_prompt, tiny_target


def test_is_created_trained_saved_loaded_and_drafts(tmp_path: Path, own_kind: Any) -> None:
    """After a few steps on the target's own text it drafts some of it."""
    model = tiny_target("llama", vocab_size=40)
    target = Target(model)
    heads = create_heads("bigram", target, rank=16)
    assert type(heads) is own_kind.BigramHeads
    prompt = random_prompt(8, vocab_size=40)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False)
    losses = learn(heads, text, num_steps=30, loss_type="distillation", learning_rate=0.1)
    assert losses[-1] < 0.8 * losses[0]

    heads.save_pretrained(tmp_path)
    loaded = DraftHeads.from_pretrained(tmp_path)
    assert type(loaded) is own_kind.BigramHeads
    assert loaded.config.rank == 16
    assert loaded.feature_layers == ()
    output = generate(target, loaded, prompt, max_new_tokens=100, do_sample=False)
    assert torch.equal(output.sequences, text)
    assert output.stats.acceptance_length > 1.3


def test_the_example_runs(own_kind: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPOSITORY)
    own_kind.main()
    found = re.fullmatch(r"(\S+) tokens a step; same text: True\n", capsys.readouterr().out)
    assert float(found[1]) > 1.3


def _install(folder: Path, entries: str) -> None:
    info = folder / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[draftsmith.heads]\n{entries}")


def test_an_installed_package_brings_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_kind: Any) -> None:
    del HEAD_TYPES["bigram"]
    _install(tmp_path, "bigram = own_kind:BigramHeads\nother = own_kind:BigramHeads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"bigram", "eagle3", "other"} <= {*known_kinds()}
    assert find_kind("bigram") is own_kind.BigramHeads
    with pytest.raises(ValueError, match="entry point other = own_kind:BigramHeads"):
        find_kind("other")


# The value of an entry point, the text of its module, and what the error must say.
BROKEN = {
    "a module that needs another": ("broken_kind:Kind", "import nowhere_at_all", "ModuleNotFoundError.*nowhere_at_all"),
    "no class": ("broken_kind:Kind", "Kind = 3", "register got 3.*DraftHeads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text, expected = BROKEN[name]
    _install(tmp_path, f"trigram = {value}\n")
    (tmp_path / "broken_kind.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_kind", raising=False)
    with pytest.raises(ValueError, match=f"trigram = {value} .* their-package 1.0.*{expected}"):
        find_kind("trigram")
    assert "trigram" not in HEAD_TYPES
    assert "eagle3" in known_kinds()
    monkeypatch.delitem(sys.modules, "broken_kind", raising=False)


def test_what_cannot_be_registered_is_named(own_kind: Any) -> None:
    class Other(DraftHeads):
        config_class = own_kind.BigramConfig

    class Nameless(DraftHeads):
        config_class = DraftHeadsConfig

    with pytest.raises(ValueError, match=r"'bigram' of Other.* BigramHeads"):
        register(Other)
    with pytest.raises(ValueError, match=r"Nameless\.config_class"):
        register(Nameless)
    again = type("BigramHeads", (DraftHeads,), {"config_class": own_kind.BigramConfig, "__module__": "own_kind"})
    assert register(again) is HEAD_TYPES["bigram"] is again, "a cell of a notebook that ran again"
    with pytest.raises(ValueError, match=r"'eagle9'.*bigram, block"):
        find_kind("eagle9")
