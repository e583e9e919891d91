"""Folders whose code transformers runs: custom_generate="FOLDER", trust_remote_code=True."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, dynamic_module_utils

from draftsmith.heads import HEAD_TYPES, DraftHeads
from draftsmith.heads.formats.custom_generate import CustomGenerateFolder
from draftsmith.inference import NgramDrafter, Target, generate
from tests.heads.formats.round_trip import export_heads
from tests.heads.tiny_heads import tiny_heads
from tests.inference.test_generation import Recorder
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target

GREEDY = {"max_new_tokens": 16, "do_sample": False}
KINDS = set(HEAD_TYPES)
STOP = ["3"]  # chat-13m's token 21, which the model writes after some others


def write_folder(heads: DraftHeads, folder: Path, at: str | None = None) -> str:
    folder.mkdir(parents=True)
    export_heads(CustomGenerateFolder(), heads).save(folder, at)
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
    options.setdefault("heads", folder)
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


def test_heads_of_every_kind_can_be_written() -> None:
    assert set(CustomGenerateFolder.kinds) == KINDS


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


def test_a_model_whose_generate_was_replaced(model: Any, folder: str, tmp_path: Path, chat_tokenizer: Any) -> None:
    """from_pretrained(trust_remote_code=True) does that where the model's own repository has the code."""
    model.save_pretrained(tmp_path)
    shutil.copytree(Path(folder) / "custom_generate", tmp_path / "custom_generate")
    replaced = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    prompt = random_prompt(7)
    assert torch.equal(replaced.generate(inputs=prompt, heads=folder, **GREEDY), model.generate(prompt, **GREEDY))
    expected = model.generate(prompt, **GREEDY, stop_strings=STOP, tokenizer=chat_tokenizer)
    assert expected.shape[1] < 7 + 16
    replaced.generation_config.stop_strings = STOP
    assert torch.equal(replaced.generate(inputs=prompt, heads=folder, **GREEDY, tokenizer=chat_tokenizer), expected)


# Settings of a generation config; transformers switches a setting off that is given as None.
OWN: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "stop_strings": {"stop_strings": STOP},
    "return_dict_in_generate": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("name", OWN)
def test_what_is_given_as_none_is_switched_off(
    name: str, model: Any, folder: str, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(7)
    monkeypatch.setattr(model, "generation_config", GenerationConfig(**OWN[name]))
    expected = model.generate(prompt, **GREEDY, **{name: None}, tokenizer=chat_tokenizer)
    of_the_model = model.generate(prompt, **GREEDY, tokenizer=chat_tokenizer)
    assert type(of_the_model) is not type(expected) or not torch.equal(of_the_model, expected)
    found = run(model, folder, {"input_ids": prompt, "token_type_ids": None}, **GREEDY, **{name: None})
    assert torch.equal(found, expected)
    found = run(model, folder, {"input_ids": prompt}, **GREEDY, tokenizer=chat_tokenizer)
    assert type(found) is type(of_the_model)
    assert torch.equal(torch.as_tensor(getattr(found, "sequences", found)), getattr(of_the_model, "sequences", found))


def test_the_folder(heads: DraftHeads, folder: str, tmp_path: Path) -> None:
    files = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
    assert files == [
        "config.json",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "model.safetensors",
    ]
    published = write_folder(heads, tmp_path / "heads", at="org/heads")
    code = (Path(published) / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert 'HEADS = "org/heads"' in code
    assert published not in code
    assert isinstance(DraftHeads.from_pretrained(folder), type(heads))


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ("1.2.3", "draftsmith==1.2.3"),
        ("0.1.0.dev0", "draftsmith<=0.1.0"),
        ("2.0rc1", "draftsmith<=2.0"),
        ("0.1.0.dev3+g12ab", "draftsmith<=0.1.0"),
    ],
)
def test_requirements_are_pinned_to_this_package(
    installed: str, line: str, heads: DraftHeads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.heads.formats.custom_generate.version", lambda _: installed)
    files = export_heads(CustomGenerateFolder(), heads).files
    assert files["custom_generate/requirements.txt"] == f"{line}\n"
    (tmp_path / "requirements.txt").write_text(f"{line}\n")
    stock: Any = dynamic_module_utils.importlib.metadata
    monkeypatch.setattr(stock, "version", lambda _: installed)
    dynamic_module_utils.check_python_requirements(str(tmp_path))
    monkeypatch.setattr(stock, "version", lambda _: "3.0")
    with pytest.raises(ImportError, match=line):
        dynamic_module_utils.check_python_requirements(str(tmp_path))


def test_no_file_names_a_folder_of_the_authors_machine(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "mine" / "chat")
    target = Target(AutoModelForCausalLM.from_pretrained(tmp_path / "mine" / "chat"))
    folder = write_folder(tiny_heads("eagle3", target), tmp_path / "out")
    for file in Path(folder).rglob("*"):
        assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes(), file
    assert DraftHeads.from_pretrained(folder).config.target_name_or_path == "chat"


def test_heads_that_are_not_there_are_to_be_named(model: Any, folder: str) -> None:
    inputs = {"input_ids": random_prompt(7)}
    with pytest.raises(ValueError, match=r"not written for the hub\. Name the heads: .*heads="):
        run(model, folder, inputs, **GREEDY, heads=None)
    with pytest.raises(ValueError, match=r"nowhere/at/all does not exist.*Name the heads"):
        run(model, folder, inputs, **GREEDY, heads="nowhere/at/all")


def test_heads_with_an_adapter_are_refused(model: Any) -> None:
    heads = tiny_heads("medusa", Target.of(model))
    heads.config.target_adapter = "adapter"
    with pytest.raises(ValueError, match="for a target with an adapter"):
        export_heads(CustomGenerateFolder(), heads)
