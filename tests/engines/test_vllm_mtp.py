"""vLLM decodes with our MTP heads, in a checkpoint of their target.

The target is tiny and random, of a family whose MTP modules vLLM runs on a CPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.inference import Target
from tests.engines.chains import compare_with_vllm, write_texts
from tests.engines.learning import learn_by_heart
from tests.heads.formats.test_native_mtp import (
    name_as_deepseek,
    name_as_mimo,
    random_modules,
    tiny_mixture,
    write_checkpoint,
)
from tests.heads.formats.test_stitched_mtp import load_target
from tests.tiny_targets import tiny_target

# Widths that vLLM's CPU kernels take.
WIDE: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
NUM_PROMPTS, PROMPT_LENGTH, MAX_NEW_TOKENS, DEPTH = 8, 9, 48, 3
# MiMo's config, which transformers does not have.
CONFIGURATION = """
from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


def write_glm(folder: Path) -> Target:
    model = tiny_mixture("glm4_moe", **WIDE)
    model.config.architectures = [type(model).__name__]
    write_checkpoint(model, name_as_deepseek(random_modules(model, 1), model.config.num_hidden_layers), folder)
    return load_target(folder)


def write_mimo(folder: Path) -> Target:
    qwen = tiny_target("qwen2", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    model = MiMoForCausalLM(MiMoConfig(**qwen.config.to_dict() | {"architectures": ["MiMoForCausalLM"]})).eval()
    model.load_state_dict(qwen.state_dict())
    write_checkpoint(model, name_as_mimo(random_modules(model, 1), 2), folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text(CONFIGURATION)
    return Target(MiMoForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


FAMILIES: dict[str, tuple[Callable[[Path], Target], dict[str, Any]]] = {
    "glm4_moe": (write_glm, {"norm_output": False}),  # what vLLM passes on to the second draft
    "mimo": (write_mimo, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp(family: str, tmp_path: Path, run_vllm: Callable[..., Any], exported: Callable[..., Path]) -> None:
    write_target, settings = FAMILIES[family]
    target = write_target(tmp_path / "target")
    prompts = torch.randint(1, target.vocab_size, (NUM_PROMPTS, PROMPT_LENGTH)).tolist()
    texts = write_texts(target, prompts, MAX_NEW_TOKENS)
    heads = MTPHeads.from_target_checkpoint(tmp_path / "target", target, num_steps=DEPTH, **settings)
    learn_by_heart(heads, texts, num_steps=60)
    job = {"target": str(exported(heads)), "method": "mtp", "max_length": 128}
    compare_with_vllm(run_vllm, heads, texts, DEPTH, **job, engine={"trust_remote_code": family == "mimo"})
