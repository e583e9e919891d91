"""Trained draft heads: `DraftHeads.from_pretrained` loads any kind, `create_heads` builds untrained ones."""

if not __name__.startswith("draftsmith."):  # a second copy of the classes must not come into being
    raise ImportError(f"import draftsmith.{__name__}, not {__name__}")

from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import DraftHeadsConfig
from draftsmith.heads.kinds.block import BlockHeads
from draftsmith.heads.kinds.dflash2 import DFlash2Heads
from draftsmith.heads.kinds.eagle import EagleHeads
from draftsmith.heads.kinds.eagle3 import Eagle3Heads
from draftsmith.heads.kinds.hydra import HydraHeads
from draftsmith.heads.kinds.kangaroo import KangarooHeads
from draftsmith.heads.kinds.medusa import MedusaHeads
from draftsmith.heads.kinds.mtp import MTPHeads
from draftsmith.heads.kinds.parallel import ParallelHeads
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.registration import HEAD_TYPES, find_kind, register
from draftsmith.inference.targets.target import Target

for _kind in (
    BlockHeads,
    DFlash2Heads,
    EagleHeads,
    Eagle3Heads,
    HydraHeads,
    KangarooHeads,
    MedusaHeads,
    MTPHeads,
    ParallelHeads,
):
    register(_kind)

__all__ = ["HEAD_TYPES", "DraftHeads", "DraftHeadsConfig", "DraftStep", "create_heads", "register"]


def create_heads(head_type: str, target: Target | PreTrainedModel, **overrides: Any) -> DraftHeads:
    """Builds untrained float32 heads of one kind, bound to a target and on its device.

    Args:
        head_type: a key of `HEAD_TYPES`, or a kind of an installed package (`register`).
        target: any stock transformers causal LM.
        **overrides: keys of the kind's config (for example `num_heads=3`).

    Raises:
        ValueError: an unknown kind or key (the message lists the known ones), or a target that the kind does not fit.
    """
    kind: type[DraftHeads] = find_kind(head_type)
    target = Target.of(target)
    heads = kind(kind.config_class.from_target(target, **overrides))
    heads.bind(target)
    with torch.no_grad():
        heads.init_from_target(target)
    return heads
