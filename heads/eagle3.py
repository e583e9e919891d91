"""EAGLE-3 (arXiv 2503.01840): one decoder layer over fused features of three target layers, trained as it is used.

Legend: B batch, T sequence length, S slots handed over, W frontier nodes, D hidden size, F = 3D fused features,
R scratch rows of the tree, V target vocabulary, Vd draft vocabulary.

Slot t pairs g_t = fc(features of position t) with the embedding of x_{t+1} and predicts x_{t+2}. In a tree the g of a
drafted node is its parent's output before the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from heads.base import DraftHeads, DraftStep
from heads.config import DraftHeadsConfig
from heads.layers import DraftAttention, DraftCache, GatedMLP, RMSNorm, decoder_settings
from heads.vocab import map_tensors, most_frequent_tokens
from inference.drafter import DraftLogits
from inference.target import Target

EXTEND_CHUNK = 512


def default_feature_layers(num_layers: int) -> list[int]:
    """Low, middle and high tapped layers: (2, n // 2, n - 3) as in the authors' code, kept distinct where these collide
    (n of 4 to 6).

    >>> default_feature_layers(32), default_feature_layers(5)
    ([2, 16, 29], [1, 2, 3])
    """
    layers = [2, num_layers // 2, num_layers - 3]
    if layers[0] < layers[1] < layers[2]:
        return layers
    if num_layers < 2:
        raise ValueError(f"EAGLE-3 taps three distinct layers; a target of {num_layers} layer(s) has too few")
    middle = min(max(num_layers // 2, 1), num_layers - 1)
    return [middle - 1, middle, middle + 1]


class Eagle3Config(DraftHeadsConfig):
    """Args:
    draft_vocab_size: tokens the draft head scores; None = all of the target's.
    ttt_steps: steps of the training-time test (the authors' code uses 7).
    num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act, rms_norm_eps, rope_parameters,
    max_position_embeddings: the draft layer's shape; the target's unless overridden.
    """

    model_type = "draftsmith_eagle3"
    head_type: ClassVar[str] = "eagle3"

    def __init__(
        self,
        *,
        draft_vocab_size: int | None = None,
        ttt_steps: int = 7,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        head_dim: int = 64,
        intermediate_size: int = 256,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        **kwargs: Any,
    ) -> None:
        if ttt_steps < 1:
            raise ValueError(f"ttt_steps is {ttt_steps}; allowed is 1 or more (the authors use 7)")
        if num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {num_attention_heads} and num_key_value_heads {num_key_value_heads}; "
                "the first must be a multiple of the second"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary positions need an even number")
        self.draft_vocab_size = draft_vocab_size
        self.ttt_steps = ttt_steps
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)
        size = self.target_vocab_size
        if draft_vocab_size is not None and size and not 0 < draft_vocab_size <= size:
            raise ValueError(
                f"draft_vocab_size is {draft_vocab_size}; allowed is 1 to the target's {size}, or null for all"
            )
        if self.target_num_layers and not self.feature_layers:
            raise ValueError("feature_layers is empty; EAGLE-3 reads at least one layer (the authors use three)")

    @property
    def hidden_size(self) -> int:
        return self.target_hidden_size

    @property
    def vocab_size(self) -> int:
        return self.draft_vocab_size or self.target_vocab_size

    @classmethod
    def from_target(cls, target: Target, **overrides: Any) -> Self:
        inherited = decoder_settings(target.text_config)
        if "feature_layers" not in overrides:
            inherited["feature_layers"] = default_feature_layers(target.num_layers)
        return super().from_target(target, **{**inherited, **overrides})


class Eagle3Layer(nn.Module):
    """q, k and v read [input_norm(embedding), hidden_norm(g)] (2D); the residual is the un-normed g."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = DraftAttention(config, 2 * size, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config, size)

    def project(self, embedded: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        return self.self_attn.project(inputs, positions)

    def finish(self, g: Tensor, attended: Tensor) -> Tensor:
        hidden = g + attended
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


@dataclass
class Eagle3State:
    """cache: the draft layer's keys and values, with R scratch rows.
    hidden: [B, 1 + R, D] outputs (the next nodes' g) of the last certain slot and behind it of each scratch row.
    ancestors: [B, 1 + R, R] which scratch rows each of these sees. Both have one size for all levels, and what tells
    levels apart are tensors, so that one compiled graph serves every level: base [1], where the last frontier begins in
    `hidden`; depth [1], how many levels there are so far."""

    cache: DraftCache
    hidden: Tensor
    ancestors: Tensor
    base: Tensor
    depth: Tensor


class Eagle3Heads(DraftHeads):
    """The EAGLE-3 draft head. Tensor names are those of EAGLE-3 checkpoints (`fc`, `midlayer`, `norm`, `lm_head`,
    `d2t`, `t2d`)."""

    config_class = Eagle3Config
    default_loss = "distillation"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.has_draft_vocab = config.vocab_size != config.target_vocab_size
        if self.has_draft_vocab:
            # d2t of -1 marks a vocabulary that has not been fitted yet.
            self.register_buffer("d2t", torch.full((config.vocab_size,), -1, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self.post_init()

    # The draft vocabulary.

    @property
    def draft_token_ids(self) -> Tensor | None:
        if not self.has_draft_vocab:
            return None
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    @property
    def wants_token_counts(self) -> bool:
        return self.has_draft_vocab and not bool(self.t2d.any())

    def fit_vocabulary(self, token_counts: Tensor) -> None:
        if not self.wants_token_counts:  # never recomputed: the weights' rows belong to the stored map
            return
        token_ids = most_frequent_tokens(token_counts, self.config.vocab_size).to(self.device)
        self.d2t, self.t2d = map_tensors(token_ids, self.config.target_vocab_size)
        with torch.no_grad():
            self.lm_head.weight.copy_(cast(Tensor, self.target.lm_head.weight)[token_ids])

    def init_from_target(self, target: Target) -> None:
        """The LM head's rows expect states of the final norm's scale, so both start from the target's (with a reduced
        vocabulary the rows are copied once it is known)."""
        with torch.no_grad():
            if (gain := target.final_norm_gain()) is not None:
                self.norm.weight.copy_(gain)
            if not self.has_draft_vocab:
                self.lm_head.weight.copy_(cast(Tensor, target.lm_head.weight))

    def score(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    # Training.

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """The training-time test (section 3.2): step k's tokens are teacher-forced, shifted left by k; its g is step
        k - 1's output; its RoPE positions are t + k."""
        batch, length = input_ids.shape
        g = self.fc(features.to(self.dtype))
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
        embedded = self.embed(input_ids)
        steps: list[DraftStep] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(self.config.ttt_steps):
            tokens = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, min(k + 1, length)))[:, :length]
            q, key, value = self.midlayer.project(tokens, g, positions + k)
            keys.append(key)
            values.append(value)
            g = self.midlayer.finish(g, self.midlayer.self_attn.attend_unrolled(q, keys, values))
            steps.append(DraftStep(2 + k, g, self.score))
        return steps

    # Decoding.

    def require_vocabulary(self) -> None:
        if self.wants_token_counts:
            raise ValueError(
                "these heads have no draft vocabulary yet: train them, or call fit_vocabulary(token_counts)"
            )

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Eagle3State:
        self.require_vocabulary()
        attention = self.midlayer.self_attn
        cache = DraftCache(
            (batch_size, attention.num_groups, attention.head_dim),
            num_slots=max_length,
            num_scratch=num_scratch,
            device=self.device,
            dtype=self.dtype,
        )
        rows, zero = 1 + num_scratch, torch.zeros(1, dtype=torch.long, device=self.device)
        hidden = torch.zeros(batch_size, rows, self.config.hidden_size, device=self.device, dtype=self.dtype)
        ancestors = torch.zeros(batch_size, rows, num_scratch, dtype=torch.bool, device=self.device)
        return Eagle3State(cache, hidden, ancestors, zero, zero.clone())

    def extend(
        self, state: Eagle3State, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        cache, last_hidden = state.cache, state.hidden[:, :1]
        for start in range(0, next_token_ids.shape[1], EXTEND_CHUNK):
            token_ids = next_token_ids[:, start : start + EXTEND_CHUNK]
            width = token_ids.shape[1]
            here = (counts - start).clamp(0, width)
            g = self.fc(features[:, start : start + width].to(self.dtype))
            positions = cache.lengths[:, None] + torch.arange(width, device=g.device)
            q, keys, values = self.midlayer.project(self.embed(token_ids), g, positions)
            hidden = self.midlayer.finish(
                g, self.midlayer.self_attn.attend(q, *cache.append(keys, values, here, max_slots))
            )
            last = (here - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
            last_hidden = torch.where((here > 0)[:, None, None], hidden.gather(1, last), last_hidden)
        state.hidden.narrow(1, 0, 1).copy_(last_hidden)
        state.base, state.depth = torch.zeros_like(state.base), torch.zeros_like(state.depth)
        return DraftLogits(self.score(last_hidden), self.draft_token_ids)

    def expand(self, state: Eagle3State, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        width, cache = token_ids.shape[1], state.cache
        rows = (state.base + parents)[..., None]
        g = state.hidden.gather(1, rows.expand(-1, -1, state.hidden.shape[-1]))
        own = cache.used_scratch + torch.arange(width, device=g.device)  # the scratch rows of this level
        itself = own[:, None] == torch.arange(cache.num_scratch, device=g.device)
        ancestors = state.ancestors.gather(1, rows.expand(-1, -1, cache.num_scratch)) | itself
        # The last certain slot is lengths - 1; level d of the tree stands d slots behind it.
        positions = (cache.lengths[:, None] + state.depth).expand(-1, width)
        q, keys, values = self.midlayer.project(self.embed(token_ids), g, positions)
        view = cache.append_scratch(keys, values, ancestors)
        hidden = self.midlayer.finish(g, self.midlayer.self_attn.attend(q, *view))
        state.hidden.index_copy_(1, 1 + own, hidden)
        state.ancestors.index_copy_(1, 1 + own, ancestors)
        state.base, state.depth = 1 + own[:1], state.depth + 1
        return DraftLogits(self.score(hidden), self.draft_token_ids)
