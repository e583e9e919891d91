"""SGLang's own loader reads our exports on the CPU: each of its parameters is a tensor of ours, and none is left over.

`make test-engines` makes its environment and runs these; elsewhere SGLANG_PYTHON names a Python that has it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Exported
from draftsmith.heads.formats.registry import find_format
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target
from tests.conftest import CHAT_TARGET
from tests.engines.environments.running import run_worker
from tests.engines.learning import load_trained
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.heads.formats.test_stitched_mtp import load_target, train
from tests.heads.tiny_heads import tiny_heads

PYTHON = os.environ.get("SGLANG_PYTHON", "")
SPARK = {"block_size": 4, "predicts_at_anchor": True, "markov_rank": 6}
EMBEDDING = "model.embed_tokens.weight"
BORROWED = {EMBEDDING, "lm_head.weight"}
MASK_TOKEN = 77

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no Python with SGLang: run `make test-engines`"),
    pytest.mark.timeout(1800),
]


def load_into_sglang(folder: Path, target: Path, algorithm: str, **environment: str) -> tuple[Any, dict[str, Tensor]]:
    """What its worker found out, and the parameters of its draft model."""
    job = {"target": str(target), "heads": str(folder / "heads"), "algorithm": algorithm}
    run_worker(PYTHON, "sglang_worker.py", job, folder, ".", **environment)
    found = json.loads((folder / "loaded.json").read_text(encoding="utf-8"))
    return found, load_file(folder / "loaded.safetensors")


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under SGLang's names: q, k and v are one matrix, gate and up too, and the experts are stacked.

    >>> list(fuse({"mlp.gate_proj.weight": torch.zeros(1, 1), "mlp.up_proj.weight": torch.zeros(1, 1)}))
    ['mlp.gate_up_proj.weight']
    """
    rows: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: re.sub("q_proj", "a", name)):  # q, k, v; gate, up
        fused = re.sub(r"\.([qkv])_proj\.", ".qkv_proj.", name)
        fused = re.sub(r"(gate|up)_proj\.", "gate_up_proj.", fused)
        fused = re.sub(r"experts\.(\d+)\.gate_up_proj\.weight", r"experts.w13_weight.\1", fused)
        fused = re.sub(r"experts\.(\d+)\.down_proj\.weight", r"experts.w2_weight.\1", fused)
        rows.setdefault(fused, []).append(tensors[name])
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    stacks = sorted({name.rpartition(".")[0] for name in whole if re.search(r"\.w(13|2)_weight\.\d+$", name)})
    for stack in stacks:
        experts = [whole.pop(f"{stack}.{i}") for i in range(sum(name.startswith(f"{stack}.") for name in whole))]
        whole[stack] = torch.stack(experts)
    return whole


def assert_all_loaded(loaded: dict[str, Tensor], tensors: dict[str, Tensor], borrowed: set[str]) -> None:
    """Args: borrowed: parameters that SGLang's server takes from the target after loading."""
    expected = fuse(tensors)
    assert loaded.keys() - borrowed == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def export(heads: DraftHeads, target: Target, folder: Path) -> Exported:
    exported = find_format("sglang", heads.config.head_type).write(heads.config, heads.state_dict(), target)
    (folder / "heads").mkdir()
    exported.save(folder / "heads")
    return exported


@pytest.mark.parametrize("settings", [{}, {"fc_bias": True}], ids=["", "bias"])
def test_eagle(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    exported = export(tiny_heads("eagle", target, **settings), target, tmp_path)
    found, loaded = load_into_sglang(tmp_path, CHAT_TARGET, "EAGLE")
    assert found == {"class": "LlamaForCausalLMEagle", "tapped": []}
    tensors = {f"model.{name}": tensor for name, tensor in exported.tensors.items()}
    assert_all_loaded(loaded, tensors, BORROWED)


@pytest.mark.parametrize(
    "settings",
    [{}, {"feature_layers": [1, 5, 9]}, {"num_layers": 2}],
    ids=["trained", "other layers, whole vocabulary", "two layers"],
)
def test_eagle3(settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    if not settings:
        heads = load_trained("eagle3", target)
    else:
        heads = tiny_heads("eagle3", target, **settings)
    exported = export(heads, target, tmp_path)
    found, loaded = load_into_sglang(tmp_path, CHAT_TARGET, "EAGLE3")
    assert found == {"class": "LlamaForCausalLMEagle3", "tapped": heads.config.feature_layers}
    tensors = {
        name if name == "lm_head.weight" else f"model.{name.replace('midlayer', 'layers.0')}": tensor
        for name, tensor in exported.tensors.items()
        if name not in ("d2t", "t2d")  # SGLang reads d2t only
    }
    token_ids = loaded.pop("hot_token_id", None)
    if "d2t" in exported.tensors:
        assert torch.equal(token_ids, exported.tensors["t2d"].nonzero()[:, 0])
    # A layer above the first has a norm that it inherits and does not call.
    unused = {f"model.layers.{number}.input_layernorm.weight" for number in range(1, heads.config.num_layers)}
    assert_all_loaded(loaded, tensors, {EMBEDDING, *unused})


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("DFLASH", {"block_size": 4}),
        ("DSPARK", {**SPARK, "has_confidence": False}),
        ("DSPARK", {**SPARK, "has_confidence": True}),
    ],
    ids=["dflash", "dspark", "dspark with confidence"],
)
def test_block(algorithm: str, settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    heads: Any = tiny_heads("block", target, **settings, mask_token_id=MASK_TOKEN)
    exported = export(heads, target, tmp_path)
    # By default SGLang builds no confidence head; in this mode, always.
    mode = {"SGLANG_RAGGED_VERIFY_MODE": "compact"} if settings.get("has_confidence") else {}
    found, loaded = load_into_sglang(tmp_path, CHAT_TARGET, algorithm, **mode)
    model = {"DFLASH": "DFlashDraftModel", "DSPARK": "Qwen3DSparkModel"}[algorithm]
    assert found == {"class": model, "tapped": heads.config.feature_layers}
    assert_all_loaded(loaded, exported.tensors, set())


def test_mtp(tmp_path: Path) -> None:
    """In the checkpoint of a GLM-4-MoE target of two layers, whose third is the MTP module."""
    model = tiny_mixture("glm4_moe")
    modules = name_as_deepseek(random_modules(model, 1), 2)
    model.config.architectures = [type(model).__name__]
    path = write_checkpoint(model, modules, tmp_path / "target")
    target = load_target(path)
    heads = train(MTPHeads.from_target_checkpoint(path, target, num_steps=4))
    exported = export(heads, target, tmp_path)
    found, loaded = load_into_sglang(tmp_path, tmp_path / "heads", "EAGLE")  # its NEXTN is EAGLE without a draft path
    assert found == {"class": "Glm4MoeForCausalLMNextN", "tapped": []}
    outer = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    copies = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's, which SGLang does not read
    named = {name.removeprefix("model.layers.2."): tensor for name, tensor in exported.tensors.items()}
    tensors = {
        f"model.{name}" if name.startswith(outer) else f"model.decoder.{name}": tensor
        for name, tensor in named.items()
        if name not in copies
    }
    assert_all_loaded(loaded, tensors, BORROWED)
