"""Prepares the features of a run: online, from a store, or from a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.heads import DraftHeads
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.streaming import ConversationStream
from draftsmith.training.features.endpoint_states import EndpointStates, ServedFeatures
from draftsmith.training.features.sources import FeatureSource, OnlineFeatures, StoredFeatures, TextsCollator
from draftsmith.training.features.store import FeatureStore
from draftsmith.training.features.store_checks import check_complete, check_same_target, explain_date, iterate_ids
from draftsmith.training.features.target_identity import identify_target
from draftsmith.training.features.target_loading import FirstLayers
from draftsmith.training.features.target_options import FeatureArguments

Collate = Callable[[Any], dict[str, Any]]


def prepare_features(
    args: FeatureArguments,
    *,
    target: Target,
    target_name: str,
    heads: DraftHeads,
    rows: Mapping[str, Any],
    max_length: int,
    tokenizer: Any,
    collate: Collate,
) -> tuple[FeatureSource, Collate]:
    """Returns what gives the states of a batch, and what makes the batches, after all checks that are possible now.

    Args:
        rows: tokenized conversations by purpose, for messages: "training" and "held-out".
        max_length: tokens of the longest row of a stream.

    Raises:
        ValueError: stored features of another target, of other layers or of other texts; a server's of another model.
        ConnectionError: no server.
    """
    if isinstance(target, FirstLayers):
        served = _prepare_served(args, target, target_name, heads, rows, max_length)
        return served, TextsCollator(collate)
    if args.features is None:
        return OnlineFeatures(target, heads.feature_layers), collate
    store, hint = FeatureStore(Path(args.features)), explain_date(tokenizer)
    check_same_target(store.folder, store.settings.target, identify_target(target, target_name))
    check_complete(store, heads, rows, hint)
    return StoredFeatures(target, heads.feature_layers, store, hint), TextsCollator(collate)


def _prepare_served(
    args: FeatureArguments,
    target: FirstLayers,
    target_name: str,
    heads: DraftHeads,
    rows: Mapping[str, Any],
    max_length: int,
) -> ServedFeatures:
    """The features that `args.features_endpoint` computes, after a comparison with the target's first layers, which are
    then dropped."""
    train_set = rows["training"]
    if isinstance(train_set, ConversationStream):
        first = train_set.first_rows(1)[0]
    else:
        first = train_set[0]
        max_length = max(max(map(len, iterate_ids(part))) for part in rows.values() if part is not None)
    states = EndpointStates(
        target,
        args,
        url=cast(str, args.features_endpoint),
        layers=heads.feature_layers,
        target_name=target_name,
        max_length=max_length,
    )
    states.check_target(torch.tensor(first["input_ids"]))
    target.drop_layers()
    return ServedFeatures(states, heads.feature_layers)
