"""Formats whose folders are not config.json and one safetensors file, through the programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.gguf_file import read_gguf, write_gguf
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.scripts import export_heads, import_heads
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.heads.formats.test_stitched_mtp import load_target

HEADS = REPOSITORY / "examples" / "heads"


def call(program: Any, **options: Any) -> None:
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    assert program.main(words) == 0


def come_back(folder: Path, heads: Path, output: Path) -> bool:
    """Whether the imported heads are the exported ones, bit for bit."""
    call(import_heads, checkpoint=folder, target=CHAT_TARGET, output=output)
    one, other = (DraftHeads.from_pretrained(path).state_dict() for path in (heads, output))
    return one.keys() == other.keys() and all(torch.equal(x, other[name].to(x.dtype)) for name, x in one.items())


def test_a_pickle_of_medusa(tmp_path: Path) -> None:
    call(export_heads, heads=HEADS / "medusa", target=CHAT_TARGET, format="medusa", output=tmp_path / "out")
    assert (tmp_path / "out" / "medusa_lm_head.pt").is_file()
    assert come_back(tmp_path / "out", HEADS / "medusa", tmp_path / "again")


def test_gguf_with_the_targets_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    file = tmp_path / "target.gguf"
    write_gguf(file, {"general.architecture": "llama", **tokenizer}, {"x": torch.zeros(1)})
    call(
        export_heads,
        heads=HEADS / "eagle3",
        target=CHAT_TARGET,
        format="gguf",
        output=tmp_path / "out",
        target_gguf=file,
    )
    command = f"llama-server -m {file} -md {tmp_path / 'out'}/eagle3.gguf --spec-type draft-eagle3"
    assert command in capsys.readouterr().out
    metadata, _ = read_gguf(tmp_path / "out" / "eagle3.gguf")
    assert {name: metadata[name] for name in tokenizer} == tokenizer
    assert come_back(tmp_path / "out", HEADS / "eagle3", tmp_path / "again")


def test_mtp_in_the_targets_checkpoint(tmp_path: Path, chat_tokenizer: Any) -> None:
    model = tiny_mixture("glm4_moe")
    model.save_pretrained(tmp_path / "target")
    chat_tokenizer.save_pretrained(tmp_path / "target")
    source = load_target(tmp_path / "target")
    native = write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), tmp_path / "native")
    MTPHeads.from_target_checkpoint(native, source).save_pretrained(tmp_path / "heads")
    shutil.copytree(tmp_path / "target", tmp_path / "moved")  # the heads' own layer still names the first place
    call(export_heads, heads=tmp_path / "heads", target=tmp_path / "moved", format="vllm", output=tmp_path / "out")
    files = {file.name: file.is_symlink() for file in (tmp_path / "out").iterdir()}
    assert files["model-target.safetensors"]
    assert files["tokenizer.json"]
    assert not files["model-mtp.safetensors"]
    found = MTPHeads.from_target_checkpoint(tmp_path / "out", load_target(tmp_path / "out"))
    for name, tensor in DraftHeads.from_pretrained(tmp_path / "heads").state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    options = {"heads": tmp_path / "heads", "target": tmp_path / "target", "format": "vllm", "output": tmp_path / "up"}
    with pytest.raises(SystemExit, match="its links would upload the target's files: share the heads by themselves"):
        call(export_heads, **options, push_to_hub="true", repo_id="me/mtp")
    assert not (tmp_path / "up").exists()
