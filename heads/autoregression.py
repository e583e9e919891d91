"""The EAGLE kinds' common base: a decoder layer, or a few, that draft level by level by reading their own outputs.

Legend: B batch, T sequence length, S slots of one call, W frontier nodes, D hidden size, F feature width, R tree
rows, K unroll steps.

Slot t pairs a state of position t with the embedding of x_{t+1} and predicts x_{t+2} (EAGLE, arXiv 2401.15077, section
3.1). The state of an accepted slot comes from the target's features. A drafted node's state is its parent's output.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import WindowedConfig
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import DecoderLayer, DraftAttention, DraftCache, DraftLayer, last_slot
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState, TreeRows
from draftsmith.inference.targets.target import Target

# Layer number, its attention, q, k and v -> [B, S, D].
Attend = Callable[[int, DraftAttention, Tensor, Tensor, Tensor], Tensor]


class AutoregressionConfig(WindowedConfig):
    """The settings that the EAGLE kinds share.

    Args:
        ttt_steps: steps of the unroll in training; each reads the outputs of the step before.
        qkv_bias: biases of the projections to q, k and v (published heads of some targets have them).
        o_bias: a bias of the attention's output projection (likewise).
        own_embedding: token embeddings of the heads' own, in place of the target's. They start as a copy of the
            target's and are trained. Published heads that were trained so have them.
        **kwargs: arguments of `WindowedConfig`.
    """

    ttt_steps: int = 1
    qkv_bias: bool = False
    o_bias: bool = False
    own_embedding: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("ttt_steps", 1)
        super().__post_init__(**kwargs)


@dataclass
class AutoregressionState(RowState):
    """The state of one batch.

    Attributes:
        caches: each draft layer's keys and values, with R tree rows.
        hidden: [B, 1 + R, D] outputs of the last accepted slot (row 0) and of each tree row; the states of their
            children.
        tree: who sees whom among the tree rows.
    """

    caches: list[DraftCache]
    hidden: Tensor
    tree: TreeRows
    row_fields = ("caches", "hidden", "tree")


class AutoregressionHeads(DraftHeads):
    """Draft layers that read their own outputs. A kind defines what the first reads and how outputs are scored.

    Attributes:
        detaches_steps: whether gradients stop between the steps of an unroll.
    """

    supports_gradient_checkpointing = True
    config_class = AutoregressionConfig
    detaches_steps: ClassVar[bool] = False

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
            self.embed_tokens.weight.copy_(target.embed_tokens(torch.arange(target.vocab_size, device=target.device)))

    @property
    def dtype(self) -> torch.dtype:
        """transformers' own walks through all parameters at every call."""
        return self.draft_layers[0].self_attn.k_proj.weight.dtype

    @property
    @abstractmethod
    def draft_layers(self) -> tuple[DraftLayer, *tuple[DecoderLayer, ...]]:
        """The first layer, and those above it, each of which reads the output of the one before."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., F], in any dtype -> states of accepted slots [..., D] in the heads' dtype."""

    @abstractmethod
    def prepare(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens and states of slots, both [..., D] -> the layer's residual [..., D] and the input of its
        attention [..., input size]."""

    def finish(self, hidden: Tensor) -> Tensor:
        """The last layer's output [..., D] in the form that is scored and that is the children's state."""
        return hidden

    @abstractmethod
    def score(self, hidden: Tensor) -> Tensor:
        """Outputs [..., D] -> logits [..., C]."""

    def run_layers(
        self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Attend, counts: Tensor | None = None
    ) -> Tensor:
        """Embeddings of tokens and states of slots [B, S, D] at RoPE positions [B, S] -> outputs [B, S, D].

        Args:
            counts: of a single layer, whose `attend` gives its output at each row's last own slot only [B, 1, D].
        """
        first, *further = self.draft_layers
        residual, inputs = self.prepare(embedded, state)
        attended = attend(0, first.self_attn, *first.self_attn.project(inputs, positions))
        residual = residual if counts is None else last_slot(residual, counts)
        hidden = first.finish(residual, attended)
        for number, layer in enumerate(further, start=1):
            hidden = layer.run(hidden, positions, partial(attend, number, layer.self_attn))
        return self.finish(hidden)

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
        steps: list[DraftStep] = []
        past: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.draft_layers]

        def attend(number: int, attention: DraftAttention, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = past[number]
            keys.append(key)
            values.append(value)
            return attention.attend_unrolled(q, keys, values)

        for k in range(self.config.ttt_steps):
            tokens = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, min(k + 1, length)))[:, :length]
            hidden = self.run_layers(tokens, state, positions + k, attend)
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
        caches = [
            layer.self_attn.new_cache(batch_size, num_slots=max_length, num_scratch=num_scratch)
            for layer in self.draft_layers
        ]
        hidden = torch.zeros(batch_size, 1 + num_scratch, self.config.hidden_size, device=self.device, dtype=self.dtype)
        tree = TreeRows(batch_size, num_scratch, self.device)
        return AutoregressionState(caches, hidden, tree)

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
        fused, caches = self.fuse(features), state.caches
        positions = caches[0].lengths[:, None] + torch.arange(fused.shape[1], device=fused.device)
        is_single = len(self.draft_layers) == 1  # later slots read the keys and values of a single layer only

        def attend(number: int, attention: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = caches[number].open(k.shape[2], counts, max_slots, reads_last=is_single)
            return attention.decode(q, k, v, rows)

        hidden = self.run_layers(self.embed(next_token_ids), fused, positions, attend, counts if is_single else None)
        hidden = hidden if is_single else last_slot(hidden, counts)
        last_hidden = torch.where(counts[:, None, None] > 0, hidden, state.hidden[:, :1])
        state.hidden.narrow(1, 0, 1).copy_(last_hidden)
        state.tree.forget_levels()
        return DraftLogits(self.score(last_hidden), self.draft_token_ids)

    def expand(self, state: AutoregressionState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        level = state.tree.open_level(parents)
        # The last accepted slot is lengths - 1, and level d of the tree is d slots after it.
        positions = (state.caches[0].lengths[:, None] + level.depth).expand(-1, token_ids.shape[1])

        def attend(number: int, attention: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.decode(q, k, v, state.caches[number].open_scratch(level.own, level.ancestors))

        hidden = self.run_layers(self.embed(token_ids), level.parents_of(state.hidden), positions, attend)
        state.hidden.index_copy_(1, level.places, hidden)
        return DraftLogits(self.score(hidden), self.draft_token_ids)
