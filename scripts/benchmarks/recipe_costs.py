"""What training heads for a target costs, derived from the library's own modules: parameters, operations, memory, disk.

Nothing is allocated: modules run on fake tensors, which have shapes and no storage. So the parameters are those of the
real modules, the operations of drafting are counted while the real unroll runs forward and backward (what is recomputed
in the backward pass included), and its memory is what autograd really keeps.

Legend: T tokens, D hidden size, V target vocabulary, C draft vocabulary, K drafting steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.eagle3 import Eagle3Config, Eagle3Heads, default_feature_layers
from heads.modules.unrolled_attention import attend_in_chunks

DRAFT_VOCABULARY = 32_000  # of EAGLE-3's published heads
NUM_STEPS = 7  # the training-time test of the authors' code
BYTES_TRAINED = 16  # a trained float32 parameter: weight, gradient, AdamW's two moments
BYTES_SAVED = 12  # in a checkpoint: weight and two moments
LOSS_BYTES = 3 * 4 * 2**25  # three float32 tensors of training.losses.teacher.CHUNK_ELEMENTS
BYTES_OF_TEXT = 4.5  # English text, per token


@dataclass(frozen=True)
class TargetShape:
    """A Llama by its numbers (as in the `config.json` that its makers published)."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.is_tied,
        )

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values in bfloat16."""
        return 2 * 2 * self.num_layers * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class TargetCost:
    """parameters: all of them. forward: operations per token of a pass over sequences of so many tokens, half of the
    attention's since it is causal, without the LM head; lm_head: those of the LM head."""

    parameters: int
    forward: float
    lm_head: float


@cache
def target_cost(shape: TargetShape, length: int) -> TargetCost:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    in_layers = sum(weight.numel() for weight in model.model.layers.parameters() if weight.ndim > 1)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * length / 2
    return TargetCost(parameters, 2 * in_layers + attention, 2 * shape.hidden_size * shape.vocab_size)


@dataclass(frozen=True)
class DraftCost:
    """Of EAGLE-3 heads: their parameters; operations per token of the unroll, forward and backward, and of the LM head
    per token that is trained on; bytes that autograd keeps, per token, and whatever the length (weights cast to
    bfloat16)."""

    parameters: int
    unroll: float
    lm_head: float
    kept_per_token: float
    kept: float


@cache
def draft_cost(shape: TargetShape, length: int) -> DraftCost:
    short = length // 2
    (parameters, flops, whole), (_, _, part) = (_run_unroll(shape, tokens) for tokens in (length, short))
    per_token = (whole - part) / (length - short)
    head = 6 * shape.hidden_size * min(DRAFT_VOCABULARY, shape.vocab_size) * NUM_STEPS
    return DraftCost(parameters, flops / length, head, per_token, whole - per_token * length)


def _make_heads(shape: TargetShape) -> Eagle3Heads:
    return Eagle3Heads(
        Eagle3Config(
            target_hidden_size=shape.hidden_size,
            target_vocab_size=shape.vocab_size,
            target_num_layers=shape.num_layers,
            feature_layers=default_feature_layers(shape.num_layers),
            draft_vocab_size=min(DRAFT_VOCABULARY, shape.vocab_size),
            ttt_steps=NUM_STEPS,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
        )
    )


def _run_unroll(shape: TargetShape, length: int) -> tuple[int, float, float]:
    """Parameters; operations of one sequence's unroll, forward and backward; and the bytes kept in between, in
    bfloat16."""
    kept: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        heads = _make_heads(shape)
        weights = {parameter.untyped_storage()._cdata for parameter in heads.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()._cdata
            if storage not in weights:
                kept.setdefault(storage, tensor)
            return tensor

        heads.embed = lambda ids: torch.zeros(*ids.shape, shape.hidden_size)  # type: ignore[method-assign]
        features = torch.zeros(1, length, 3 * shape.hidden_size, dtype=torch.bfloat16)
        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
            patch("heads.modules.layers.attend_unrolled", attend_in_chunks),  # as on a GPU, on fake tensors of a CPU
        ):
            steps = heads.unroll(features, torch.zeros(1, length, dtype=torch.long))
            size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
            sum(step.hidden.float().sum() for step in steps).backward()  # type: ignore[union-attr]
        parameters = sum(parameter.numel() for parameter in heads.parameters())
    return parameters, float(counter.get_total_flops()), float(size)
