"""Parts of block drafters (`draftsmith.heads.kinds.block`): attention with the target's features as keys and values
(DFlash, arXiv 2602.06036), and the bias from the previous token (DSpark, arXiv 2607.05147).

Legend: B batch, Q rows of a pass, D hidden size, H query heads, G key/value heads, d head size.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from draftsmith.heads.modules.layers import DecoderLayer, DraftAttention, RMSNorm, rotate


class BlockAttention(DraftAttention):
    """A block's queries over keys and values of the fused features and of the block itself. Queries and keys are normed
    per head."""

    read_together = (("k_proj", "v_proj"),)  # of the context, too, without queries

    def __init__(self, config: PreTrainedConfig, window: int | None = None) -> None:
        super().__init__(config, config.hidden_size, config.hidden_size, window=window)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, Q, D], positions [B, Q] -> q [B, H, Q, d], k and v [B, G, Q, d], rotated."""
        turn = self.rope(positions)
        q = self.q_norm(self._split(self.q_proj(x)))
        return rotate(q, *turn), self._project_keys(x, turn), self._split(self.v_proj(x))

    def project_context(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of `project`."""
        return self._project_keys(x, self.rope(positions)), self._split(self.v_proj(x))

    def _project_keys(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.k_norm(self._split(self.k_proj(x))), *turn)

    def _split(self, x: Tensor) -> Tensor:
        """[B, Q, heads * d] -> [B, heads, Q, d]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class BlockLayer(DecoderLayer):
    """A decoder layer whose queries come from the block. The fused features become keys and values without its norm."""

    self_attn: BlockAttention

    def __init__(self, config: PreTrainedConfig, window: int | None = None) -> None:
        super().__init__(config, config.hidden_size, BlockAttention(config, window))


class MarkovBias(nn.Module):
    """W2 W1[x], which the previous token x adds to the logits (DSpark). W2 starts at zero."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, rank)
        self.lm_head = nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)
