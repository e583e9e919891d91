"""Self-speculative decoding with trained draft heads on stock transformers models.

    from draftsmith import DraftHeads, generate

The public names are imported when they are first used, so that `draftsmith --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.heads import *  # noqa: F403
    from draftsmith.inference import *  # noqa: F403
    from draftsmith.training.learning.learner import OnlineLearner

__all__ = [  # noqa: F405
    "HEAD_TYPES",
    "AcceptanceRule",
    "CustomGenerate",
    "Decoder",
    "DistributedDecoder",
    "DraftHeads",
    "DraftHeadsConfig",
    "DraftLogits",
    "DraftSampling",
    "DraftStep",
    "Drafter",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "NgramDrafter",
    "OnlineLearner",
    "PipelinedDecoder",
    "SmallModelDrafter",
    "StagedDrafter",
    "StaticTree",
    "StepTokens",
    "Target",
    "TokenStream",
    "TreePolicy",
    "chain",
    "create_heads",
    "generate",
    "register",
    "serve_target",
    "stream",
]

if not (Path(__file__).parent / "heads").is_dir():  # a checkout without symbolic links: the folders at the top level
    __path__.append(str(Path(__file__).resolve().parents[2]))  # noqa: F405


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow to import

        return version("draftsmith")
    if name in ("heads", "inference", "training", "scripts"):
        return import_module(f"draftsmith.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
    if name == "OnlineLearner":
        return import_module("draftsmith.training.learning.learner").OnlineLearner
    heads = import_module("draftsmith.heads")
    return getattr(heads if name in heads.__all__ else import_module("draftsmith.inference"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__, "__version__"]
