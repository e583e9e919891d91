"""Parts of heads with an attention layer: RoPE, RMSNorm, the draft cache, attention and decoder layers.

Legend: B batch, T sequence length, Q queries, W new rows of one call, S slots of the draft cache, R tree rows,
H query heads, G key/value heads, d head size, D hidden size, K unroll steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.heads.modules.unrolled_attention import attend_unrolled
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.kernels.attention import attend_masked


def last_slot(values: Tensor, counts: Tensor) -> Tensor:
    """`values` [B, S, ...] at each row's last own slot: [B, 1, ...]; anything for rows without one."""
    counts = counts.view(-1, *[1] * (values.dim() - 1))
    return values.gather(1, (counts - 1).clamp(min=0).expand(-1, 1, *values.shape[2:]))


class RotaryEmbedding:
    """cos and sin tables for the config's `rope_parameters`.

    This is not a module: `from_pretrained` leaves garbage in non-persistent buffers. The frequencies are computed at
    first use on each device.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.frequencies: dict[torch.device, tuple[Tensor, float]] = {}

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        rope = self.config.rope_parameters
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, self.config.head_dim, 2, device=device).float() / self.config.head_dim
            frequencies, scale = rope["rope_theta"] ** -exponents, 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        return torch.cat([-frequencies, frequencies]), scale

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, Q] int64 -> cos, sin [B, 1, Q, d] float32; the first half of the sines is negative."""
        if positions.device not in self.frequencies:
            self.frequencies[positions.device] = self._frequencies(positions.device)
        frequencies, scale = self.frequencies[positions.device]
        angles = positions[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE (half-split layout, as Llama's) to x [B, H, Q, d] in float32, back in x's dtype.

    cos, sin: from `RotaryEmbedding`.
    """
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


class _NormInFloat32(torch.autograd.Function):
    """RMSNorm of a narrow input under a float32 weight; the backward pass reads the narrow input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, normed = grads[0].float(), x.float() * scale
        grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        grad = grad * weight.float()
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * scale
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, in the input's dtype.

    torch's own is used where input and weight have one dtype. Under autocast they differ, and torch's would keep a
    float32 copy of the input for the backward pass.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return cast(Tensor, _NormInFloat32.apply(x, self.weight, self.eps))


class DraftCache(RowState):
    """Keys and values of one draft layer: first R tree rows, then one slot per accepted position.

    With the tree rows first, both regions have fixed columns in rows of every length. The drafter says which tree
    rows a level has (`TreeRows`).

    With a window the slots are a ring: slot s is at place s modulo the ring's length, which has room for the window and
    one pass. So drafting costs as much after 32,000 tokens as after 2,000.

    Args:
        shape: (B, G, d) of the keys.
        value_shape: (G, d) of the values where they differ.
        num_slots: accepted slots that a row can hold.
        num_scratch: R.
        window: how many of the last accepted slots a row sees; None = all.

    Attributes:
        begins: [B] int64, the first slot that a row holds: later than 0 where a pass, or its padding, has overwritten
            slots, and in copies of such rows.
    """

    row_fields = ("keys", "values", "lengths", "begins")

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        num_slots: int,
        num_scratch: int,
        device: torch.device,
        dtype: torch.dtype,
        value_shape: tuple[int, int] | None = None,
        window: int | None = None,
    ) -> None:
        batch, groups, size = shape
        self.num_scratch = num_scratch
        self.window = window
        self.num_held = num_slots if window is None else min(num_slots, window) + PREFILL_CHUNK
        # One more column than is ever seen: padding of full rows is written there.
        columns = num_scratch + self.num_held + 1
        self.keys = torch.zeros(batch, groups, columns, size, device=device, dtype=dtype)
        groups, size = value_shape or (groups, size)
        self.values = torch.zeros(batch, groups, columns, size, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.begins = torch.zeros_like(self.lengths)
        self.columns = torch.arange(num_scratch + self.num_held, device=device)
        self.max_slots = 0

    def open(self, width: int, counts: Tensor, max_slots: int, *, reads_last: bool = False) -> Rows:
        """Opens W slots after each row's own, and keeps the first counts[b] of row b.

        Args:
            reads_last: only the output of each row's last own slot is read.
        """
        assert self.window is None or width <= PREFILL_CHUNK, "more slots than a ring has room for beside its window"
        slots_BW = self.lengths[:, None] + torch.arange(width, device=self.keys.device)
        self.max_slots = min(max_slots, self.num_held)
        # A row's padding goes to slots that the next call overwrites.
        if self.window is None:
            columns = (self.num_scratch + slots_BW).clamp(max=self.keys.shape[2] - 1)
            slot_of_column = self.columns[: self.num_scratch + max_slots] - self.num_scratch
            mask_BWS = (slot_of_column >= 0) & (slot_of_column <= slots_BW[..., None])
        else:
            columns = self.num_scratch + slots_BW % self.num_held
            self.begins.clamp_(min=slots_BW[:, -1] + 1 - self.num_held)
            held, own = self._held_slots(slots_BW[:, -1:]), slots_BW[..., None]
            mask_BWS = F.pad((held <= own) & (held > own - self.window), (self.num_scratch, 0))
        self.lengths += counts  # in place: its address stays from step to step
        return Rows(self, columns, mask_BWS[:, None], counts if reads_last else None)

    def open_scratch(self, own: Tensor, ancestors: Tensor, ahead: Tensor | None = None) -> Rows:
        """Opens the W tree rows `own` [W] of one level; `ancestors` [B, W, R] are the tree rows that each sees.

        With a window each row sees what the last accepted slot sees, or [W] `ahead` slots less of it.
        """
        if self.window is None:
            certain = (self.columns[: self.max_slots] < self.lengths[:, None])[:, None]
        else:
            first = self.lengths[:, None, None] - self.window
            first = first if ahead is None else first + ahead[:, None]
            certain = self._held_slots(self.lengths[:, None] - 1) >= first
        mask = torch.cat([ancestors, certain.expand(-1, ancestors.shape[1], -1)], dim=-1)[:, None]
        return Rows(self, own, mask)

    def _held_slots(self, ends: Tensor) -> Tensor:
        """[B, 1, places in view], the slot at each place of the ring after those up to `ends` [B, 1] were written; a
        number below all slots where there is none."""
        slots = ends - (ends - self.columns[: self.max_slots]) % self.num_held
        return slots.masked_fill(slots < self.begins[:, None], torch.iinfo(slots.dtype).min // 2)[:, None]

    def copy_rows(self, source: DraftCache, rows: Tensor, lengths: Tensor, max_slots: int) -> None:
        """Row b gets the first lengths[b] slots, at most `max_slots`, of row rows[b] of `source`: this cache or another
        one, which may have other numbers of rows, slots and tree rows.
        """
        width, device = min(max_slots, self.num_held, source.num_held), self.keys.device
        rows, lengths = rows.to(device), lengths.to(device)
        if self.window is None:
            planes = [
                plane.narrow(2, source.num_scratch, width).index_select(0, rows)
                for plane in (source.keys, source.values)
            ]
        else:
            slots = (lengths[:, None] - width + torch.arange(width, device=device)).clamp(min=0)
            places = source.num_scratch + slots % source.num_held
            planes = [plane[rows[:, None], :, places] for plane in (source.keys, source.values)]
        begins = torch.minimum(source.begins.index_select(0, rows), lengths)
        self.show_rows(len(rows))
        self.lengths.copy_(lengths)
        self.begins.copy_(begins)
        every_row = torch.arange(len(rows), device=device)[:, None]
        for plane, found in zip((self.keys, self.values), planes, strict=True):
            if self.window is None:
                plane.narrow(2, self.num_scratch, width).copy_(found)
            else:
                plane[every_row, :, self.num_scratch + slots % self.num_held] = found


@dataclass(frozen=True)
class Rows:
    """The rows of one cached pass: where a layer writes its keys and values, and what it sees.

    Attributes:
        columns: [B, Q] or [Q], the cache columns opened for the rows.
        mask: [B, 1, Q, S] bool, True = sees.
        counts: [B] where only the output of each row's last own slot is read: later slots read the keys and values of
            the others. None = the outputs of all rows.
    """

    cache: DraftCache
    columns: Tensor
    mask: Tensor
    counts: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object, **more: object) -> tuple[Tensor, Tensor]:
        """[B, G, Q, d] of the rows -> [B, G, S, d] of everything in view. transformers' layers call this method."""
        cache, columns = self.cache, self.columns
        if columns.dim() == 1:
            cache.keys.index_copy_(2, columns, keys)  # a slice assignment may copy the cache
            cache.values.index_copy_(2, columns, values)
        else:
            every_row = torch.arange(len(columns), device=columns.device)[:, None]
            cache.keys[every_row, :, columns] = keys.transpose(1, 2)
            cache.values[every_row, :, columns] = values.transpose(1, 2)
        view = cache.num_scratch + cache.max_slots
        return cache.keys[:, :, :view], cache.values[:, :, :view]


class DraftAttention(nn.Module):
    """Grouped-query attention whose input may be wider than the hidden size (EAGLE-3 reads 2D). The projections to q, k
    and v, and the one back to the hidden size, have biases where the config says so; they start at 0.

    Args:
        window: how many of the last accepted slots a row sees; None = all.
    """

    def __init__(
        self, config: PreTrainedConfig, input_size: int, hidden_size: int, *, window: int | None = None
    ) -> None:
        super().__init__()
        self.window = window
        qkv_bias, o_bias = getattr(config, "qkv_bias", False), getattr(config, "o_bias", False)
        self.head_dim: int = config.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_groups: int = config.num_key_value_heads
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(input_size, self.num_groups * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(input_size, self.num_groups * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=o_bias)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.rope = RotaryEmbedding(config)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, input], positions [B, Q] -> q [B, H, Q, d], k and v [B, G, Q, d], rotated."""
        batch, length, _ = x.shape
        shape = batch, length, -1, self.head_dim
        q = self.q_proj(x).view(shape).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        cos, sin = self.rope(positions)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def new_cache(self, batch_size: int, *, num_slots: int, num_scratch: int) -> DraftCache:
        weight = self.k_proj.weight
        return DraftCache(
            (batch_size, self.num_groups, self.head_dim),
            num_slots=num_slots,
            num_scratch=num_scratch,
            device=weight.device,
            dtype=weight.dtype,
            window=self.window,
        )

    def output(self, attended: Tensor) -> Tensor:
        """[B, H, Q, d] -> [B, Q, D]."""
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, counts: Tensor | None = None) -> Tensor:
        """q [B, H, Q, d] over keys and values [B, G, S, d] where mask [B, 1, Q, S] is True -> [B, Q, D].

        With `counts` [B] only for slot counts[b] - 1 of row b: [B, 1, D].
        """
        if counts is not None:
            q, mask = last_slot(q.transpose(1, 2), counts).transpose(1, 2), last_slot(mask[:, 0], counts)[:, None]
        return self.output(attend_masked(q, keys, values, mask))

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
        """`attend` after the rows' keys and values [B, G, Q, d] are written: [B, Q, D]; with counts [B, 1, D]."""
        return self.attend(q, *rows.update(keys, values), rows.mask, rows.counts)

    def attend_unrolled(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """`draftsmith.heads.modules.unrolled_attention.attend_unrolled` and the output projection: [B, T, D]."""
        return self.output(attend_unrolled(q, keys, values, self.window))


class GatedMLP(nn.Module):
    def __init__(self, config: PreTrainedConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)))


class DraftLayer(nn.Module):
    """A decoder layer from its attention on. Kinds define the norms before it and the attention's input.

    Attributes:
        gradient_checkpointing: compute the MLP, whose states are most of what a layer keeps, again in the backward
            pass. transformers sets it.
    """

    gradient_checkpointing: bool = False
    _gradient_checkpointing_func: Callable[..., Tensor]

    def add_blocks(self, config: PreTrainedConfig, attention: DraftAttention, hidden_size: int) -> None:
        """Called after the input norms are built: stored optimizer states depend on the order of parameters."""
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, hidden_size)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its residual and its attention's output, all [B, Q, D]."""
        hidden = residual + attended
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self._add_mlp, hidden, preserve_rng_state=False)
        return self._add_mlp(hidden)

    def _add_mlp(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class DecoderLayer(DraftLayer):
    """A pre-norm decoder layer: Llama's, unless another attention is given."""

    def __init__(self, config: PreTrainedConfig, hidden_size: int, attention: DraftAttention | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.add_blocks(config, attention or DraftAttention(config, hidden_size, hidden_size), hidden_size)

    def project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`DraftAttention.project` of the normed states [B, Q, D]."""
        return self.self_attn.project(self.input_layernorm(hidden), positions)

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The layer of states [B, Q, D] at positions [B, Q]; `attend` maps the queries, keys and values of `project` to
        the attention's output [B, Q, D]."""
        return self.finish(hidden, attend(*self.project(hidden, positions)))

    def new_cache(self, batch_size: int, **sizes: int) -> DraftCache:
        return self.self_attn.new_cache(batch_size, **sizes)

    def decode(self, hidden: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """`run` over `rows` of a cache; with their `counts` [B, 1, D]."""
        attended = self.self_attn.decode(*self.project(hidden, positions), rows)
        return self.finish(hidden if rows.counts is None else last_slot(hidden, rows.counts), attended)

    def unroll(self, hidden: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`run` over whole sequences. A slot sees depth 0 of earlier slots, and all depths of its own.

        Args:
            past: keys and values of the depths before this one; this depth's are appended.
        """
        q, keys, values = self.project(hidden, positions)
        past.append((keys, values))
        return self.finish(hidden, self.self_attn.attend_unrolled(q, [k for k, _ in past], [v for _, v in past]))
