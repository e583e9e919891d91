"""MTP heads in a checkpoint of their target: the target's tensors stay, its modules are replaced."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.registry import find_format
from draftsmith.heads.formats.stitched_mtp import TransformersMTP
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target, generate
from tests.heads.formats.round_trip import export_heads, write
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.heads.test_contract import assert_same_tensors, config_of
from tests.tiny_targets import random_prompt


def train(heads: MTPHeads) -> MTPHeads:
    """Other weights, as after training."""
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(1.25)
    return heads


def load_target(path: Path, dtype: torch.dtype = torch.float32) -> Target:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return Target(model.eval())


@pytest.fixture(params=["deepseek_v3", "glm4_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Of a target with one MTP module, in a file of its own."""
    model = tiny_mixture(request.param)
    path = write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), tmp_path / "target")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    return path


def export(heads: MTPHeads, folder: Path, name: str = "vllm") -> Path:
    return write(export_heads(find_format(name, "mtp"), heads), folder)


def read_all(folder: Path) -> dict[str, list[str]]:
    """Every tensor of every file, as engines read them: name -> the files."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found.setdefault(name, []).append(file.name)
    return found


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_heads_come_back_and_the_target_is_as_it_was(checkpoint: Path, name: str, tmp_path: Path) -> None:
    target = load_target(checkpoint)
    heads = train(MTPHeads.from_target_checkpoint(checkpoint, target, num_steps=4))
    folder = export(heads, tmp_path / "out", name)
    again = load_target(folder)
    prompt = random_prompt(7)
    assert torch.equal(again.model(prompt).logits, target.model(prompt).logits)
    for found in (
        DraftHeads.from_pretrained(folder, target=target),
        MTPHeads.from_target_checkpoint(folder, again, num_steps=4),
    ):
        assert_same_tensors(dict(heads.state_dict()), dict(found.state_dict()))
        assert config_of(found)["num_steps"] == 4
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "tree": "dynamic"}
    texts = [generate(target, one, prompt, **options) for one in (heads, found.bind(target))]
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    assert texts[0].stats.accepted_histogram == texts[1].stats.accepted_histogram


def test_engines_find_each_tensor_once(checkpoint: Path, tmp_path: Path) -> None:
    heads = train(MTPHeads.from_target_checkpoint(checkpoint, load_target(checkpoint)))
    folder = export(heads, tmp_path / "out")
    found = read_all(folder)
    assert all(len(files) == 1 for files in found.values())
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert index == {name: file for name, (file,) in found.items()}
    assert found.keys() == read_all(checkpoint).keys()
    assert {file for (file,) in found.values()} == {"model-00001-of-00002.safetensors", "model-mtp.safetensors"}
    assert (folder / "model-00001-of-00002.safetensors").is_symlink()
    assert (folder / "tokenizer.json").is_symlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["num_nextn_predict_layers"] == 1
    assert (
        config["architectures"] == json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["architectures"]
    )


@pytest.mark.parametrize("num_modules", [0, 1])
def test_a_checkpoint_of_one_file(num_modules: int, tmp_path: Path) -> None:
    """Its old modules leave it; it gets another name, under which readers look for it in the index."""
    model = tiny_mixture("glm4_moe")
    modules = name_as_deepseek(random_modules(model, 1), 2)
    source = write_checkpoint(model, modules, tmp_path / "source")
    heads = train(MTPHeads.from_target_checkpoint(source, model))
    model.save_pretrained(tmp_path / "target")
    if num_modules:
        with safe_open(tmp_path / "target" / "model.safetensors", framework="pt") as opened:
            own = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        save_file(own | modules, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    target = load_target(tmp_path / "target")
    heads.bind(target)
    folder = export(heads, tmp_path / "out")
    assert not (folder / "model.safetensors").exists()
    assert (folder / "model-target.safetensors").is_symlink() == (num_modules == 0)
    assert all(len(files) == 1 for files in read_all(folder).values())
    assert_same_tensors(dict(heads.state_dict()), dict(DraftHeads.from_pretrained(folder, target=target).state_dict()))
    assert torch.equal(load_target(folder).model(random_prompt(7)).logits, target.model(random_prompt(7)).logits)


HAS_MTP = hasattr(Glm4MoeConfig(), "num_mtp_layers")


@pytest.mark.skipif(not HAS_MTP, reason="transformers has it from 5.24 on")
def test_transformers_drafts_with_the_modules(tmp_path: Path) -> None:
    """Of a target as deep as GLM-4.5-Air: its text is plain decoding's, and its drafts are ours."""
    model = tiny_mixture("glm4_moe", num_hidden_layers=46)
    path = write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 46), tmp_path / "target")
    target = load_target(path)
    heads = train(MTPHeads.from_target_checkpoint(path, target, zero_first_embedding=False))
    exported = export_heads(TransformersMTP(), heads)
    assert exported.notes == ("transformers applies each module once, so one module drafts one token a step.",)
    assert "use_mtp=True" in exported.python
    found = load_target(export(heads, tmp_path / "out", "transformers")).model
    prompt, options = random_prompt(7), {"max_new_tokens": 8, "do_sample": False}
    drafted = found.generate(prompt, use_mtp=True, **options)
    assert torch.equal(drafted, model.generate(prompt, **options))
    module = transformers.modeling_layers.MtpModel.from_pretrained(found)
    states = target.model(prompt, output_hidden_states=True).hidden_states[-1]
    cache = transformers.cache_utils.MtpCache(config=found.config.get_mtp_config())
    places = torch.arange(1, 7)[None]
    hidden = module.forward_layer(0, states[:, :-1], places, cache, input_ids=prompt[:, 1:])
    state = heads.start(1, 16, 4)
    ours = heads.extend(state, states[:, :-1], prompt[:, 1:], torch.tensor([6]), max_slots=6)
    torch.testing.assert_close(found.lm_head(hidden)[:, -1:], ours.logits, atol=1e-5, rtol=1e-4)


class TestStateOfLaterDepths:
    """vLLM gives depth 1 of GLM-4-MoE the state before the module's final norm; all others the state after it."""

    def write(self, family: str, format_name: str, folder: Path, **overrides: Any) -> Any:
        model = tiny_mixture(family)
        path = write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), folder)
        heads = MTPHeads.from_target_checkpoint(path, load_target(path), **overrides)
        return export_heads(find_format(format_name, "mtp"), heads)

    def test_the_trained_state_is_noted_where_vllm_passes_another(self, tmp_path: Path) -> None:
        (note,) = self.write("glm4_moe", "vllm", tmp_path).notes
        assert "For vLLM, train with norm_output false" in note

    @pytest.mark.parametrize(("family", "name"), [("glm4_moe", "sglang"), ("deepseek_v3", "vllm")])
    def test_elsewhere_only_one_state_is_served(self, family: str, name: str, tmp_path: Path) -> None:
        assert self.write(family, name, tmp_path).notes == ()
        with pytest.raises(ValueError, match=r"norm_output True \(these heads: False\)"):
            self.write(family, name, tmp_path, norm_output=False)


@pytest.mark.skipif(not HAS_MTP, reason="transformers has it from 5.24 on")
def test_a_target_of_another_depth_for_transformers(checkpoint: Path) -> None:
    heads = MTPHeads.from_target_checkpoint(checkpoint, load_target(checkpoint))
    with pytest.raises(ValueError, match=r"reads model.*target of 2 layers.*choose vllm"):
        export_heads(TransformersMTP(), heads)
