"""EAGLE-3 in GGUF: what llama.cpp reads, written out here, and the way back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads
from draftsmith.heads.checkpoint import read_head_type
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import GgufEagle3
from draftsmith.heads.formats.published import open_published
from draftsmith.inference import Target
from tests.heads.formats.round_trip import (
    assert_same_heads,
    change,
    export_heads,
    import_heads,
    publish,
    refusal_of,
    write,
)
from tests.heads.tiny_heads import plain_eagle3
from tests.tiny_targets import tiny_target

KNOWN = GgufEagle3()


def test_quantized_files_are_read_as_float32(target: Target, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    heads = plain_eagle3(target, draft_vocab_size=40)
    published = publish(KNOWN, heads)
    writer = gguf.GGUFWriter(tmp_path / "heads.gguf", "eagle3")
    kinds = gguf.GGMLQuantizationType
    for name, x in published.items():
        kind = kinds.Q8_0 if x.dim() == 2 else kinds.I64 if x.dtype == torch.int64 else kinds.F32
        writer.add_tensor(name, gguf.quantize(x.numpy(), kind) if kind == kinds.Q8_0 else x.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = open_published(str(tmp_path)).tensors
    found = import_heads(KNOWN, type(published)("x", published.config, "", tensors), target)
    assert found.dtype == torch.float32
    for name, x in heads.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], x, rtol=0, atol=float(x.float().abs().max()) / 100)


def test_llama3_scaling_is_a_tensor_of_divisors(tmp_path: Path) -> None:
    target = Target(tiny_target("llama-llama3"))
    heads = plain_eagle3(target)
    published = open_published(str(write(export_heads(KNOWN, heads), tmp_path)))
    assert_same_heads(import_heads(KNOWN, published, target), heads)
    assert KNOWN.read(published, target).settings["rope_parameters"] == heads.config.rope_parameters
    factors = published["rope_freqs.weight"]
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)
    other = change(published, {"rope_freqs.weight": factors + 1})
    assert "rope_freqs.weight is not the scaling" in refusal_of(KNOWN, other, target)


def test_borrowed_tensors(target: Target) -> None:
    """Converters copy the target's embeddings; a file without an output has the target's."""
    heads: Any = plain_eagle3(target)
    with torch.no_grad():
        heads.lm_head.weight.copy_(target.lm_head_weight())
    published = publish(KNOWN, heads)
    copied = change(published, {"token_embd.weight": target.embed_tokens.weight.detach().half()})
    assert_same_heads(import_heads(KNOWN, copied, target), heads)
    assert_same_heads(import_heads(KNOWN, change(published, {"output.weight": None}), target), heads)


class TestFiles:
    def test_a_file_itself(self, target: Target, tmp_path: Path) -> None:
        heads = plain_eagle3(target)
        folder = write(export_heads(KNOWN, heads), tmp_path)
        file = folder / "eagle3.gguf"
        assert_same_heads(import_heads(KNOWN, open_published(str(file)), target), heads)
        assert read_head_type(str(file)) is None
        assert_same_heads(DraftHeads.from_pretrained(file, target=target), heads)
        with pytest.raises(ValueError, match=rf"EAGLE-3 heads in GGUF\. .*target=model.*{file}"):
            DraftHeads.from_pretrained(file)

    def test_a_truncated_file(self, target: Target, tmp_path: Path) -> None:
        folder = write(export_heads(KNOWN, plain_eagle3(target)), tmp_path)
        file = folder / "eagle3.gguf"
        file.write_bytes(file.read_bytes()[:-50])
        with pytest.raises(ValueError, match=r"eagle3\.gguf is no GGUF file"):
            open_published(str(folder))
