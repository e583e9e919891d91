"""The EAGLE kinds' common base: one decoder layer that drafts level by level by reading its own outputs.

Legend: B batch, T sequence length, S slots of one call, W frontier nodes, D hidden size, F feature width, R scratch
rows of the tree, K unroll steps.

Slot t pairs a state of position t with the embedding of x_{t+1} and predicts x_{t+2} (EAGLE, arXiv 2401.15077, section
3.1). The state of an accepted slot comes from the target's features. A drafted node's state is its parent's output.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.base import EXTEND_CHUNK, DraftHeads
from draftsmith.heads.config import DecoderConfig
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import DraftCache, DraftLayer
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.targets.target import Target


class AutoregressionConfig(DecoderConfig):
    """The settings that the EAGLE kinds share.

    Args:
        ttt_steps: steps of the unroll in training; each reads the outputs of the step before.
        qkv_bias: biases of the projections to q, k and v (published heads of some targets have them).
        o_bias: a bias of the attention's output projection (likewise).
        own_embedding: token embeddings of the heads' own, in place of the target's. They start as a copy of the
            target's and are trained. Published heads that were trained so have them.
        **kwargs: arguments of `DecoderConfig`.
    """

    def __init__(
        self,
        *,
        ttt_steps: int = 1,
        qkv_bias: bool = False,
        o_bias: bool = False,
        own_embedding: bool = False,
        **kwargs: Any,
    ) -> None:
        if ttt_steps < 1:
            raise ValueError(f"ttt_steps is {ttt_steps}; allowed is 1 or more (EAGLE-1 uses 1, HASS 3, EAGLE-3 7)")
        self.ttt_steps = ttt_steps
        self.qkv_bias = qkv_bias
        self.o_bias = o_bias
        self.own_embedding = own_embedding
        super().__init__(**kwargs)


@dataclass
class AutoregressionState:
    """The state of one batch. The level is in tensors of fixed shape, so that one compiled graph serves every level.

    Attributes:
        cache: the draft layer's keys and values, with R scratch rows.
        hidden: [B, 1 + R, D] outputs of the last accepted slot (row 0) and of each scratch row; the states of their
            children.
        ancestors: [B, 1 + R, R] bool, which scratch rows each row of `hidden` sees.
        base: [1], where the last frontier begins in `hidden`.
        depth: [1], how many levels there are so far.
        draft_token_ids: as the heads', made once.
    """

    cache: DraftCache
    hidden: Tensor
    ancestors: Tensor
    base: Tensor
    depth: Tensor
    draft_token_ids: Tensor | None


class AutoregressionHeads(DraftHeads):
    """One draft layer that reads its own outputs. A kind defines what the layer reads and how its outputs are scored.

    Attributes:
        detaches_steps: whether gradients stop between the steps of an unroll.
    """

    supports_gradient_checkpointing = True
    config_class = AutoregressionConfig
    detaches_steps: ClassVar[bool] = False
    row_tensors: ClassVar[tuple[str, ...]] = ("hidden", "ancestors")

    def __init__(self, config: AutoregressionConfig) -> None:
        super().__init__(config)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.target_vocab_size, config.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The input embeddings of `token_ids` [...] in `compute_dtype`: [..., D]."""
        if not self.config.own_embedding:
            return super().embed(token_ids)
        return cast(Tensor, self.embed_tokens(token_ids)).to(self.compute_dtype)

    def init_from_target(self, target: Target) -> None:
        """Embeddings of the heads' own start as the target's."""
        if self.config.own_embedding:
            with torch.no_grad():
                self.embed_tokens.weight.copy_(
                    target.embed_tokens(torch.arange(target.vocab_size, device=target.device))
                )

    @property
    def dtype(self) -> torch.dtype:
        """transformers' own walks through all parameters at every call."""
        return self.layer.self_attn.k_proj.weight.dtype

    @property
    @abstractmethod
    def layer(self) -> DraftLayer: ...

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., F], in any dtype -> states of accepted slots [..., D] in the heads' dtype."""

    @abstractmethod
    def prepare(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens and states of slots, both [..., D] -> the layer's residual [..., D] and the input of its
        attention [..., input size]."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The output of a slot [..., D], which is scored and is its children's state."""
        return self.layer.finish(residual, attended)

    @abstractmethod
    def score(self, hidden: Tensor) -> Tensor:
        """Outputs [..., D] -> logits [..., C]."""

    # Training.

    @property
    def num_unrolled_steps(self) -> int:
        return int(self.config.ttt_steps)

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        """The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2), or harmonized context alignment (HASS, arXiv
        2408.15766, section 3.2).

        Step k reads the data's tokens shifted left by k, step k - 1's outputs as states, and RoPE positions t + k.
        """
        batch, length = input_ids.shape
        state = self.fuse(features)
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
        embedded = self.embed(input_ids)
        attention = self.layer.self_attn
        steps: list[DraftStep] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(self.config.ttt_steps):
            tokens = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, min(k + 1, length)))[:, :length]
            residual, inputs = self.prepare(tokens, state)
            q, key, value = attention.project(inputs, positions + k)
            keys.append(key)
            values.append(value)
            hidden = self.finish(residual, attention.attend_unrolled(q, keys, values))
            steps.append(DraftStep(2 + k, hidden, self.score))
            state = hidden.detach() if self.detaches_steps else hidden
        return steps

    # Decoding.

    def require_vocabulary(self) -> None:
        if self.wants_token_counts:
            raise ValueError(
                "these heads have no draft vocabulary yet: train them, or call fit_vocabulary(token_counts)"
            )

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> AutoregressionState:
        self.require_vocabulary()
        cache = self.layer.self_attn.new_cache(batch_size, num_slots=max_length, num_scratch=num_scratch)
        rows, zero = 1 + num_scratch, torch.zeros(1, dtype=torch.long, device=self.device)
        hidden = torch.zeros(batch_size, rows, self.config.hidden_size, device=self.device, dtype=self.dtype)
        ancestors = torch.zeros(batch_size, rows, num_scratch, dtype=torch.bool, device=self.device)
        return AutoregressionState(cache, hidden, ancestors, zero, zero.clone(), self.draft_token_ids)

    def draft_caches(self, state: AutoregressionState) -> list[DraftCache]:
        return [state.cache]

    def extend(
        self,
        state: AutoregressionState,
        features: Tensor | None,
        next_token_ids: Tensor,
        counts: Tensor,
        *,
        max_slots: int,
    ) -> DraftLogits:
        assert features is not None
        cache, last_hidden, attention = state.cache, state.hidden[:, :1], self.layer.self_attn
        for start in range(0, next_token_ids.shape[1], EXTEND_CHUNK):
            token_ids = next_token_ids[:, start : start + EXTEND_CHUNK]
            width = token_ids.shape[1]
            here = (counts - start).clamp(0, width)
            fused = self.fuse(features[:, start : start + width])
            positions = cache.lengths[:, None] + torch.arange(width, device=fused.device)
            residual, inputs = self.prepare(self.embed(token_ids), fused)
            q, keys, values = attention.project(inputs, positions)
            hidden = self.finish(residual, attention.attend(q, *cache.append(keys, values, here, max_slots)))
            last = (here - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
            last_hidden = torch.where((here > 0)[:, None, None], hidden.gather(1, last), last_hidden)
        state.hidden.narrow(1, 0, 1).copy_(last_hidden)
        state.base, state.depth = torch.zeros_like(state.base), torch.zeros_like(state.depth)
        return DraftLogits(self.score(last_hidden), state.draft_token_ids)

    def expand(self, state: AutoregressionState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        width, cache, attention = token_ids.shape[1], state.cache, self.layer.self_attn
        rows = (state.base + parents)[..., None]
        above = state.hidden.gather(1, rows.expand(-1, -1, state.hidden.shape[-1]))
        own = cache.used_scratch + torch.arange(width, device=above.device)  # this level's scratch rows
        itself = own[:, None] == torch.arange(cache.num_scratch, device=above.device)
        ancestors = state.ancestors.gather(1, rows.expand(-1, -1, cache.num_scratch)) | itself
        # The last accepted slot is lengths - 1, and level d of the tree is d slots after it.
        positions = (cache.lengths[:, None] + state.depth).expand(-1, width)
        residual, inputs = self.prepare(self.embed(token_ids), above)
        q, keys, values = attention.project(inputs, positions)
        view = cache.append_scratch(keys, values, ancestors)
        hidden = self.finish(residual, attention.attend(q, *view))
        state.hidden.index_copy_(1, 1 + own, hidden)
        state.ancestors.index_copy_(1, 1 + own, ancestors)
        state.base, state.depth = 1 + own[:1], state.depth + 1
        return DraftLogits(self.score(hidden), state.draft_token_ids)
