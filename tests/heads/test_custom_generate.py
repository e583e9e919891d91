"""Folders whose code transformers runs: custom_generate="FOLDER", trust_remote_code=True."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from heads import DraftHeads
from heads.formats.registry import find_format
from inference import NgramDrafter, Target, generate
from tests.heads.tiny_heads import tiny_heads
from tests.inference.test_generation import Recorder
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def write_folder(heads: DraftHeads, folder: Path, at: str | None = None) -> str:
    folder.mkdir(parents=True)
    kind = heads.config.head_type
    find_format("custom_generate", kind).write(heads.config, heads.state_dict(), heads.target).save(folder, at)
    return str(folder)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> DraftHeads:
    return tiny_heads("eagle3", Target.of(model), draft_vocab_size=40)


@pytest.fixture(scope="module")
def folder(heads: DraftHeads, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(heads, tmp_path_factory.mktemp("hub") / "heads")


def run(model: Any, folder: str, inputs: Any, **options: Any) -> Any:
    return model.generate(**inputs, custom_generate=folder, trust_remote_code=True, **options)


def test_text_of_the_model_by_the_heads_in_the_folder(model: Any, heads: DraftHeads, folder: str) -> None:
    prompt = random_prompt(7)
    found = run(model, folder, {"input_ids": prompt}, **GREEDY, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(found.sequences, model.generate(prompt, **GREEDY))
    assert len(found.scores) == 16
    (loaded,) = model._draftsmith_heads.values()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(run(model, folder, {"inputs": prompt}, **GREEDY), found.sequences)
    assert len(model._draftsmith_heads) == 1


def test_batches_streamers_processors_seeds_and_trees(model: Any, folder: str) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 7)]
    padded = pad_prompts(prompts)
    found = run(model, folder, padded, **GREEDY, repetition_penalty=1.4)
    assert torch.equal(found, model.generate(**padded, **GREEDY, repetition_penalty=1.4))
    streamer = Recorder()
    found = run(model, folder, {"input_ids": prompts[0]}, **GREEDY, streamer=streamer, tree="chain:3")
    assert streamer.tokens == found[0].tolist()
    sampled = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "seed": 3}
    found = run(model, folder, {"input_ids": prompts[0]}, **sampled)
    assert torch.equal(found, generate(model, None, prompts[0], **sampled).sequences)


def test_other_heads(model: Any, folder: str, tmp_path: Path) -> None:
    prompt = random_prompt(7)
    expected = model.generate(prompt, **GREEDY)
    others: Any = tiny_heads("medusa", Target.of(model))
    others.save_pretrained(tmp_path / "medusa")
    for heads in (others, NgramDrafter(), str(tmp_path / "medusa"), tmp_path / "medusa"):
        tree = {"tree": "chain:3"}
        assert torch.equal(run(model, folder, {"input_ids": prompt}, **GREEDY, **tree, heads=heads), expected)


def test_a_model_whose_generate_was_replaced(model: Any, folder: str, tmp_path: Path) -> None:
    """from_pretrained(trust_remote_code=True) does that where the model's own repository has the code."""
    model.save_pretrained(tmp_path)
    shutil.copytree(Path(folder) / "custom_generate", tmp_path / "custom_generate")
    replaced = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    prompt = random_prompt(7)
    assert torch.equal(replaced.generate(inputs=prompt, **GREEDY), model.generate(prompt, **GREEDY))


def test_the_folder(heads: DraftHeads, folder: str, tmp_path: Path) -> None:
    files = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
    assert files == [
        "config.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "model.safetensors",
    ]
    required = (Path(folder) / "custom_generate" / "requirements.txt").read_text(encoding="utf-8")
    assert required == ("draftsmith\n" if "dev" in version("draftsmith") else f"draftsmith=={version('draftsmith')}\n")
    published = write_folder(heads, tmp_path / "heads", at="org/heads")
    code = (Path(published) / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert 'HEADS = "org/heads"' in code
    assert published not in code
    assert isinstance(DraftHeads.from_pretrained(folder), type(heads))


def test_a_release_is_pinned(heads: DraftHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heads.formats.custom_generate.version", lambda _: "1.2.3")
    known = find_format("custom_generate", heads.config.head_type)
    files = known.write(heads.config, heads.state_dict(), heads.target).files
    assert files["custom_generate/requirements.txt"] == "draftsmith==1.2.3\n"


def test_a_folder_that_has_moved(model: Any, heads: DraftHeads, tmp_path: Path) -> None:
    folder = write_folder(heads, tmp_path / "before")
    shutil.move(folder, tmp_path / "after")
    with pytest.raises(ValueError, match=r"before does not exist.*Name the heads: model\.generate\(\.\.\., heads="):
        run(model, str(tmp_path / "after"), {"input_ids": random_prompt(7)}, **GREEDY)


def test_trust_is_needed(model: Any, folder: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(random_prompt(7), custom_generate=folder, trust_remote_code=False, **GREEDY)


def test_heads_with_an_adapter_are_refused(model: Any) -> None:
    heads = tiny_heads("medusa", Target.of(model))
    heads.config.target_adapter = "adapter"
    known = find_format("custom_generate", heads.config.head_type)
    with pytest.raises(ValueError, match="draft for a target with an adapter"):
        known.write(heads.config, heads.state_dict(), heads.target)
