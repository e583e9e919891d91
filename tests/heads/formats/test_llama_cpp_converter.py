"""llama.cpp's own converter on our export, where a checkout of llama.cpp is at hand: the same file as ours.

    LLAMA_CPP=PATH pytest tests/heads/formats/test_llama_cpp_converter.py

The sources that the sdist of llama-cpp-python 0.3.36 brings were used (vendor/llama.cpp).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.gguf_file import read_gguf
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from tests.conftest import CHAT_TARGET, REPOSITORY

CHECKOUT = os.environ.get("LLAMA_CPP")
# It knows tokenizers by a hash, and asks for sentencepiece before it reads tokenizer.json.
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import conversion.base

def has_no_sentencepiece(self):
    raise FileNotFoundError

conversion.base.TextModel._set_vocab_sentencepiece = has_no_sentencepiece
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
script = sys.argv.pop(1) + "/convert_hf_to_gguf.py"
runpy.run_path(script, run_name="__main__")
"""


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def copy_target(folder: Path) -> Path:
    """The embedded target, with the keys that the converter reads."""
    shutil.copytree(CHAT_TARGET, folder)
    rope = json.loads((folder / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
    change_json(folder / "config.json", rope_theta=rope["rope_theta"])
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return folder


def convert(model: Path, file: Path, *options: str) -> Path:
    """Runs the converter: a GGUF file in float32."""
    words = [sys.executable, "-c", CONVERT, str(CHECKOUT), str(model), "--outtype", "f32", "--outfile", str(file)]
    subprocess.run([*words, *options], check=True, cwd=file.parent, capture_output=True)
    return file


@pytest.mark.skipif(CHECKOUT is None, reason="LLAMA_CPP names no checkout of llama.cpp")
def test_the_converter_writes_what_we_write(chat_target: Any, tmp_path: Path) -> None:
    target = Target(chat_target)
    heads: Any = DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / "eagle3", target=target).float()
    kind, state = heads.config.head_type, heads.state_dict()
    (tmp_path / "heads").mkdir()
    find_format("vllm", kind).write(heads.config, state, target).save(tmp_path / "heads")
    target_folder = copy_target(tmp_path / "target")
    theirs_file = convert(tmp_path / "heads", tmp_path / "theirs.gguf", "--target-model-dir", str(target_folder))
    metadata, theirs = read_gguf(theirs_file)
    ours = find_format("gguf", kind).with_target_file(str(theirs_file)).write(heads.config, state, target)
    assert theirs.keys() == ours.tensors.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours.tensors[name].to(tensor.dtype)), name
    needed = {name for name in metadata if not name.startswith("general.")}
    assert needed <= ours.config.keys()
    for name in needed:
        value = metadata[name]
        expected = pytest.approx(value) if isinstance(value, float) else value  # stored in float32
        assert ours.config[name] == expected, name

    (tmp_path / "read").mkdir()
    shutil.copy(theirs_file, tmp_path / "read")
    again = DraftHeads.from_pretrained(tmp_path / "read", target=target)
    for name, tensor in state.items():
        assert torch.equal(again.state_dict()[name], tensor), name
