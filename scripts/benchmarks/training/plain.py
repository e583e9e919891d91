"""A direct implementation of a training step, with which `speed.py` compares: same heads and loss, dense tensors.

- Attention of the unroll: keys and values of all steps so far in one tensor, under a mask [T, K * T]. The softmax runs
  in float32, as in transformers' eager attention and the papers' code, or attention is torch's own function.
- The teacher: the target's logits at all positions, [B, T, V] in float32, and their softmax. The draft's logits and
  log-softmax also cover all positions, in float32.
- The target reads the batch with its attention mask, and computes padding too.

Legend: B batch, T sequence length, M slots that a step drafts from, H query heads, G key/value heads, d head size, K
steps so far, V vocabulary, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

import draftsmith.heads.modules.block_view
import draftsmith.heads.modules.layers
from draftsmith.heads import DraftHeads, DraftStep
from draftsmith.inference.targets.target import Target


@dataclass(frozen=True)
class PlainStates:
    """features: [B, T, F]; teacher: [B, T, C] float32, the target's distribution over the draft vocabulary; is_drafted:
    [B, T], whether the target's best token is in it."""

    features: Tensor
    teacher: Tensor
    is_drafted: Tensor


@torch.no_grad()
def run_target(target: Target, heads: DraftHeads, batch: dict[str, Any]) -> PlainStates:
    output = target.model.base_model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"].values.to(target.device),
        use_cache=False,
        output_hidden_states=True,
    )
    features = torch.cat([output.hidden_states[layer] for layer in heads.feature_layers], dim=-1)
    logits = target.compute_logits(output.last_hidden_state).float()  # [B, T, V]
    argmax = logits.argmax(-1)
    if (ids := heads.draft_token_ids) is None:
        return PlainStates(features, logits.softmax(-1), torch.ones_like(argmax, dtype=torch.bool))
    return PlainStates(features, logits[..., ids].softmax(-1), torch.isin(argmax, ids))


def plain_loss(
    heads: DraftHeads, states: PlainStates, batch: dict[str, Any], *, step_decay: float, use_sdpa: bool = False
) -> Tensor:
    """The distillation loss of a batch (`draftsmith.training.losses.draft_loss`), with gradients.

    Args:
        use_sdpa: attend with torch's own function.
    """
    input_ids, loss_mask, seeds = batch["input_ids"], batch["loss_mask"].values, batch["token_keys"].values
    with dense_attention(use_sdpa=use_sdpa):
        steps = heads.unroll_where(states.features, input_ids, loss_mask, seeds)
    loss = torch.zeros((), device=input_ids.device)
    for k, step in enumerate(steps):
        p = shift_rows(step, states.teacher)
        log_q = step.head(step.hidden).float().log_softmax(-1)  # [B, M, C]
        is_predicted = step.read_ahead(loss_mask, step.shift).bool().to(input_ids.device)
        has_loss = is_predicted & step.read_ahead(states.is_drafted.long(), step.shift - 1).bool()
        losses = -(p * log_q).sum(-1)
        loss = loss + step_decay**k * (losses * has_loss).sum() / is_predicted.sum().clamp(min=1)
    return loss


def shift_rows(step: DraftStep, teacher: Tensor) -> Tensor:
    """[B, M, C]: the rows of the teacher [B, T, C] that a step learns from; arbitrary rows past the end."""
    length = teacher.shape[1]
    slots = torch.arange(length).expand(len(teacher), -1) if step.slots is None else step.slots
    places = (slots + step.shift - 1).clamp(0, length - 1).to(teacher.device)
    return teacher.gather(1, places[..., None].expand(-1, -1, teacher.shape[-1]))


@contextmanager
def dense_attention(*, use_sdpa: bool) -> Iterator[None]:
    """Inside this context, draft layers attend with `attend_densely`, a block drafter to all blocks at once."""
    with (
        patch.object(draftsmith.heads.modules.layers, "attend_unrolled", partial(attend_densely, use_sdpa=use_sdpa)),
        patch.object(draftsmith.heads.modules.block_view, "QUERY_CHUNK", 1 << 30),
    ):
        yield


def attend_densely(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], *, use_sdpa: bool) -> Tensor:
    """`draftsmith.heads.modules.unrolled_attention.attend_unrolled` over all keys at once."""
    length, repeats = q.shape[2], q.shape[1] // keys[0].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=q.device)
    mask = torch.cat([causal, *(own for _ in keys[1:])], dim=1)  # [T, K * T]
    k, v = (torch.cat(list(x), dim=2).repeat_interleave(repeats, dim=1) for x in (keys, values))
    if use_sdpa:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)  # [B, H, T, K * T]
    return weights.to(v.dtype) @ v
