"""SmallModelDrafter: a small causal LM with the target's tokenizer drafts (Leviathan et al., arXiv 2211.17192).

The small model is a `Target` of its own with its own cache. Each level of a chain or tree is one pass of the small
model; the next `extend` reads the committed tokens again, in one pass.

Legend: B batch, S slots of one call, W frontier nodes of one tree level, R tree rows, V the target's
vocabulary, Vs the small model's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.cache.tree_rows import TreeRowsCache
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.row_state import RowState, TreeRows
from draftsmith.inference.targets.target import Target

SHOWN_CONFLICTS = 3


@dataclass
class SmallModelState(RowState):
    """The state of one batch.

    Attributes:
        cache: the small model's keys and values, with R tree rows.
        tree: who sees whom among the tree rows.
        num_first: first tokens of texts in the cache, which no slot holds: 0 or 1.
    """

    cache: TreeRowsCache
    tree: TreeRows
    num_first: int = 0
    row_fields = ("tree",)

    def reset(self, num_rows: int) -> None:
        super().reset(num_rows)
        self.cache.reset(num_rows)
        self.num_first = 0

    def copy_rows(self, source: SmallModelState, rows: Tensor, lengths: Tensor, max_slots: int) -> None:
        super().copy_rows(source, rows, lengths, max_slots)
        self.num_first = source.num_first
        self.cache.copy_rows(source.cache, rows, lengths + self.num_first, max_length=max_slots + self.num_first)

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.cache.keep_rows(rows)

    def add_rows(self, other: SmallModelState, max_slots: int) -> None:
        assert self.num_first == other.num_first, "all rows have read their first tokens, or none"
        super().add_rows(other, max_slots)
        self.cache.add_rows(other.cache, max_length=max_slots + other.num_first)


class SmallModelDrafter(Drafter, nn.Module):
    """Drafts with a causal LM whose token ids mean the same tokens as the target's.

    A chain of n tokens takes n passes of the LM. Positions beyond the small model's own limit are drafted at the limit:
    fewer drafts are accepted then, at full cost. Layers with a sliding window read the whole text.

    Args:
        model: a frozen causal LM of transformers, or a `Target` made of one, on the target's device. An encoder-decoder
            target needs a smaller encoder-decoder model, which encodes the source itself, once per text.
        tokenizer, target_tokenizer: pass both to have them compared. The two vocabularies may then differ in size, by
            padding or by tokens that only one model has; otherwise they must be of one size.

    Raises:
        ValueError: for a model that `Target` refuses, and for tokenizers that differ.
    """

    can_copy_rows = True
    has_static_state = True
    reads_first_token = True

    def __init__(self, model: Target | nn.Module, *, tokenizer: Any = None, target_tokenizer: Any = None) -> None:
        super().__init__()
        self.small = Target.of(model)
        self.model = self.small.model  # a submodule, so that parameters() finds its weights
        if (tokenizer is None) != (target_tokenizer is None):
            raise ValueError("one tokenizer cannot be compared: pass both tokenizer and target_tokenizer, or neither")
        self.has_compared = tokenizer is not None
        if self.has_compared:
            compare_tokenizers(tokenizer, target_tokenizer)
        self.num_target_tokens = self.small.vocab_size

    @property
    def config(self) -> Any:
        return self.small.text_config

    @property
    def dtype(self) -> torch.dtype:
        return self.small.dtype

    def for_target(self, target: Target) -> SmallModelDrafter:
        """The drafter itself, or one of the same small model for a vocabulary of another size or with packed weights.

        Raises:
            ValueError: the vocabularies differ in size and the tokenizers were not compared; the models are on two
                devices; one model is decoder-only and the other an encoder-decoder.
        """
        if self.small.device != target.device:
            raise ValueError(
                f"the target is on {target.device}, the small model on {self.small.device}: both must be on one "
                f"device; load the small model there, or move it with small_model.to({str(target.device)!r})"
            )
        if self.small.vocab_size != target.vocab_size and not self.has_compared:
            raise ValueError(
                f"the target has a vocabulary of {target.vocab_size} tokens, the small model one of "
                f"{self.small.vocab_size}: give a small model with the target's tokenizer, or, if they differ by "
                "padding only, pass tokenizer= and target_tokenizer= so that they can be compared"
            )
        if self.small.is_encoder_decoder != target.is_encoder_decoder:
            kinds = {True: "an encoder-decoder model", False: "a decoder-only model"}
            raise ValueError(
                f"the target is {kinds[target.is_encoder_decoder]}, the small model "
                f"{kinds[self.small.is_encoder_decoder]}: both must be of one kind"
            )
        has_to_pack = target.is_packed and not self.small.is_packed
        if self.num_target_tokens == target.vocab_size and not has_to_pack:
            return self
        view = copy.copy(self)
        view.num_target_tokens = target.vocab_size
        if has_to_pack:
            view.small = self.small.with_packed_weights()
            view._modules = {"model": view.small.model}
        return view

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> SmallModelState:
        cache = self.small.new_tree_rows_cache(batch_size, max_tokens=max_length + 1, num_scratch=num_scratch)
        return SmallModelState(cache, TreeRows(batch_size, num_scratch, cache.lengths.device))

    def read_source(self, state: SmallModelState, token_ids: Tensor, mask: Tensor) -> None:
        self.small.read_source(state.cache, self.small.encode_source(self.to_small_ids(token_ids), mask))

    def read_first(self, state: SmallModelState, token_ids: Tensor) -> None:
        """`Drafter.read_first`. Without this call, texts begin with their second token."""
        self.read_committed(state, token_ids[:, None], torch.ones_like(token_ids), max_tokens=1)
        state.num_first = 1

    def extend(
        self, state: SmallModelState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        return self.to_draft(self.read_committed(state, next_token_ids, counts, max_tokens=max_slots + 1))

    def expand(self, state: SmallModelState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        level = state.tree.open_level(parents)
        state.cache.open_level(level.own)
        logits = self.small.score_opened(
            state.cache,
            self.to_small_ids(token_ids),
            level.depth.expand(token_ids.shape),
            level.ancestors,
            tree_depths=state.tree.depths[None],
        )
        return self.to_draft(logits)

    def read_committed(
        self, state: SmallModelState, token_ids: Tensor, counts: Tensor, *, max_tokens: int, num_guesses: int = 0
    ) -> Tensor:
        """One pass over committed tokens and guesses that follow them.

        Args:
            token_ids: [B, S] int64; in row b, counts[b] committed tokens and then `num_guesses` guesses.
            max_tokens: the largest number of committed tokens of any row after this call.

        Returns:
            logits [B, 1 + num_guesses, Vs] after the last accepted token and after each guess.
        """
        cache, width = state.cache, token_ids.shape[1]
        cache.open_committed(width, max_tokens)
        steps = torch.arange(width, device=token_ids.device)
        num_real = counts + num_guesses
        depths = torch.minimum(steps, (num_real[:, None] - 1).clamp(min=0))  # padding never runs ahead of real tokens
        causal = (steps[:, None] >= steps).expand(token_ids.shape[0], width, width)
        read = (counts - 1).clamp(min=0)[:, None] + torch.arange(1 + num_guesses, device=counts.device)
        logits = self.small.score_opened(cache, self.to_small_ids(token_ids), depths, causal, read=read)
        cache.keep_committed(counts)
        state.tree.forget_levels()
        return logits

    def to_small_ids(self, token_ids: Tensor) -> Tensor:
        """Ids that the small model does not have are padding of the vocabulary; its last id replaces them."""
        if self.num_target_tokens <= self.small.vocab_size:
            return token_ids
        return token_ids.clamp(max=self.small.vocab_size - 1)

    def to_draft(self, logits: Tensor) -> DraftLogits:
        """The small model's logits [B, W, Vs] as scores of the target's tokens."""
        if self.small.vocab_size >= self.num_target_tokens:
            return DraftLogits(logits[..., : self.num_target_tokens])
        return DraftLogits(logits, torch.arange(self.small.vocab_size, device=logits.device))


def compare_tokenizers(tokenizer: Any, target_tokenizer: Any) -> None:
    """Refuses a small model's tokenizer in which an id is another token than in the target's."""
    vocabularies = (one.get_vocab().items() for one in (tokenizer, target_tokenizer))
    small, target = ({index: token for token, index in vocabulary} for vocabulary in vocabularies)
    conflicting = sorted(index for index in small.keys() & target.keys() if small[index] != target[index])
    if conflicting:
        shown = [
            f"{index} is {target[index]!r} in the target's and {small[index]!r} in the small model's"
            for index in conflicting[:SHOWN_CONFLICTS]
        ]
        raise ValueError(
            f"the tokenizers differ in {len(conflicting)} ids ({'; '.join(shown)}): give a small model with the "
            "target's tokenizer"
        )
