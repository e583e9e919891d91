"""A decoder layer one slot at a time, for references that are compared with the layers of trained heads.

Legend: D hidden size, H query heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D], weight [D]."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of heads x [H, d] at one position."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attend(weights: dict[str, Tensor], config: Any, inputs: list[Tensor], positions: list[int]) -> Tensor:
    """What the attention adds to the slot of the last of `inputs` [input size], which sees all of them: [D].

    Args:
        weights: of one decoder layer, by their names within it.
    """
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    repeats = config.num_attention_heads // config.num_key_value_heads

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"self_attn.{name}_proj.weight"] @ x + weights.get(f"self_attn.{name}_proj.bias", 0)

    def project(name: str, x: Tensor) -> Tensor:
        return linear(name, x).view(-1, size)

    q = turn(project("q", inputs[-1]), positions[-1], theta)
    keys = [
        turn(project("k", x), at, theta).repeat_interleave(repeats, 0) for x, at in zip(inputs, positions, strict=True)
    ]
    values = [project("v", x).repeat_interleave(repeats, 0) for x in inputs]
    scores = torch.stack([(q * key).sum(-1) / math.sqrt(size) for key in keys])  # [seen, H]
    attended = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0)
    return linear("o", attended.flatten())


def finish(weights: dict[str, Tensor], config: Any, hidden: Tensor) -> Tensor:
    """The MLP's half of the layer: [D] -> [D]."""
    x = norm(hidden, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = (weights[f"mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
    activated = F.silu(gate) if config.hidden_act == "silu" else F.gelu(gate, approximate="tanh")
    return hidden + weights["mlp.down_proj.weight"] @ (activated * up)


def layer_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The layer's weights out of those of all heads."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
