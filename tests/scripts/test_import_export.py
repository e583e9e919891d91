"""Heads go out to an engine's format and come back through the programs.

The target is the embedded one with its trained heads, so that acceptance lengths mean something.
"""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.scripts import export_heads, import_heads
from draftsmith.scripts.shared.model_loading import load_heads
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import tiny_target

HEADS = REPOSITORY / "examples" / "heads"


def call(program: Any, **options: Any) -> None:
    words = [word for key, value in options.items() for word in (f"--{key}", *map(str, [value]))]
    assert program.main(words) == 0


def refusal_line(program: Any, options: dict[str, Any], tiny: Path) -> str:
    """The one line with which a program ends. The target TINY is the folder `tiny`."""
    with pytest.raises(SystemExit) as ended:
        call(program, **{key: tiny if value == "TINY" else value for key, value in options.items()})
    line = str(ended.value.code)
    name = program.__name__.rpartition(".")[2].partition("_")[0]
    assert line.startswith(f"draftsmith {name}: ")
    return line


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target's EAGLE-3 heads as vLLM reads them."""
    folder = tmp_path_factory.mktemp("published") / "heads"
    with redirect_stdout(io.StringIO()):
        call(export_heads, heads=HEADS / "eagle3", target=CHAT_TARGET, format="vllm", output=folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The folder of a random target with the embedded one's tokenizer."""
    folder = tmp_path / "tiny"
    tiny_target("llama", vocab_size=4096, num_hidden_layers=8).save_pretrained(folder)
    AutoTokenizer.from_pretrained(CHAT_TARGET).save_pretrained(folder)
    return folder


def test_out_and_back_is_the_same_heads(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {path.name for path in published.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    card = (published / "README.md").read_text()
    assert f"vllm serve {CHAT_TARGET} --speculative-config " in card
    assert f'"model": "{published}"' in card
    call(import_heads, checkpoint=published, target=CHAT_TARGET, output=tmp_path / "back")
    told = capsys.readouterr().out
    assert "published EAGLE-3 format" in told
    assert f"Wrote eagle3 heads, 15 tensors in bfloat16, to {tmp_path / 'back'}." in told
    one, other = (DraftHeads.from_pretrained(folder) for folder in (HEADS / "eagle3", tmp_path / "back"))
    assert one.config.feature_layers == other.config.feature_layers
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": "norm_output=perhaps"}, "--settings norm_output=perhaps"),
        ({"checkpoint": CHAT_TARGET}, "holds no heads in a format"),
        ({"target": "TINY"}, "hidden_size is 256"),
    ],
    ids=str,
)
def test_wrong_imports_are_one_line_and_write_nothing(
    changes: dict[str, Any], message: str, published: Path, tiny: Path, tmp_path: Path
) -> None:
    options = {"checkpoint": published, "target": CHAT_TARGET, "output": tmp_path / "out", **changes}
    assert message in refusal_line(import_heads, options, tiny)
    assert not (tmp_path / "out").exists()


def test_programs_take_published_heads_as_they_are(published: Path, chat_target: Any) -> None:
    target = Target(chat_target)
    heads = load_heads(str(published), target)
    assert heads.dtype == target.dtype
    assert heads.target is target


def test_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    call(export_heads, heads=HEADS / "eagle3", target=CHAT_TARGET, format="gguf", output=tmp_path / "gguf")
    file = (tmp_path / "gguf" / "eagle3.gguf").rename(tmp_path / "heads.gguf")
    call(import_heads, checkpoint=file, target=CHAT_TARGET, output=tmp_path / "back")
    one, other = (DraftHeads.from_pretrained(folder) for folder in (HEADS / "eagle3", tmp_path / "back"))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "onnx"}, "'onnx'"),
        ({"format": "speculators", "heads": "eagle"}, "speculators"),
        ({"target": "TINY"}, "hidden size 256"),
    ],
    ids=str,
)
def test_wrong_exports_are_one_line_and_write_nothing(
    changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    options = {"heads": "eagle3", "target": CHAT_TARGET, "format": "vllm", "output": tmp_path / "out", **changes}
    options["heads"] = HEADS / options["heads"]
    assert message in refusal_line(export_heads, options, tiny)
    assert not (tmp_path / "out").exists()


def test_heads_without_a_vocabulary_are_not_exported(tiny: Path, tmp_path: Path) -> None:
    target = Target(tiny_target("llama", vocab_size=4096, num_hidden_layers=8))
    heads = tiny_heads("eagle3", target, draft_vocab_size=40)
    heads.d2t.fill_(-1)
    heads.t2d.fill_(False)
    heads.save_pretrained(tmp_path / "heads")
    with pytest.raises(SystemExit, match="draft vocabulary"):
        call(export_heads, heads=tmp_path / "heads", target=tiny, format="vllm", output=tmp_path / "out")


def test_settings_that_do_not_come_back_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("draftsmith.heads.formats.eagle.eagle1._OWN", ("feature_noise", "embedding_scale"))
    heads = DraftHeads.from_pretrained(HEADS / "eagle")
    heads.config.ttt_steps += 1
    heads.save_pretrained(tmp_path / "heads")
    with pytest.raises(SystemExit, match="ttt_steps"):
        call(export_heads, heads=tmp_path / "heads", target=CHAT_TARGET, format="vllm", output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_does_not_come_back_is_not_written(published: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="does not give"):
        call(export_heads, heads=HEADS / "eagle", target=CHAT_TARGET, format="vllm", output=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_uploading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After a connection that broke, too; files of an export that was killed stay here."""

    class Hub:
        def create_repo(self, name: str, exist_ok: bool) -> Any:
            return type("Repository", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, folder_path: Path, repo_id: str, ignore_patterns: list[str]) -> str:
            if fails:
                raise OSError("the connection broke")
            files = [str(file.relative_to(folder_path)) for file in folder_path.rglob("*") if file.is_file()]
            return f"{repo_id} with {len(list(filter_repo_objects(files, ignore_patterns=ignore_patterns)))} files"

    monkeypatch.setattr(export_heads, "HfApi", Hub)
    output, fails = tmp_path / "out", True
    options = {"heads": HEADS / "eagle", "target": CHAT_TARGET, "output": output, "format": "sglang"}
    options |= {"push_to_hub": "true", "repo_id": "sglang-heads"}
    (output / ".incomplete" / "x").mkdir(parents=True)
    (output / ".incomplete" / "x" / "y").touch()
    with pytest.raises(SystemExit, match="the connection broke"):
        call(export_heads, **options)
    assert f"If that fails, repeat it: hf upload sglang-heads {output} ." in capsys.readouterr().out
    shutil.rmtree(output)
    fails = False
    call(export_heads, **options)
    assert "Uploaded to me/sglang-heads with 3 files" in capsys.readouterr().out
    card = (output / "README.md").read_text()
    assert not [place for place in (REPOSITORY, tmp_path) if str(place) in card]
