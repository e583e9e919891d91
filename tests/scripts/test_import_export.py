"""Heads go out to an engine's format and come back through the programs; wrong conventions are named.

The target is the embedded one with its trained heads, so that acceptance lengths mean something.
"""

import ast
import io
import json
import shlex
import shutil
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Exported
from draftsmith.inference import Target
from draftsmith.scripts import export_heads, import_heads
from draftsmith.scripts.conversion import conventions
from draftsmith.scripts.conversion.conventions import Convention, advise, measure_cross_entropy
from draftsmith.scripts.conversion.serving_card import fill_commands, fill_python
from draftsmith.scripts.shared.model_loading import load_heads, load_target
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.heads.tiny_heads import tiny_heads
from tests.training.runner import words_of

HEADS = REPOSITORY / "examples" / "heads"


def call(program: Any, **options: Any) -> None:
    program.main(words_of(**options))


def come_back(folder: Path, heads: Path, output: Path) -> bool:
    """Whether the imported heads are the exported ones, bit for bit."""
    call(import_heads, checkpoint=folder, target=CHAT_TARGET, output=output)
    one, other = (DraftHeads.from_pretrained(path).state_dict() for path in (heads, output))
    return one.keys() == other.keys() and all(torch.equal(x, other[name].to(x.dtype)) for name, x in one.items())


def refusal_line(program: Any, options: dict[str, Any], small_chat: str) -> str:
    """The one line with which a program ends. The target TINY is the folder `small_chat`."""
    with pytest.raises(SystemExit) as ended:
        call(program, **{key: small_chat if value == "TINY" else value for key, value in options.items()})
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


def test_out_and_back_is_the_same_heads(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in published.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    card = (published / "README.md").read_text()
    assert f"vllm serve {CHAT_TARGET} --speculative-config " in card
    assert f'"model": "{published}"' in card
    assert come_back(published, HEADS / "eagle3", tmp_path / "back")
    told = capsys.readouterr().out
    assert "published EAGLE-3 format" in told
    assert f"Wrote eagle3 heads, 15 tensors in bfloat16, to {tmp_path / 'back'}." in told
    one, other = (DraftHeads.from_pretrained(folder) for folder in (HEADS / "eagle3", tmp_path / "back"))
    assert one.config.feature_layers == other.config.feature_layers


@pytest.mark.ci
@pytest.mark.slow  # decodes with every convention
def test_the_program_names_the_cure_and_takes_it(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer ids counted from the layer after, as SpecForge writes them."""
    monkeypatch.setattr(conventions, "QUESTIONS", conventions.QUESTIONS[:2])
    folder = tmp_path / "shifted"
    shutil.copytree(published, folder)
    config = json.loads((folder / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"checkpoint": folder, "target": CHAT_TARGET, "output": tmp_path / "out", "check": "true"}
    call(import_heads, **options)
    told = capsys.readouterr()
    assert "note: layer ids [1, 7, 12] are the usual ones less one" in told.out
    assert "  they are as they were read\n" in told.out
    assert told.err.strip().endswith("Import again with --settings feature_layers=[2,8,13]")
    assert DraftHeads.from_pretrained(tmp_path / "out").feature_layers == (1, 7, 12)
    call(import_heads, **options, settings="feature_layers=[2,8,13]")
    assert "warning" not in capsys.readouterr().err
    assert DraftHeads.from_pretrained(tmp_path / "out").feature_layers == (2, 8, 13)


def test_the_cross_entropy_is_the_slow_one(published: Path, chat_target: Any) -> None:
    """Slot t of step k predicts t + 2 + k, and only tokens after the prompt count."""
    target = Target(chat_target)
    heads = DraftHeads.from_pretrained(published, target=target, dtype=torch.float32)
    ids = torch.randint(5, 4000, (1, 12), generator=torch.Generator().manual_seed(0))
    found = measure_cross_entropy(target, heads, [ids], [5])
    output = chat_target(ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[layer] for layer in heads.feature_layers], dim=-1)
    expected = []
    for k, step in enumerate(heads.unroll(features, ids)[:3]):
        for position in range(5, 12):
            teacher = output.logits[0, position - 1, heads.draft_token_ids].softmax(-1)
            drafted = step.head(step.hidden[0, position - 2 - k]).log_softmax(-1)
            expected.append(-(teacher * drafted).sum())
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_heads_of_another_target_are_doubted() -> None:
    advice = advise([Convention("they are as they were read", {}, torch.tensor([8.0, 9.0]))], 1.1)
    assert advice is not None
    assert "1.10 tokens" in advice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": "norm_output"}, "--settings norm_output:"),
        ({"settings": "norm_output=perhaps"}, "--settings norm_output=perhaps"),
        ({"settings": "norm_outputs=true"}, "'norm_outputs'"),
        ({"checkpoint": "nowhere/at/all"}, "nowhere/at/all"),
        ({"checkpoint": HEADS / "eagle3"}, str(HEADS / "eagle3")),
        ({"checkpoint": CHAT_TARGET}, "whole model"),
        ({"target": "TINY"}, "hidden_size is 256"),
    ],
    ids=str,
)
def test_wrong_imports_are_one_line_and_write_nothing(
    changes: dict[str, Any], message: str, published: Path, small_chat: str, tmp_path: Path
) -> None:
    options = {"checkpoint": published, "target": CHAT_TARGET, "output": tmp_path / "out", **changes}
    assert message in refusal_line(import_heads, options, small_chat)
    assert not (tmp_path / "out").exists()


def test_programs_take_published_heads_as_they_are(published: Path, chat_target: Any) -> None:
    target = Target(chat_target)
    heads = load_heads(str(published), target)
    assert heads.dtype == target.dtype
    assert heads.target is target


def test_one_gguf_file_is_a_checkpoint(tmp_path: Path) -> None:
    heads = DraftHeads.from_pretrained(HEADS / "eagle3")
    heads.config.rms_norm_eps = torch.tensor(1e-5).item()  # 9.999999747378752e-06, as heads for a GGUF target have it
    heads.save_pretrained(tmp_path / "heads")
    call(export_heads, heads=tmp_path / "heads", target=CHAT_TARGET, format="gguf", output=tmp_path / "gguf")
    file = (tmp_path / "gguf" / "eagle3.gguf").rename(tmp_path / "heads.gguf")
    assert come_back(file, HEADS / "eagle3", tmp_path / "back")


def test_an_import_does_not_replace_the_checkpoint(published: Path) -> None:
    before = (published / "config.json").read_text()
    with pytest.raises(SystemExit, match="is not empty"):
        call(import_heads, checkpoint=published, target=CHAT_TARGET, output=published)
    assert (published / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "onnx"}, "'onnx'"),
        ({"heads": "kangaroo"}, "kangaroo"),
        ({"format": "speculators", "heads": "eagle"}, "speculators"),
        ({"repo_id": "me/heads"}, "--repo_id"),
        ({"output": HEADS}, str(HEADS)),
        ({"target": "TINY"}, "hidden size 256"),
    ],
    ids=str,
)
def test_wrong_exports_are_one_line_and_write_nothing(
    changes: dict[str, Any], message: str, small_chat: str, tmp_path: Path
) -> None:
    options = {"heads": "eagle3", "target": CHAT_TARGET, "format": "vllm", "output": tmp_path / "out", **changes}
    options["heads"] = HEADS / options["heads"]
    assert message in refusal_line(export_heads, options, small_chat)
    assert not (tmp_path / "out").exists()


def test_heads_without_a_vocabulary_are_not_exported(small_chat: str, tmp_path: Path) -> None:
    heads = tiny_heads("eagle3", load_target(small_chat)[0], draft_vocab_size=40)
    heads.d2t.fill_(-1)
    heads.t2d.fill_(False)
    heads.save_pretrained(tmp_path / "heads")
    with pytest.raises(SystemExit, match="draft vocabulary"):
        call(export_heads, heads=tmp_path / "heads", target=small_chat, format="vllm", output=tmp_path / "out")


def test_settings_that_do_not_come_back_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("draftsmith.heads.formats.eagle.eagle1._OWN", ("feature_noise", "embedding_scale"))
    heads = DraftHeads.from_pretrained(HEADS / "eagle")
    heads.config.ttt_steps += 1
    heads.save_pretrained(tmp_path / "heads")
    with pytest.raises(SystemExit, match="ttt_steps"):
        call(export_heads, heads=tmp_path / "heads", target=CHAT_TARGET, format="vllm", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_are_quoted_in_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with blanks and quotes, as one word for a shell, as JSON inside a word, and as a string of Python."""
    folder = tmp_path / """my "heads" of Ann's"""
    call(export_heads, heads=HEADS / "eagle", target=CHAT_TARGET, format="vllm", output=folder)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  vllm serve"))
    words = shlex.split(line)
    assert words[:4] == ["vllm", "serve", str(CHAT_TARGET), "--speculative-config"]
    assert json.loads(words[4])["model"] == str(folder)
    exported = Exported({}, {}, commands=("run --in {heads}/x.gguf {target}",), python="load({heads}, {target})")
    names = {"heads": str(folder), "target": "{heads}"}
    (command,) = fill_commands(exported, **names)
    assert shlex.split(command) == ["run", "--in", f"{folder}/x.gguf", "{heads}"]
    assert fill_python(exported, **names) == f"load({str(folder)!r}, '{{heads}}')"


@pytest.mark.parametrize(("kind", "is_eagle3"), [("eagle", False), ("eagle3", True)])
def test_the_authors_code_is_python(
    kind: str, is_eagle3: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments as their EaModel.from_pretrained has them."""
    call(export_heads, heads=HEADS / kind, target=CHAT_TARGET, format="eagle", output=tmp_path / "out")
    told = capsys.readouterr().out
    assert "Serve them with" not in told
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (told.partition("Run them with:\n")[2], card.partition("```python\n")[2].partition("```")[0]):
        code = ast.parse(textwrap.dedent(text))
        (found,) = (
            node
            for node in ast.walk(code)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "EaModel.from_pretrained"
        )
        arguments = {one.arg: ast.literal_eval(one.value) for one in found.keywords}
        assert arguments["base_model_path"] == str(CHAT_TARGET)
        assert arguments["ea_model_path"] == str(tmp_path / "out")
        assert arguments["use_eagle3"] is is_eagle3


def test_what_does_not_come_back_is_not_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(SystemExit, match="does not give"):
        call(export_heads, heads=HEADS / "eagle", target=CHAT_TARGET, format="vllm", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_uploading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Hub:
        def create_repo(self, name: str, exist_ok: bool) -> Any:
            assert exist_ok
            return type("Repository", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, folder_path: Path, repo_id: str, ignore_patterns: list[str]) -> str:
            if fails:
                raise OSError("the connection broke")
            files = [str(file.relative_to(folder_path)) for file in folder_path.rglob("*") if file.is_file()]
            return f"{repo_id} with {len(list(filter_repo_objects(files, ignore_patterns=ignore_patterns)))} files"

    monkeypatch.setattr(export_heads, "HfApi", Hub)
    output = tmp_path / "out"
    options = {"heads": HEADS / "eagle", "target": CHAT_TARGET, "output": output, "format": "sglang"}
    options |= {"push_to_hub": "true", "repo_id": "sglang-heads"}
    (output / ".incomplete" / "x").mkdir(parents=True)  # an export was killed
    (output / ".incomplete" / "x" / "y").touch()
    command, fails = f"hf upload sglang-heads {output} .", True
    with pytest.raises(SystemExit, match="the connection broke"):
        call(export_heads, **options)
    assert f"If that fails, repeat it: {command}" in capsys.readouterr().out
    shutil.rmtree(output)
    local = {**options, "heads": HEADS / "eagle3", "format": "speculators"}
    with pytest.raises(SystemExit, match=r"config\.json .*hub id"):
        call(export_heads, **local)
    assert not output.exists()
    fails = False
    call(export_heads, **options)
    told = capsys.readouterr().out
    assert "Uploaded to me/sglang-heads with 3 files" in told
    assert f"--speculative-draft-model-path {tmp_path / 'out'}" in told
    card = (output / "README.md").read_text()
    assert "--speculative-draft-model-path sglang-heads" in card
    assert str(REPOSITORY) not in card
    assert str(tmp_path) not in card
