"""The drafters of the matrix by name, and the trees they can draft."""

from functools import cache
from typing import Any

import torch

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Drafter, DynamicTree, StaticTree, Target, TreePolicy, chain
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.trees.batch_tree import BatchTree
from draftsmith.inference.trees.candidates import CandidateTrees, gamma_chain
from tests.conftest import REPOSITORY
from tests.heads.tiny_heads import tiny_heads
from tests.inference.drafters.test_small_model import rough_copy
from tests.lossless.matrix.references import CHAT, target_of
from tests.lossless.restless import auto_tree
from tests.mixed_drafter import MixedDrafter
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import RECURRENT_FAMILIES

DEPTH = 4
# Deep enough for DEPTH levels where the kind's default is not.
HEAD_SETTINGS: dict[str, dict[str, Any]] = {
    "block": {"block_size": 5, "predicts_at_anchor": True},
    "eagle": {"ttt_steps": 5},
    "eagle3": {"ttt_steps": 5, "draft_vocab_size": 60},
    "hydra": {"num_heads": 4},
    "medusa": {"num_heads": 4},
    "parallel": {"num_depths": 4},
}
TRAINED = tuple(kind for kind in HEAD_TYPES if (REPOSITORY / "examples" / "heads" / kind).is_dir())
PLAIN = ("ngram", "small model", "staged")
DRAFTERS = (
    "scripted",
    *PLAIN,
    *HEAD_TYPES,
    "scripted + ngram",
    "scripted + small model",
    *(f"scripted + {kind}" for kind in HEAD_TYPES),
)
STATIC_PATHS = ([0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0], [0, 1, 0])
NUM_NODES = 32  # 28 are the fewest with which a dynamic tree of the scripted drafter has a node of the worst rank
POLICIES = ("none", "chain", "static", "dynamic", "auto", "gamma")


def policy_of(name: str, max_depth: int | None = None) -> TreePolicy | None:
    """Trees of at most DEPTH levels, or fewer where the drafter has fewer."""
    depth = min(DEPTH, max_depth or DEPTH)
    if name == "none":
        return None
    if name == "chain":
        return chain(depth)
    if name == "static":
        return StaticTree([path for path in STATIC_PATHS if len(path) <= depth])
    if name == "dynamic":
        return DynamicTree(depth=depth, top_k=4, num_nodes=NUM_NODES)
    if name == "auto":
        nested = auto_tree(tuple(sorted({1, 2, depth})), (3, 8, NUM_NODES), 4)
        return CandidateTrees(nested.candidates, BatchTree(depth, 4, NUM_NODES))
    assert name == "gamma", name
    return gamma_chain(depth)


@cache
def _small_model(family: str, attention: str, seed: int, dtype: torch.dtype) -> Target:
    if family in RECURRENT_FAMILIES:  # a small model has attention only
        return target_of("llama", "sdpa", seed)
    return Target(rough_copy(target_of(family, attention, seed, dtype).model))


def drafter_of(
    name: str,
    family: str,
    attention: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    ranks: tuple[int, ...] | None = None,
) -> Drafter | None:
    """A fresh drafter for this target. Every kind of heads must accept every target."""
    target = target_of(family, attention, seed, dtype)
    if name == "none":
        return None
    if name == "scripted":
        options = {} if ranks is None else {"ranks": ranks}
        layers = (1, min(2, target.num_layers))
        return ScriptedDrafter([], target.vocab_size, feature_layers=layers, is_strict=False, **options)
    if " + " in name:
        return MixedDrafter(
            *(drafter_of(part, family, attention, seed, dtype, ranks=ranks) for part in name.split(" + "))
        )
    if name == "ngram":
        return NgramDrafter()
    if name in ("small model", "staged"):
        small = SmallModelDrafter(_small_model(family, attention, seed, dtype))
        return small if name == "small model" else StagedDrafter(small)
    if family == CHAT:
        from tests.lossless.test_real_heads import chat_heads

        return chat_heads(name, target)
    return tiny_heads(name, target, **HEAD_SETTINGS.get(name, {}))


def script_of(drafter: Drafter | None) -> ScriptedDrafter | None:
    """The scripted drafter inside a drafter; its texts are set before each call."""
    parts = getattr(drafter, "both", (drafter,))
    return next((part for part in parts if isinstance(part, ScriptedDrafter)), None)
