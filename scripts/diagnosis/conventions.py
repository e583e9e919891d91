"""Whether heads of this library fit better under another setting of the kind that breaks no shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.scripts.conversion.conventions import Convention, measure_cross_entropy

# Settings that change no tensor's shape.
SWITCHES = (
    "norm_output",
    "norm_before_residual",
    "norm_before_fc",
    "reads_before_final_norm",
    "hidden_first",
    "zero_first_embedding",
)


def list_variants(heads: DraftHeads, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each other reading of the heads: in words, and the settings that differ."""
    config = heads.config
    for name in SWITCHES:
        if isinstance(value := getattr(config, name, None), bool):
            yield f"{name} is {str(not value).lower()}", {name: not value}
    layers = list(config.feature_layers)
    for step in (-1, 1) if not heads.runs_target_layers else ():
        moved = [layer + step for layer in layers]
        if layers and min(moved) >= 0 and max(moved) <= target.num_layers:
            yield f"feature layers are {moved}", {"feature_layers": moved}
    theirs, own = (getattr(one, "rope_parameters", None) for one in (target.text_config, config))
    if isinstance(theirs, dict) and isinstance(own, dict) and "rope_theta" in theirs and theirs != own:
        yield "positions rotate as in the target", {"rope_parameters": dict(theirs)}


def with_settings(heads: DraftHeads, target: Target, changes: dict[str, Any]) -> DraftHeads | None:
    """The heads under other settings; None where their weights do not fit these."""
    config = copy.deepcopy(heads.config)
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        variant = type(heads)(config)
        variant.load_state_dict(heads.state_dict(), strict=True)
    except (RuntimeError, ValueError):
        return None
    return variant.to(heads.dtype).eval().bind(target)


def find_better(heads: DraftHeads, target: Target, texts: Sequence[Tensor], lengths: Sequence[int]) -> list[Convention]:
    """The heads as they are, then the reading that fits better, if there is one.

    Args:
        texts: [1, T] each; lengths: of their prompts.
    """
    as_they_are = Convention("as they are", {}, measure_cross_entropy(target, heads, texts, lengths))
    found = []
    for name, changes in list_variants(heads, target):
        if (variant := with_settings(heads, target, changes)) is not None:
            found.append(Convention(name, changes, measure_cross_entropy(target, variant, texts, lengths)))
    better = [one for one in found if one.is_better_than(as_they_are)]
    return [as_they_are, *sorted(better, key=lambda one: float(one.cross_entropy.mean()))[:1]]
