"""TokenHistory: the texts of a batch on the device, for logits processors that read them.

Legend: R texts (rows of the batch, or nodes of their trees), N tree nodes, P path length, C capacity, S places in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

VIEW_MULTIPLE = 256  # the view grows in steps of this many places


@dataclass
class TokenHistory:
    """Texts as transformers shows them to a processor: padding on the left, prompt, new tokens.

    Attributes:
        token_ids: [R, C] long; entries from lengths[r] on are anything.
        lengths: [R] long.
        limits: [R] long, the lengths at which the texts end.
        indices: [R] long, `Row.index` of each text; settings of processors have an entry per row of the call.
        places: [S] long, 0 .. S - 1: the part that processors look at (`open_view`). No text is longer.
        every_place: [C] long.
    """

    token_ids: Tensor
    lengths: Tensor
    limits: Tensor
    indices: Tensor
    places: Tensor
    every_place: Tensor

    @classmethod
    def of_prompts(cls, prompts: Tensor, num_new: Sequence[int], capacity: int) -> TokenHistory:
        """The texts of prompts [R, L] that may grow by so many tokens each; all `capacity` places are in view."""
        num_rows, length = prompts.shape
        token_ids = torch.zeros(num_rows, capacity, dtype=torch.long, device=prompts.device)
        token_ids[:, :length] = prompts
        limits = torch.tensor(num_new, device=prompts.device) + length
        indices, places = (torch.arange(size, device=prompts.device) for size in (num_rows, capacity))
        return cls(token_ids, torch.full_like(indices, length), limits, indices, places, places)

    def open_view(self, length: int) -> None:
        """Says that no text has more than `length` tokens in the coming step."""
        self.places = self.every_place[: -(-length // VIEW_MULTIPLE) * VIEW_MULTIPLE]

    def pick(self, rows: Tensor) -> TokenHistory:
        """Some of the texts, as far as they are in view, copied."""
        own = {name: getattr(self, name).index_select(0, rows) for name in ("lengths", "limits", "indices")}
        return replace(self, token_ids=self.tokens.index_select(0, rows), **own)

    @property
    def tokens(self) -> Tensor:
        """[R, S]"""
        return self.token_ids[:, : self.places.shape[0]]

    @property
    def is_text(self) -> Tensor:
        """[R, S] bool, which tokens belong to the texts."""
        return self.places < self.lengths[:, None]

    def last(self, count: int) -> Tensor:
        """[R, count], the last tokens of every text; anything before the beginning of a shorter text."""
        places = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.token_ids.gather(1, places.clamp(min=0))

    def extended(self, tokens: Tensor) -> TokenHistory:
        """The texts with one more token [R] each. They share this object's buffer, in which a commit writes again."""
        self.token_ids.scatter_(1, self.lengths[:, None], tokens.clamp(min=0)[:, None])
        return replace(self, lengths=self.lengths + 1)

    def at_nodes(self, token_ids: Tensor, depths: Tensor, ancestors: Tensor) -> TokenHistory:
        """The text up to every node of the rows' trees, R = B N; arguments as in `TokenTree`, [B, N] and [B, N, N].

        Worked example, the tree of TokenTree's docstring after the text "see the": "see the", "see the cat", "see the
        dog", "see the cat sat", "see the cat ran". Padding nodes have the root's text.
        """
        num_nodes = depths.shape[1]
        is_drafted = ancestors & (depths > 0)[:, None]  # the root is in the text
        spare = self.places.shape[0]  # takes what does not belong to a node's path
        places = torch.where(is_drafted, (self.lengths[:, None] + depths - 1)[:, None], spare)
        texts = torch.nn.functional.pad(self.tokens, (0, 1))[:, None].repeat(1, num_nodes, 1)
        texts.scatter_(2, places, token_ids[:, None].expand_as(places))
        limits, indices = (values.repeat_interleave(num_nodes) for values in (self.limits, self.indices))
        lengths = (self.lengths[:, None] + depths).flatten()
        return TokenHistory(texts[..., :-1].flatten(0, 1), lengths, limits, indices, self.places, self.every_place)
