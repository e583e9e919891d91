"""DFlash 2 (Inco AI and z-lab 2026): DFlash's blocks with convolutions in the draft layers, and a selector of
candidates.

Legend: B batch, W frontier nodes, K depths, D hidden size, R rank, k candidates, C scored tokens, V target vocabulary.

The k best tokens of a row are its candidates. After a token a, candidate b of row t has the score

    U_t(b) + (A[a] * H h_t) . B[b],

where U_t are DFlash's logits and h_t is the row's state. So one pass of the draft layers gives every node of a tree its
own distribution, over k tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftsmith.heads.base import DraftHeads
from draftsmith.heads.kinds.block import BlockConfig, BlockHeads, BlockState
from draftsmith.heads.modules.block_convolution import ConvolvedLayer
from draftsmith.heads.modules.candidate_selector import CandidateSelector
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

    def __init__(
        self,
        *,
        conv_kernel_size: int = 2,
        conv_group_size: int = 16,
        selector_rank: int = 256,
        selector_top_k: int = 16,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("markov_rank") or kwargs.get("has_confidence"):
            raise ValueError(
                "markov_rank and has_confidence are DSpark's, and DFlash 2 has a selector: leave them out, or choose "
                "head_type block"
            )
        self.conv_kernel_size = conv_kernel_size
        self.conv_group_size = conv_group_size
        self.selector_rank = selector_rank
        self.selector_top_k = selector_top_k
        super().__init__(**kwargs)
        for name, value, most in (
            ("conv_kernel_size", conv_kernel_size, self.block_size),
            ("conv_group_size", conv_group_size, None),
            ("selector_rank", selector_rank, None),
            ("selector_top_k", selector_top_k, self.target_vocab_size or None),
        ):
            if value < 1 or (most is not None and value > most):
                raise ValueError(f"{name} is {value}; allowed is {f'1 to {most}' if most else '1 or more'}")
        if self.hidden_size % conv_group_size:
            raise ValueError(
                f"conv_group_size is {conv_group_size}, which does not divide the hidden size {self.hidden_size}"
            )


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

    def _unroll_at(self, features: Tensor, input_ids: Tensor, slots: Tensor | None) -> list[DraftStep]:
        steps, most = super()._unroll_at(features, input_ids, slots), self.config.selector_top_k
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
