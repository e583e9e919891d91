"""Estimates the cost of training EAGLE-3 heads: hours on H100 GPUs, memory per GPU, disk for stored features.

    python scripts/benchmarks/training/cost.py --target meta-llama/Llama-3.1-8B --conversations 532000 --num_gpus 8

Nothing is trained, and only the target's config is loaded (a folder with a config.json will do). Parameters, operations
and memory come from the library's modules on fake tensors, which have shapes but no storage. Operations are counted in
the forward and backward pass of the unroll, recomputation included. The constants below are assumptions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.heads.kinds.eagle3 import Eagle3Config, Eagle3Heads, default_feature_layers
from draftsmith.scripts.measuring.operations import count_operations
from draftsmith.scripts.shared.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

PEAK = 989e12  # dense bfloat16 operations per second of an H100 SXM (data sheet)
UTILISATION = 0.30  # share of PEAK in training; 35% was reported for EAGLE-3 with a 0.6B target on an A100
REPLY_SHARE = 0.75  # share of a conversation's tokens that have a loss
DRAFT_VOCABULARY = 32_000  # of EAGLE-3's published heads
TOKENIZED = 5e5  # tokens that one core tokenizes in a second
READ = 2e9  # bytes per second at which a machine reads the target's weights
NUM_STEPS = 7  # steps of the training-time test in the authors' code
BYTES_TRAINED = 16  # of a trained float32 parameter: weight, gradient, AdamW's two moments
LOSS_BYTES = 3 * 4 * 2**25  # three float32 tensors of draftsmith.training.losses.teacher.CHUNK_ELEMENTS


@dataclass
class CostArguments:
    target: str = field(metadata={"help": "Target: a folder or hub id; only its config is read."})
    conversations: int = field(default=100_000, metadata={"help": "Conversations of the data set."})
    conversation_tokens: int = field(default=1100, metadata={"help": "Tokens of an average conversation."})
    epochs: int = field(default=2, metadata={"help": "Passes over the data set."})
    num_gpus: int = field(default=1, metadata={"help": "H100 GPUs."})
    num_shards: int = field(default=1, metadata={"help": "GPUs that the frozen target is split over."})
    length: int = field(default=2048, metadata={"help": "Tokens of a row."})
    batch_tokens: int = field(default=8192, metadata={"help": "Tokens of a micro-batch on each GPU."})
    cores: int = field(default=64, metadata={"help": "CPU cores of the machine, which tokenize the data set once."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute the MLPs of the heads again in the backward pass."}
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "target" and value is not False and value < 1:
                raise ValueError(f"got --{name} {value}: give at least 1")


@dataclass(frozen=True)
class TargetCost:
    """forward: operations per token of a pass without the LM head, of the experts that a token meets; lm_head: those of
    the LM head."""

    parameters: int
    forward: float
    lm_head: float


@dataclass(frozen=True)
class DraftCost:
    """unroll: operations per token, forward and backward; lm_head: those of the draft LM head per token with a loss.
    kept_per_token, kept: bytes that autograd keeps, per token and at any length (weights cast to bfloat16)."""

    parameters: int
    unroll: float
    lm_head: float
    kept_per_token: float
    kept: float


def find_target_cost(config: Any, length: int) -> TargetCost:
    """Of passes over sequences of `length` tokens; attention is causal and counts half."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    weights = {name: weight for name, weight in model.model.layers.named_parameters() if weight.ndim > 1}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 1)
    share = getattr(config, "num_experts_per_tok", 1) / experts
    in_layers = sum(w.numel() * (share if ".experts." in name else 1) for name, w in weights.items())
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * find_head_dim(config) * length / 2
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return TargetCost(parameters, 2 * in_layers + attention, 2 * config.hidden_size * config.vocab_size)


def find_draft_cost(config: Any, length: int, *, recomputes: bool = False) -> DraftCost:
    """Of EAGLE-3 heads for a target with this config, and rows of `length` tokens.

    Args:
        recomputes: with gradient checkpointing.
    """
    short = length // 2
    runs = [_run_unroll(config, tokens, recomputes=recomputes) for tokens in (length, short)]
    (parameters, operations, whole), (_, _, part) = runs
    per_token = (whole - part) / (length - short)
    lm_head = 6 * config.hidden_size * min(DRAFT_VOCABULARY, config.vocab_size) * NUM_STEPS
    return DraftCost(parameters, operations / length, lm_head, per_token, whole - per_token * length)


def find_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _make_heads(config: Any) -> Eagle3Heads:
    return Eagle3Heads(
        Eagle3Config(
            target_hidden_size=config.hidden_size,
            target_vocab_size=config.vocab_size,
            target_num_layers=config.num_hidden_layers,
            feature_layers=default_feature_layers(config.num_hidden_layers),
            draft_vocab_size=min(DRAFT_VOCABULARY, config.vocab_size),
            ttt_steps=NUM_STEPS,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=find_head_dim(config),
            intermediate_size=config.intermediate_size,
        )
    )


def _run_unroll(config: Any, length: int, *, recomputes: bool) -> tuple[int, float, float]:
    """Parameters; operations of one sequence's unroll, forward and backward; bytes kept in between, in bfloat16."""
    kept: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        heads = _make_heads(config)
        if recomputes:
            heads.train()._set_gradient_checkpointing(
                gradient_checkpointing_func=partial(checkpoint, use_reentrant=False)
            )
        weights = {parameter.untyped_storage()._cdata for parameter in heads.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()._cdata
            if storage not in weights:
                kept.setdefault(storage, tensor)
            return tensor

        heads.embed = lambda ids: torch.zeros(*ids.shape, config.hidden_size, dtype=torch.bfloat16)  # type: ignore[method-assign]
        features = torch.zeros(1, length, 3 * config.hidden_size, dtype=torch.bfloat16)
        with (
            count_operations() as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            steps = heads.unroll(features, torch.zeros(1, length, dtype=torch.long))
            size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
            sum(step.hidden.float().sum() for step in steps).backward()  # type: ignore[union-attr]
        parameters = sum(parameter.numel() for parameter in heads.parameters())
    return parameters, float(counter.get_total_flops()), float(size)


def estimate(args: CostArguments, config: Any) -> dict[str, str]:
    target = find_target_cost(config, args.length)
    draft = find_draft_cost(config, args.length, recomputes=args.gradient_checkpointing)
    operations = target.forward + draft.unroll + REPLY_SHARE * (target.lm_head + draft.lm_head)  # per token
    speed = args.num_gpus * UTILISATION * PEAK / operations
    tokens = args.conversations * args.conversation_tokens
    weights = whole = 2 * target.parameters
    gathered = 0.0
    if args.num_shards > 1:  # layers are split, embedding and LM head (two operations for each entry) are not
        ends = 2 * target.lm_head
        weights = ends + (whole - ends) / args.num_shards
        gathered = 2 * whole / config.num_hidden_layers  # one layer runs while the next one arrives
    kept = draft.kept + draft.kept_per_token * args.batch_tokens
    features = 4 * 2 * config.hidden_size * args.batch_tokens
    memory = weights + gathered + BYTES_TRAINED * draft.parameters + kept + features + LOSS_BYTES
    stored = tokens * (4 * 2 * config.hidden_size + 4)  # 3 tapped layers, last state (bfloat16); int32 id
    return {
        "to the first step: tokenizing, seconds": f"{tokens / args.cores / TOKENIZED:,.0f}",
        "to the first step: reading the target, seconds": f"{whole / READ:,.0f}",
        "tokens of an epoch": f"{tokens / 1e6:,.0f} M",
        "H100 GPUs": str(args.num_gpus),
        "parameters of the heads": f"{draft.parameters / 1e6:,.0f} M",
        "operations per token: target": f"{target.forward / 1e9:.1f} G",
        "operations per token: heads": f"{(operations - target.forward) / 1e9:.1f} G",
        "training, tokens/s of all GPUs": f"{speed / 1e3:,.0f} k",
        f"training, hours ({args.epochs} epochs)": f"{args.epochs * tokens / speed / 3600:.1f}",
        "memory of a GPU": f"{memory / 1e9:.0f} GB",
        "memory: the frozen target": f"{(weights + gathered) / 1e9:.1f} GB",
        "memory: kept for the backward pass": f"{kept / 1e9:.1f} GB",
        "disk, if features are stored": f"{stored / 1e12:.2f} TB",
    }


def main() -> None:
    with one_line_errors("training/cost.py"):
        (args,) = ProgramParser([CostArguments], doc=__doc__).read()
        config = AutoConfig.from_pretrained(args.target).get_text_config()
        print(f"| {args.target} | |\n| --- | ---: |")
        for title, cell in estimate(args, config).items():
            print(f"| {title} | {cell} |")


if __name__ == "__main__":
    main()
