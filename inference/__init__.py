"""How drafts become tokens: the target, token trees, drafters without training, acceptance and the decode loop."""

from inference.acceptance_rules import AcceptanceRule
from inference.decode_loop import GenerationOutput
from inference.decoder import Decoder
from inference.drafter import Drafter, DraftLogits, DraftSampling
from inference.generation import generate, stream
from inference.merged import MergedDrafter
from inference.ngram import NgramDrafter
from inference.policy import DynamicTree, StaticTree, TreePolicy, chain
from inference.small_model import SmallModelDrafter
from inference.staged import StagedDrafter
from inference.stats import GenerationStats
from inference.target import Target
from inference.token_stream import TokenStream

__all__ = [
    "AcceptanceRule",
    "Decoder",
    "DraftLogits",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "MergedDrafter",
    "NgramDrafter",
    "SmallModelDrafter",
    "StagedDrafter",
    "StaticTree",
    "Target",
    "TokenStream",
    "TreePolicy",
    "chain",
    "generate",
    "stream",
]
