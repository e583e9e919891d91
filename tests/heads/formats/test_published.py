"""Checkpoints are opened where they lie: in subfolders and revisions, sharded, of old and new torch, damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats import published as published_module
from draftsmith.heads.formats.published import open_published
from draftsmith.heads.formats.registry import recognize
from draftsmith.heads.formats.stitched_mtp import VLLMMTP
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target
from tests.heads.formats.test_native_mtp import (
    name_as_deepseek,
    name_as_qwen,
    random_modules,
    tiny_mixture,
    write_checkpoint,
)
from tests.tiny_targets import tiny_target

TENSORS = {"fc.weight": torch.randn(6, 4), "scale": torch.tensor(2.0)}


class TestHubKeywords:
    """subfolder, revision and token reach every file of a checkpoint."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
        """File -> the keywords that it was looked for with."""
        found: dict[str, dict[str, Any]] = {}
        stock: Any = published_module.cached_file

        def look(path: str, name: str, **keywords: Any) -> Any:
            found[name] = {key: x for key, x in keywords.items() if key in ("revision", "token", "subfolder")}
            return stock(path, name, **keywords)

        monkeypatch.setattr(published_module, "cached_file", look)
        return found

    @pytest.mark.parametrize("loads", [DraftHeads.from_pretrained, MTPHeads.from_target_checkpoint])
    def test_mtp_modules(self, loads: Any, tmp_path: Path, asked: dict[str, Any]) -> None:
        model = tiny_mixture("glm4_moe")
        write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), tmp_path / "below")
        (tmp_path / "below" / "config.json").write_text('{"architectures": ["Glm4MoeForCausalLM"]}')
        hub = {"subfolder": "below", "revision": "main", "token": "mine"}
        heads = loads(tmp_path, target=Target.of(model), **hub)
        assert isinstance(heads, MTPHeads)
        assert all(keywords == hub for keywords in asked.values())
        assert any(name.endswith("safetensors") for name in asked)


@pytest.mark.parametrize("is_new", [True, False], ids=["archive", "before torch 1.6"])
class TestPickles:
    def test_both_formats_of_torch_are_read(self, is_new: bool, tmp_path: Path) -> None:
        torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_new)
        found = open_published(str(tmp_path))
        assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in TENSORS.items()}
        assert all(torch.equal(found[name], x) for name, x in TENSORS.items())

    def test_a_truncated_file_is_named(self, is_new: bool, tmp_path: Path) -> None:
        file = tmp_path / "pytorch_model.bin"
        torch.save(TENSORS, file, _use_new_zipfile_serialization=is_new)
        whole = file.read_bytes()
        for size in (*range(0, len(whole), 23), len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=r"pytorch_model\.bin (is damaged|holds more than tensors)"):
                open_published(str(tmp_path))

    def test_no_code_is_run(self, is_new: bool, tmp_path: Path) -> None:
        class Shout:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "ran",))

        torch.save({"fc": Shout()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_new)
        with pytest.raises(ValueError, match="holds more than tensors"):
            open_published(str(tmp_path))
        assert not (tmp_path / "ran").exists()


NESTED = {
    "Glm4vMoeForConditionalGeneration": (name_as_deepseek, "model.layers.", "model.language_model.layers."),
    "Qwen3_5MoeForConditionalGeneration": (name_as_qwen, "mtp.", "mtp."),
}


@pytest.mark.parametrize("architecture", NESTED)
def test_mtp_modules_beside_a_nested_model_are_recognized(architecture: str, tmp_path: Path) -> None:
    """The text model stands below `language_model` there."""
    names, prefix, nested = NESTED[architecture]
    model = tiny_mixture("glm4_moe") if names is name_as_deepseek else tiny_target("qwen3", num_hidden_layers=2)
    tensors = {name.replace(prefix, nested): x for name, x in names(random_modules(model, 1), 2).items()}
    folder = write_checkpoint(model, tensors, tmp_path)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    opened = open_published(str(folder), on_meta=True)
    assert isinstance(recognize(opened), VLLMMTP)
    heads = DraftHeads.from_pretrained(folder, target=model)
    assert isinstance(heads, MTPHeads)
    assert torch.equal(heads.state_dict()["blocks.0.eh_proj.weight"], random_modules(model, 1)[0].parts["eh_proj"])


INDEX = "model.safetensors.index.json"
DAMAGED = [
    ("model.safetensors", "no weights", r"model\.safetensors is damaged or truncated"),
    (INDEX, "{", r"index\.json is not JSON"),
    *(
        (INDEX, f'{{"weight_map": {places}}}', "no weight_map of tensors and their files")
        for places in ("[]", '{"x": 3}')
    ),
    (INDEX, '{"weight_map": {"x": "y.safetensors"}}', r"index\.json names the file y\.safetensors, which is not there"),
]


class TestIndex:
    @pytest.mark.parametrize(("file", "content", "message"), DAMAGED)
    def test_a_damaged_file_is_named(self, file: str, content: str, message: str, tmp_path: Path) -> None:
        (tmp_path / file).write_text(content)
        with pytest.raises(ValueError, match=message):
            open_published(str(tmp_path))

    @pytest.mark.parametrize("shard", ["../other.safetensors", "a/../../x.bin", "ABSOLUTE", "..\\x.bin"])
    def test_files_outside_the_checkpoint_are_refused(self, shard: str, tmp_path: Path) -> None:
        save_file(TENSORS, tmp_path / "other.safetensors")
        folder = tmp_path / "heads"
        folder.mkdir()
        shard = str(tmp_path / "other.safetensors") if shard == "ABSOLUTE" else shard
        file = folder / INDEX
        file.write_text(json.dumps({"weight_map": {"fc.weight": shard}}))
        with pytest.raises(ValueError, match="may only name files") as refusal:
            open_published(str(folder))
        assert repr(shard) in str(refusal.value)

    def test_a_lost_file_of_mtp_modules_is_named(self, tmp_path: Path) -> None:
        model = tiny_mixture("glm4_moe")
        folder = write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), tmp_path)
        for file in Path(folder).glob("*.safetensors"):
            file.write_bytes(b"no weights")
        with pytest.raises(ValueError, match=r"\.safetensors is damaged or truncated"):
            MTPHeads.from_target_checkpoint(folder, model)
        for file in Path(folder).glob("*.safetensors"):
            file.unlink()
        with pytest.raises(ValueError, match=r"which is not there|has no model\.safetensors"):
            MTPHeads.from_target_checkpoint(folder, model)
