"""Checkpoints of other projects, by what their folders hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from heads import DraftHeads

EAGLE1 = ["fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight", "embed_tokens.weight"]
EAGLE3 = ["fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"]
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CASES: dict[str, tuple[dict[str, Any] | None, str, list[str], str]] = {
    "eagle, bin": (LLAMA | {"num_hidden_layers": 1}, "pytorch_model.bin", EAGLE1, "EAGLE-1"),
    "eagle, weights elsewhere": (LLAMA | {"num_hidden_layers": 1}, "", [], "EAGLE-1"),
    "eagle for vLLM": ({"architectures": ["EagleLlamaForCausalLM"]}, "", [], "EAGLE-1"),
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
    "speculators": ({"speculators_model_type": "eagle3"}, "model.safetensors", EAGLE3, "speculators"),
    "dflash": ({"architectures": ["DFlashDraftModel"]}, "", [], "DFlash"),
    "medusa v1": ({"medusa_num_heads": 2}, "medusa_lm_head.pt", ["0.0.linear.weight", "0.1.weight"], "Medusa"),
    "medusa, without a config": (None, "medusa_lm_head.safetensors", ["0.0.linear.weight"], "Medusa"),
    "medusa of vLLM": ({"architectures": ["MedusaModel"]}, "model.safetensors", ["blocks.0.layers.0.weight"], "Medusa"),
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
    with pytest.raises(ValueError, match=rf"holds .*{format_name}.*; .*written by DraftHeads\.save_pretrained\. "):
        DraftHeads.from_pretrained(tmp_path)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Shout:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"midlayer.fc": Shout()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        DraftHeads.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"head_type None; this release knows .* Is this a directory written by"):
        DraftHeads.from_pretrained(tmp_path)
