"""How drafts become tokens: the target, token trees, acceptance and the decode loop."""

from inference.drafter import Drafter, DraftLogits, DraftSampling
from inference.generation import Decoder, GenerationOutput, generate
from inference.policy import DynamicTree, StaticTree, TreePolicy, chain
from inference.stats import GenerationStats
from inference.target import Target

__all__ = [
    "Decoder",
    "DraftLogits",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "StaticTree",
    "Target",
    "TreePolicy",
    "chain",
    "generate",
]
