"""Prepares the features of a run: online, from a store, or both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import TrainerCallback

from draftsmith.heads import DraftHeads
from draftsmith.inference.targets.target import Target
from draftsmith.training.features.endpoint_states import EndpointStates, ServedFeatures
from draftsmith.training.features.sharded_target import is_sharded
from draftsmith.training.features.sources import (
    FeatureSource,
    FlushFeatures,
    HybridFeatures,
    OnlineFeatures,
    StoredFeatures,
    TextsCollator,
)
from draftsmith.training.features.store import FeatureStore, StoreSettings, TargetIdentity, name_tensors, write_settings
from draftsmith.training.features.store_checks import check_can_fill, check_complete, check_same_target, explain_date
from draftsmith.training.features.target_loading import FirstLayers
from draftsmith.training.features.target_options import FeatureArguments

logger = logging.getLogger(__name__)

Collate = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class PreparedFeatures:
    """What the trainer needs.

    Attributes:
        source: gives the states of a batch; None = the trainer's own, online.
        peek: the source without its writes, for the self-check.
    """

    source: FeatureSource | None
    peek: FeatureSource
    collate: Collate
    callbacks: list[TrainerCallback]


def prepare_features(
    args: FeatureArguments,
    *,
    target: Target,
    heads: DraftHeads,
    rows: Mapping[str, Any],
    tokenizer: Any,
    collate: Collate,
    identify: Callable[[], TargetIdentity],
    rank: int = 0,
) -> PreparedFeatures:
    """Returns online features, or the features of `args.features` after all checks that are possible now.

    Args:
        rows: tokenized conversations by purpose, for messages: "training" and "held-out".
        identify: returns the target's identity; called only if there is a store.

    Raises:
        ValueError: features of another target, of other layers or of other texts.
    """
    online = OnlineFeatures(target, heads.feature_layers)
    if args.features is None:
        return PreparedFeatures(None, online, collate, [])
    folder = Path(args.features)
    wanted = StoreSettings(identify(), name_tensors(heads.feature_layers, target.num_layers))
    is_hybrid = args.feature_mode == "hybrid"
    if is_hybrid and is_sharded(target.model):
        raise ValueError(
            "got feature_mode hybrid with a target whose weights the processes share: all processes must run it "
            "together, and in a hybrid run each process computes its own missing states. Extract the features first, "
            "or train online"
        )
    if is_hybrid and not (folder / "index.json").exists():
        write_settings(folder, wanted)
    store = FeatureStore(folder)
    check_same_target(folder, store.settings.target, wanted.target)
    hint = explain_date(tokenizer)
    if is_hybrid:
        if hint and rank == 0:
            logger.warning("%s fills again on another day%s", folder, hint)
        check_can_fill(store, wanted)
        hybrid = HybridFeatures(online, store, rank=rank)
        return PreparedFeatures(hybrid, hybrid.peek, TextsCollator(collate), [FlushFeatures(hybrid)])
    check_complete(store, heads, rows, hint)
    stored = StoredFeatures(target, heads.feature_layers, store, hint)
    return PreparedFeatures(stored, stored, TextsCollator(collate), [])


def prepare_served_features(
    args: FeatureArguments,
    *,
    target: FirstLayers,
    heads: DraftHeads,
    first_ids: Tensor,
    max_length: int,
    collate: Collate,
    target_name: str,
) -> PreparedFeatures:
    """Returns the features that `args.features_endpoint` computes, after a comparison with the target's first layers.
    These layers are then dropped.

    Args:
        first_ids: [T], of the first text.
        max_length: tokens of the longest text.

    Raises:
        ConnectionError, ValueError: no server, another model, or other states.
    """
    states = EndpointStates(
        target,
        args,
        url=cast(str, args.features_endpoint),
        layers=heads.feature_layers,
        target_name=target_name,
        max_length=max_length,
    )
    states.check_target(first_ids)
    target.drop_layers()
    served = ServedFeatures(states, heads.feature_layers)
    return PreparedFeatures(served, served, TextsCollator(collate), [])
