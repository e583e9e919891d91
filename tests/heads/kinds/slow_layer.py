"""A decoder layer one slot at a time, a block drafter's pass, and how heads are compared with references made of them.

Legend: D hidden size, H query heads, d head size, T context length, N block size.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.heads import DraftStep
from tests.tiny_targets import random_prompt


def unroll_both(
    heads: Any, slowly: Callable[[Any, Tensor, list[int]], list[list[Tensor]]]
) -> Iterator[tuple[DraftStep, Tensor, Tensor]]:
    """For each row of a random batch and each step of its unroll: the step, its states [T', D] at the slots that the
    slow reference has, and what that gives there, stacked."""
    input_ids = random_prompt(9, batch_size=2)
    features = torch.randn(2, 9, len(heads.feature_layers) * heads.target.hidden_size)
    steps = heads.unroll(features, input_ids)
    for row, ids in enumerate(input_ids.tolist()):
        for step, outputs in zip(steps, slowly(heads, features[row], ids), strict=True):
            yield step, step.hidden[row, : len(outputs)], torch.stack(outputs)


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
        heads, weight = linear(name, x).view(-1, size), weights.get(f"self_attn.{name}_norm.weight")
        return heads if weight is None else norm(heads, weight, config.rms_norm_eps)

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
    return hidden + run_mlp(weights, config, x)


def run_mlp(weights: dict[str, Tensor], config: Any, x: Tensor) -> Tensor:
    gate, up = (weights[f"mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
    activated = F.silu(gate) if config.hidden_act == "silu" else F.gelu(gate, approximate="tanh")
    return weights["mlp.down_proj.weight"] @ (activated * up)


def convolve(at: dict[str, Tensor], name: str, side: int, rows: Tensor, inputs: Tensor) -> Tensor:
    """DFlash 2's convolution of a block's rows [N, D], with kernels that `inputs` [N, D] give; DFlash has none."""
    if f"{name}.base_kernel" not in at:
        return rows
    base = at[f"{name}.base_kernel"]
    _, taps, size = base.shape
    found = torch.zeros_like(rows)
    for t, x in enumerate(inputs):
        kernel = (at[f"{name}.kernel_projection.weight"] @ x).view(2, taps, -1)
        for tap in range(min(taps, t + 1)):
            own = kernel[side, tap].repeat_interleave(size // kernel.shape[-1])
            found[t] += (base[side, tap] + own) * rows[t - tap]
    return found


def run_block(weights: dict[str, Tensor], config: Any, states: Tensor, x: Tensor, *, is_causal: bool = False) -> Tensor:
    """The authors' forward pass of DFlash and DFlash 2, for one block x [N, D] after the target's states
    [T, features * D]: normed states [N, D]."""
    eps = config.rms_norm_eps
    context = norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    length = len(context)
    for i in range(config.num_layers):
        at = layer_weights(weights, f"layers.{i}.")
        entered = norm(x, at["input_layernorm.weight"], eps)
        normed = convolve(at, "attention_conv", 0, entered, entered)
        attended = []
        for row in range(len(x)):
            seen = [other for other in range(row if is_causal else len(x)) if other != row] + [row]
            positions = [*range(length), *(length + other for other in seen)]
            attended.append(attend(at, config, [*context, *normed[seen]], positions))
        x = x + convolve(at, "attention_conv", 1, torch.stack(attended), entered)
        entered = norm(x, at["post_attention_layernorm.weight"], eps)
        y = [run_mlp(at, config, row) for row in convolve(at, "mlp_conv", 0, entered, entered)]
        x = x + convolve(at, "mlp_conv", 1, torch.stack(y), entered)
    return norm(x, weights["norm.weight"], eps)


def layer_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The layer's weights out of those of all heads."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
