"""Targets that are spread over devices while heads train on one: what one CPU can show."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference import Target
from draftsmith.training.features.extraction import find_layers
from draftsmith.training.features.target_loading import load_published_heads
from draftsmith.training.features.target_options import ModelArguments
from tests.heads.formats.test_native_mtp import name_as_deepseek, random_modules, tiny_mixture, write_checkpoint
from tests.training.runner import Runner, assert_same

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore")  # of accelerate, about the parameters it has put elsewhere
def test_heads_train_the_same_above_a_spread_target(train: Runner) -> None:
    """All on the CPU by a map; and with layers and the LM head on disk, which accelerate brings for each pass."""
    options: dict[str, Any] = {"max_steps": 2, "num_eval_prompts": 1}
    train(**options)
    weights = train.weights()
    train(**options, target_device_map=json.dumps({"": "cpu"}))
    assert_same(weights, train.weights())
    places = {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb", "layers.0", "layers.2")}
    places |= {"model.layers.1": "disk", "model.layers.3": "disk", "lm_head": "disk"}
    train(**options, target_device_map=json.dumps(places))
    assert_same(weights, train.weights())


def test_modules_in_the_targets_checkpoint_are_heads_to_start_from(tmp_path: Path) -> None:
    """In float32, whatever the target's dtype; extraction stores the layers that they tap."""
    model = tiny_mixture("glm4_moe").bfloat16()
    path = str(write_checkpoint(model, name_as_deepseek(random_modules(model, 1), 2), tmp_path))
    args, target = ModelArguments(path, init_heads=path), Target(model)
    heads = load_published_heads(args, target)
    assert (heads.config.head_type, heads.config.num_steps, heads.dtype) == ("mtp", 3, torch.float32)
    assert tuple(find_layers(args, target)) == heads.feature_layers == (2,)
