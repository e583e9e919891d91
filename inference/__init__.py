"""How drafts become tokens: the target, token trees, drafters without training, acceptance and the decode loop."""

if not __name__.startswith("draftsmith."):  # a second copy of the classes must not come into being
    raise ImportError(f"import draftsmith.{__name__}, not {__name__}")

from draftsmith.inference.acceptance.rules import AcceptanceRule
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.distributed.distributed_decoder import DistributedDecoder
from draftsmith.inference.distributed.gloo_link import serve_target
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.engine import GenerationOutput, StepTokens
from draftsmith.inference.generation import generate, stream
from draftsmith.inference.pipelined.decoder import PipelinedDecoder
from draftsmith.inference.stats import GenerationStats
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.policy import TreePolicy
from draftsmith.inference.trees.static import StaticTree, chain

__all__ = [
    "AcceptanceRule",
    "Decoder",
    "DistributedDecoder",
    "DraftLogits",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "NgramDrafter",
    "PipelinedDecoder",
    "SmallModelDrafter",
    "StagedDrafter",
    "StaticTree",
    "StepTokens",
    "Target",
    "TokenStream",
    "TreePolicy",
    "chain",
    "generate",
    "serve_target",
    "stream",
]
