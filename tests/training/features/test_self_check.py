"""The self-check finds states that are not the target's, and says what is likely wrong with them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.training.features.encoding import TargetStates
from draftsmith.training.features.self_check import check_features
from draftsmith.training.features.sources import FeatureSource, OnlineFeatures
from tests.tiny_targets import FAMILIES, RECURRENT_FAMILIES, tiny_target
from tests.training.feature_cases import COLLATE, ROWS

LAYERS = (2, 6)


def check(target: Target, source: FeatureSource | None = None) -> float:
    layers = (LAYERS[0], target.num_layers)
    return check_features(target, source or OnlineFeatures(target, layers), layers, COLLATE(ROWS[-1:]))


class Wrong:
    """Online features with something wrong."""

    def __init__(self, target: Target, **changes: Tensor | None) -> None:
        self.online = OnlineFeatures(target, LAYERS)
        self.changes = changes

    def __call__(self, batch: Mapping[str, Tensor]) -> TargetStates:
        return replace(self.online(batch), **self.changes)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family, dtype in (
            ("gemma3", torch.float32),
            ("gemma2", torch.bfloat16),
            ("qwen3_next", torch.float32),
            ("mamba2", torch.bfloat16),
        )
        if family in (*FAMILIES, *RECURRENT_FAMILIES)
    ],
)
def test_right_states_pass(family: str, dtype: torch.dtype) -> None:
    """Scaled logits, soft-capped ones, scaled embeddings, recurrent layers, and what bfloat16 rounds."""
    assert check(Target(tiny_target(family).to(dtype))) < 0.5


def test_another_checkpoint(target: Target) -> None:
    other = Target(tiny_target("llama", seed=9))
    states = OnlineFeatures(other, LAYERS)(COLLATE(ROWS[-1:]))
    with pytest.raises(ValueError, match=r"states of layer 2 .* by \d.*: another model stored"):
        check(target, Wrong(target, features=states.features))
    with pytest.raises(ValueError, match=r"allowed 0\.01\) over 32 tokens .* another checkpoint"):
        check(target, Wrong(target, last_hidden=states.last_hidden))
