"""Medusa-1 (arXiv 2401.10774): K independent heads over the target's last hidden state.

Legend: B batch, T sequence length, S slots of one call, D hidden size, V target vocabulary, K heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.config import DraftHeadsConfig
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.heads.modules.layers import last_slot
from draftsmith.inference.drafters.base import DraftLogits
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.targets.target import Target


class MedusaConfig(DraftHeadsConfig):
    """The settings of Medusa heads.

    Args:
        num_heads: K, one for each drafted token (the paper trains 5; section 2.1.1).
        num_layers: residual blocks before each head's projection (the paper uses 1).
        shares_lm_head: the target's LM head scores the blocks' outputs, so that a head is its blocks only (the authors'
            second version). False: each head has a projection of its own, as in the paper.
        **kwargs: arguments of `DraftHeadsConfig`.
    """

    model_type = "draftsmith_medusa"
    head_type: ClassVar[str] = "medusa"
    reads_one_layer = True

    num_heads: int = 5
    num_layers: int = 1
    shares_lm_head: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.check_range("num_heads", 1)
        self.check_range("num_layers", 0)
        super().__post_init__(**kwargs)


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), W and b zero at the start: an untrained head repeats the LM head (section 2.1.1)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHead(nn.Module):
    """blocks, and a projection to the vocabulary; without the latter the target's LM head scores."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.target_hidden_size
        self.blocks = nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers)))
        self.lm_head = None if config.shares_lm_head else nn.Linear(size, config.target_vocab_size, bias=False)


@dataclass
class MedusaState(RowState):
    """logits: [B, K, V] of all heads at each row's last slot."""

    logits: Tensor | None = None


class MedusaHeads(DraftHeads):
    """K heads; head i predicts x_{t+2+i} from h_t only."""

    config_class = MedusaConfig
    has_static_state = True
    reads_last_only = True
    default_loss = "cross_entropy"
    default_learning_rate = 1e-3  # of the paper, for MLPs and LM heads that start from the target's (appendix B)

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))
        self.post_init()

    @property
    def borrows_lm_head(self) -> bool:  # type: ignore[override]
        return bool(self.config.shares_lm_head)

    @property
    def each_head(self) -> list[MedusaHead]:
        return cast(list[MedusaHead], list(self.heads))

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        return int(self.config.num_heads)

    def init_from_target(self, target: Target) -> None:
        weight = target.lm_head_weight()
        for head in self.each_head:
            if head.lm_head is not None:
                head.lm_head.weight.copy_(weight)

    def scorer_of(self, head: MedusaHead) -> Callable[[Tensor], Tensor]:
        """Scores the outputs of a head's blocks: [..., D] -> [..., V]."""
        return self.score_as_target if head.lm_head is None else head.lm_head

    def unroll(self, features: Tensor, input_ids: Tensor) -> list[DraftStep]:
        hidden = features.to(self.compute_dtype)
        return [DraftStep(2 + i, head.blocks(hidden), self.scorer_of(head)) for i, head in enumerate(self.each_head)]

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> MedusaState:
        return MedusaState()

    def extend(
        self, state: MedusaState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert features is not None
        hidden_BD = last_slot(features, counts)[:, 0].to(self.compute_dtype)
        state.logits = torch.stack([self.scorer_of(head)(head.blocks(hidden_BD)) for head in self.each_head], dim=1)
        return DraftLogits(state.logits[:, :1], self.draft_token_ids)

    def expand(self, state: MedusaState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        assert state.logits is not None
        return DraftLogits(state.logits[:, depth : depth + 1], self.draft_token_ids)
