"""Checkpoints of other projects are told apart by what their folders hold, and never mistaken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.published import open_published
from draftsmith.heads.formats.registry import find_format, recognize

EAGLE1 = ["fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight", "embed_tokens.weight"]
EAGLE3 = ["fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
# Beside what this library writes itself: test_round_trip.py reads that.
CASES: dict[str, tuple[dict[str, Any] | None, str, list[str], str]] = {
    "eagle, bin": (LLAMA | {"num_hidden_layers": 1}, "pytorch_model.bin", EAGLE1, "EAGLE-1"),
    "eagle3, bin": (LLAMA, "pytorch_model.bin", EAGLE3, "EAGLE-3"),
    "eagle3, without a config": (None, "pytorch_model.bin", EAGLE3, "EAGLE-3"),
    "eagle3 by SpecForge": (
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4},
        "model.safetensors",
        EAGLE3,
        "EAGLE-3",
    ),
    "eagle3 of ModelOpt": (
        LLAMA,
        "model.safetensors",
        [name.replace("midlayer", "layers.0") for name in EAGLE3],
        "EAGLE-3",
    ),
    "eagle4": ({"architectures": ["LlamaForCausalLMEagle4"]}, "", [], "EAGLE-4"),
    "hydra": ({"hydra_num_heads": 4}, "hydra_lm_head.pt", ["0.0.linear.weight"], "Hydra"),
    "a target": (LLAMA | {"num_hidden_layers": 6}, "model.safetensors", ["model.embed_tokens.weight"], "whole model"),
}


@pytest.mark.parametrize(("config", "file", "names", "format_name"), CASES.values(), ids=CASES)
def test_a_published_checkpoint_is_named(
    config: dict[str, Any] | None, file: str, names: list[str], format_name: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: torch.zeros(2) for name in names}
    if file.endswith(".safetensors"):
        save_file(tensors, tmp_path / file)
    elif file:
        torch.save(tensors, tmp_path / file)
    found = recognize(open_published(str(tmp_path), on_meta=True))
    assert format_name in found.title
    with pytest.raises(ValueError, match=rf"holds .*{format_name}.*\. ") as refusal:
        DraftHeads.from_pretrained(tmp_path)
    told = str(refusal.value)
    assert (found.cure or f"draftsmith import --checkpoint {tmp_path}") in told
    assert ("Pass target=model" in told) == (found.cure is None)


def test_a_format_is_found_by_its_name_and_the_kind() -> None:
    assert find_format("vllm", "eagle3") is not find_format("vllm", "eagle")
    with pytest.raises(ValueError, match=r"got format 'onnx'; allowed are .*speculators"):
        find_format("onnx", "eagle")
    with pytest.raises(ValueError, match=r"eagle heads .* speculators, .*: choose eagle or vllm"):
        find_format("speculators", "eagle")
    with pytest.raises(ValueError, match=r"kangaroo heads .* vllm, .*: no engine serves .* custom_generate"):
        find_format("vllm", "kangaroo")
