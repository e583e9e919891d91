"""The options of a run that trains from stored features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class FeatureArguments:
    """Where the target's states come from."""

    features: str | None = field(
        default=None,
        metadata={
            "help": "Folder of stored features (scripts/extract_features.py); none = run the target on every batch."
        },
    )
    feature_mode: Literal["offline", "hybrid"] = field(
        default="offline",
        metadata={
            "help": "offline: every text must be in --features; the target's layers run only in checks and "
            "evaluations. hybrid: compute and store missing texts, so the first epoch fills the folder."
        },
    )

    def __post_init__(self) -> None:
        if self.features is None and self.feature_mode != "offline":
            raise ValueError(f"got feature_mode {self.feature_mode!r} without features: name the folder to fill")
