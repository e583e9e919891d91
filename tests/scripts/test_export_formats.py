"""Formats whose folders are not config.json and one safetensors file, through the programs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads import DraftHeads
from draftsmith.heads.draft_vocabulary import COUNTS_FILE
from draftsmith.heads.formats.gguf_file import read_gguf, write_gguf
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.scripts import export_heads
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.heads.formats.test_stitched_mtp import load_target
from tests.scripts.test_import_export import HEADS, call, come_back
from tests.tiny_targets import random_prompt


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


def test_a_folder_that_transformers_runs(tmp_path: Path, chat_target: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    call(export_heads, heads=HEADS / "eagle3", target=CHAT_TARGET, format="custom_generate", output=tmp_path / "out")
    prompt = random_prompt(9, vocab_size=4096)
    options = {"max_new_tokens": 12, "do_sample": False}
    model: Any = AutoModelForCausalLM.from_pretrained(CHAT_TARGET, dtype=torch.float32).eval()
    found = model.generate(prompt, custom_generate=out, heads=out, trust_remote_code=True, **options)
    assert torch.equal(found, chat_target.generate(prompt, **options))
    assert list(model._draftsmith_heads) == [out]
    told, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    code = "model.generate(**inputs, custom_generate={0}, heads={0}, trust_remote_code=True)"
    assert code.format(repr(out)) in told
    assert code.format("'out'") in card
    for place in (str(tmp_path), str(REPOSITORY)):
        assert place not in card
        assert place not in (tmp_path / "out" / "custom_generate" / "generate.py").read_text()


def test_counts_of_tokens_go_where_this_library_reads(tmp_path: Path) -> None:
    """An engine would take their file for weights."""
    heads: DraftHeads = DraftHeads.from_pretrained(HEADS / "mtp")
    heads.token_counts = torch.arange(4096)
    heads.save_pretrained(tmp_path / "heads")
    for name in ("custom_generate", "speculators"):
        place = HEADS / "eagle3" if name == "speculators" else tmp_path / "heads"
        call(export_heads, heads=place, target=CHAT_TARGET, format=name, output=tmp_path / name)
    limited = DraftHeads.from_pretrained(tmp_path / "custom_generate", draft_vocab_size=100)
    assert torch.equal(limited.token_counts, heads.token_counts)
    assert not (tmp_path / "speculators" / COUNTS_FILE).exists()


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
    with pytest.raises(SystemExit, match="would upload the target's files"):
        call(export_heads, **options, push_to_hub="true", repo_id="me/mtp")
    assert not (tmp_path / "up").exists()
