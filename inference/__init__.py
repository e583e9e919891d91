"""How drafts become tokens: the target, token trees, drafters without training, acceptance and the decode loop."""

from inference.acceptance.rules import AcceptanceRule
from inference.custom_generate import CustomGenerate
from inference.decoder import Decoder
from inference.distributed.distributed_decoder import DistributedDecoder
from inference.distributed.gloo_link import serve_target
from inference.drafters.base import Drafter, DraftLogits
from inference.drafters.merged import MergedDrafter
from inference.drafters.ngram import NgramDrafter
from inference.drafters.sampling import DraftSampling
from inference.drafters.small_model import SmallModelDrafter
from inference.drafters.staged import StagedDrafter
from inference.generation import generate, stream
from inference.loop import GenerationOutput, StepTokens
from inference.pipelined.decoder import PipelinedDecoder
from inference.stats import GenerationStats
from inference.streaming.token_stream import TokenStream
from inference.targets.target import Target
from inference.trees.dynamic import DynamicTree
from inference.trees.policy import TreePolicy
from inference.trees.static import StaticTree, chain

__all__ = [
    "AcceptanceRule",
    "CustomGenerate",
    "Decoder",
    "DistributedDecoder",
    "DraftLogits",
    "DraftSampling",
    "Drafter",
    "DynamicTree",
    "GenerationOutput",
    "GenerationStats",
    "MergedDrafter",
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
