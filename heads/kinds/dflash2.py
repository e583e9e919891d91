"""DFlash 2 (Inco AI and z-lab 2026): DFlash's blocks with convolutions in the draft layers, and a selector of
candidates.

Legend: B batch, Q rows of a pass (whole blocks of N), N block size, W frontier nodes, K depths, D hidden size, R rank,
k candidates, C scored tokens, V target vocabulary, J taps, G groups of channels that share a correction.

The k best tokens of a row are its candidates. After a token a, candidate b of row t has the score

    U_t(b) + (A[a] * H h_t) . B[b],

where U_t are DFlash's logits and h_t is the row's state. So one pass of the draft layers gives every node of a tree its
own distribution, over k tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.kinds.block import BlockConfig, BlockHeads, BlockState
from draftsmith.heads.modules.block_layer import BlockLayer
from draftsmith.heads.modules.draft_step import DraftStep
from draftsmith.inference.drafters.base import DraftLogits


class DFlash2Config(BlockConfig):
    """The settings of DFlash 2.

    Args:
        conv_kernel_size: rows that a convolution reads: a row and those before it in the block.
        conv_group_size: channels that share the part of a kernel which depends on the input.
        selector_rank: R.
        selector_top_k: k, at most that many tokens of a row can be drafted.
        **kwargs: arguments of `BlockConfig`, without DSpark's `markov_rank` and `has_confidence`.
    """

    model_type = "draftsmith_dflash2"
    head_type: ClassVar[str] = "dflash2"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self, **kwargs: Any) -> None:
        if self.markov_rank or self.has_confidence:
            raise ValueError(
                "markov_rank and has_confidence are DSpark's, and DFlash 2 has a selector: leave them out, or choose "
                "head_type block"
            )
        super().__post_init__(**kwargs)
        self.check_range("conv_kernel_size", 1, self.block_size)
        self.check_range("conv_group_size", 1)
        self.check_range("selector_rank", 1)
        self.check_range("selector_top_k", 1, self.target_vocab_size or None)
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, which does not divide the hidden size {self.hidden_size}"
            )


class BlockConvolution(nn.Module):
    """Two depthwise convolutions, of a sublayer's input and of its output:

        y_t = sum over j < J of (base_j + correction_j(x_t)) x_{t-j}, without rows before the block,

    where x is the sublayer's input. Both corrections are linear in it. Starts as the identity.
    """

    def __init__(self, hidden_size: int, block_size: int, num_taps: int, group_size: int) -> None:
        super().__init__()
        self.block_size, self.group_size = block_size, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, num_taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * num_taps * (hidden_size // group_size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, Q, D] -> the sublayer's output [B, Q, D], between the convolutions."""
        _, num_taps, _ = self.base_kernel.shape
        corrections = self.kernel_projection(x).unflatten(-1, (2, num_taps, -1))
        y = sublayer(self._convolve(x, 0, corrections[..., 0, :, :]))
        return self._convolve(y, 1, corrections[..., 1, :, :])

    def _convolve(self, x: Tensor, side: int, corrections: Tensor) -> Tensor:
        """x [B, Q, D]; corrections [B, Q, J, G].

        Worked example: N = 2, base taps 1 and 10, no corrections: rows 1, 2, 3, 4 become 1, 12, 3, 34.
        """
        blocks = x.unflatten(1, (-1, self.block_size))
        total = torch.zeros_like(x)
        for tap, base in enumerate(self.base_kernel[side].to(x.dtype)):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size].flatten(1, 2)
            total = total + (base + corrections[:, :, tap].repeat_interleave(self.group_size, dim=-1)) * shifted
        return total


class ConvolvedLayer(BlockLayer):
    """A block drafter's layer with convolutions around its attention and its MLP. Keys and values of the fused features
    are not convolved."""

    def __init__(self, config: DFlash2Config, window: int | None = None) -> None:
        super().__init__(config, window)
        shape = config.hidden_size, config.block_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = BlockConvolution(*shape)
        self.mlp_conv = BlockConvolution(*shape)

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return attend(*self.self_attn.project(x, positions))

        return self.finish(hidden, self.attention_conv(self.input_layernorm(hidden), attention))

    def _add_mlp(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp))


class CandidateSelector(nn.Module):
    """(A[a] * H h) . B[b], which is added to the logit of a candidate b after a token a, at a row with state h.

    B starts at zero. A starts from small random numbers, as in published trainers.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_embedding = nn.Embedding(vocab_size, rank)
        self.successor_embedding = nn.Embedding(vocab_size, rank)
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_embedding.weight, std=0.02)
        nn.init.zeros_(self.successor_embedding.weight)

    def pair(self, hidden: Tensor, before: Tensor) -> Tensor:
        """States [..., D] and the tokens before them [...] -> A[a] * H h [..., R]."""
        paired: Tensor = self.predecessor_embedding(before) * self.hidden_projection(hidden)
        return paired

    def score(self, paired: Tensor, token_ids: Tensor) -> Tensor:
        """The result of `pair` [..., R], and candidates [..., k] -> [..., k]."""
        return torch.einsum("...r,...kr->...k", paired, self.successor_embedding(token_ids))


class DFlash2Heads(BlockHeads):
    """`BlockHeads` whose layers are convolved, and whose drafts are candidates that the selector has scored."""

    config_class = DFlash2Config
    layer_class = ConvolvedLayer
    grows_from = "block"

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.selector = CandidateSelector(config.target_vocab_size, config.hidden_size, config.selector_rank)

    @classmethod
    def grow_from(cls, heads: DraftHeads, **overrides: Any) -> Self:
        """DFlash 2 that drafts, before it is trained, what the DFlash heads draft."""
        is_block = heads.config.head_type == cls.grows_from
        if not is_block or heads.config.markov_rank or heads.config.has_confidence:
            parts = " with parts of DSpark (markov_rank, has_confidence)" if is_block else ""
            cure = (
                "leave --head_type out"
                if heads.config.head_type == "dflash2"
                else "start new heads, without --init_heads"
            )
            raise ValueError(
                f"dflash2 heads start from DFlash's, and these are {heads.config.head_type} heads{parts}: {cure}"
            )
        foreign = {*vars(PreTrainedConfig()), "model_type", "head_type"}
        kept = {key: value for key, value in vars(heads.config).items() if key not in foreign}
        grown = cls(DFlash2Config(**{**kept, **overrides}))
        grown._adapter[:], grown.token_counts = heads._adapter, heads.token_counts
        grown.bind(heads.target)
        with torch.no_grad():
            grown.init_from_target(heads.target)
        own, given = grown.state_dict(), heads.state_dict()
        if wrong := [name for name, tensor in given.items() if tensor.shape != own.get(name, tensor[:0]).shape]:
            raise ValueError(f"the settings {overrides} do not fit the heads to start from: {', '.join(wrong)} differ")
        grown.load_state_dict({**own, **given})
        return grown

    # Training: a state is [h, A[a] * H h].

    def join(self, hidden: Tensor, before: Tensor) -> Tensor:
        return torch.cat([hidden, self.selector.pair(hidden, before)], dim=-1)

    def score(self, state: Tensor) -> Tensor:
        """DFlash's logits."""
        return self.score_as_target(state[..., : self.config.hidden_size])

    def rescore(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """What the selector adds to the logits of the candidates [..., k], columns of the scores."""
        ids = token_ids if self.draft_token_ids is None else self.draft_token_ids[token_ids]
        return self.selector.score(state[..., self.config.hidden_size :], ids)

    def unroll_where(
        self, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_seeds: Tensor | None = None
    ) -> list[DraftStep]:
        steps, most = super().unroll_where(features, input_ids, loss_mask, token_seeds), self.config.selector_top_k
        return [replace(step, rescore=self.rescore, num_candidates=most) for step in steps]

    # Decoding.

    def expand(self, state: BlockState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        assert state.logits is not None
        assert state.hidden is not None
        logits = state.logits[:, depth : depth + 1]
        best, columns = logits.topk(min(self.config.selector_top_k, logits.shape[-1]), dim=-1)
        ids = columns if self.draft_token_ids is None else self.draft_token_ids[columns]
        ids = ids.expand(-1, token_ids.shape[1], -1)
        paired = self.selector.pair(state.hidden[:, depth : depth + 1], token_ids)
        return DraftLogits(best + self.selector.score(paired, ids), ids)
