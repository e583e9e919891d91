"""A draft vocabulary for heads of any kind, without training: FR-Spec (arXiv 2502.14856).

The LM head takes a large part of a draft's time, and most of its rows belong to tokens that texts seldom have. So heads
that are trained may score only the tokens that their training data have most often. The target still verifies with all
tokens, so the text stays the same.

How often the data have each token stands beside the weights of trained heads, in `token_counts.safetensors`.

Legend: V target vocabulary, C tokens that the heads score, D hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from draftsmith.heads.modules.vocabulary import most_frequent_tokens
from draftsmith.inference.targets.target import Target

COUNTS_FILE = "token_counts.safetensors"
COUNTS = "token_counts"
# 32,000 as in EAGLE-3's heads for Llama 3; for small targets less.
DRAFT_VOCABULARIES = (32_000, 8_192)
# Above, training spends most of its memory on scores.
MOST_TOKENS = 65_536
# The LM head runs at every level of a draft, so it may have this share of the target's weights.
LM_HEAD_SHARE = 0.08


def default_draft_vocabulary(vocab_size: int, hidden_size: int, layers_size: int) -> int | None:
    """How many tokens heads score where nobody says it: all (None), or the first of `DRAFT_VOCABULARIES` whose LM head
    is small beside the target.

    Args:
        layers_size: parameters of the target's layers.

    >>> default_draft_vocabulary(49_152, 576, 106_000_000)  # SmolLM2-135M, whose LM head is 21% of a pass
    8192
    >>> default_draft_vocabulary(128_256, 4096, 7_000_000_000)  # Llama-3.1-8B
    32000
    >>> default_draft_vocabulary(32_000, 4096, 6_500_000_000)  # Llama-2-7B
    """
    whole = layers_size + vocab_size * hidden_size
    sizes = [size for size in (vocab_size, *DRAFT_VOCABULARIES) if size <= min(vocab_size, MOST_TOKENS)]
    size = next((size for size in sizes if size * hidden_size <= LM_HEAD_SHARE * whole), sizes[-1])
    return None if size == vocab_size else size


def write_counts(folder: Path, token_counts: Tensor) -> None:
    save_file({COUNTS: token_counts.cpu().contiguous()}, folder / COUNTS_FILE)


def read_counts(path: str, **hub: Any) -> Tensor | None:
    """[V] int64, the counts beside heads in a folder or hub repository; None = there are none."""
    if os.path.isfile(path):  # a GGUF file
        return None
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, COUNTS_FILE, **hub, **optional)
    return None if file is None else load_file(file)[COUNTS]


def choose_columns(size: int, token_counts: Tensor | None, vocab_size: int, own_ids: Tensor | None) -> Tensor | None:
    """The columns [size] int64 of a draft's scores that stay, in ascending order; None = all of them.

    Args:
        token_counts: [V].
        vocab_size: V.
        own_ids: the token id of each column; None = column number and token id are the same.
    """
    num_columns = vocab_size if own_ids is None else own_ids.numel()
    if not 0 < size <= num_columns:
        raise ValueError(
            f"draft_vocab_size is {size}; allowed is 1 to {num_columns}, the tokens that these heads score without it"
        )
    if size == num_columns:
        return None
    if token_counts is None:
        raise ValueError(
            f"got draft_vocab_size {size}, and there are no counts of tokens ({COUNTS_FILE}) beside these heads, from "
            "which to choose the most frequent ones: give conversations such as those that the heads were trained on "
            "(--draft_vocab_data FILE of a program, or token_counts in Python), or leave draft_vocab_size out"
        )
    if token_counts.shape != (vocab_size,):
        raise ValueError(
            f"token_counts has the shape {list(token_counts.shape)}; allowed is [{vocab_size}], a count for each token "
            "of the target: count with the target's tokenizer"
        )
    return most_frequent_tokens(token_counts.cpu() if own_ids is None else token_counts.cpu()[own_ids.cpu()], size)


@torch.no_grad()
def take_lm_head_rows(target: Target, token_ids: Tensor) -> nn.Linear:
    """An LM head that scores these tokens [C] as the target's own does, for `Target.compute_logits`."""
    weight = target.lm_head_weight()[token_ids]
    bias: Tensor = target.lm_head(weight.new_zeros(1, weight.shape[1]))[0].to(weight.device)[token_ids]
    linear = nn.Linear(weight.shape[1], len(weight), bias=bool(bias.any()), device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class DraftVocabulary:
    """Which tokens heads of any kind score: all, those that their own LM head was trained for, or fewer of these.

    Attributes:
        borrows_lm_head: as in `DraftHeads`.
        own_token_ids: [C] int64, the target's id of each token that the heads' own LM head was trained for; None = all.
        vocabulary_buffers: names of the buffers that say which tokens an own LM head was trained for.
        token_counts: [V], how often the training data have each token; None = not known.
    """

    vocabulary_buffers: ClassVar[tuple[str, ...]] = ()
    own_token_ids: Tensor | None = None
    borrows_lm_head: bool | None
    borrowed_rows: nn.Module | None
    config: Any
    target: Any

    def _init_vocabulary(self) -> None:
        self.token_counts: Tensor | None = None
        # None = `default_draft_vocabulary`. Heads have the columns that their views keep (None = all), and views their
        # token ids and the rows of the target's LM head.
        self.draft_vocab_size: int | None = None
        self._columns: Tensor | None = None
        self._column_ids: Tensor | None = None
        cast(nn.Module, self).register_module("borrowed_rows", None)
        self._learned: list[tuple[Tensor, nn.Linear]] = []  # the same of `learn_draft_vocabulary`

    @property
    def draft_token_ids(self) -> Tensor | None:
        """[C] int64, the target's id of each draft vocabulary entry; None = the target's own vocabulary."""
        if self._learned:
            return self._learned[0][0]
        return self.own_token_ids if self._column_ids is None else self._column_ids

    def score_as_target(self, hidden: Tensor) -> Tensor:
        """The target's own (frozen) LM head: states [..., D] of its final norm's scale -> logits [..., C] over
        `draft_token_ids` in its dtype."""
        rows = self._learned[0][1] if self._learned else self.borrowed_rows
        logits: Tensor = self.target.compute_logits(hidden.to(self.target.dtype), rows)
        return logits

    def choose_vocabulary(self, token_counts: Tensor) -> None:
        """Chooses the tokens to draft again, by other counts [V]: the most frequent ones, as many as before. For heads
        that learn: decoders get them with the weights (`DraftHeads.write_weights`)."""
        self.token_counts = token_counts
        if self.draft_vocab_size is not None and self._columns is not None:
            self._columns = self._choose(len(self._columns))
        if self._learned:
            self.learn_draft_vocabulary()

    def find_drafted(self, target: Target) -> Tensor | None:
        """[C] int64, the tokens that decoders of a target draft; None = all."""
        columns = self._find_columns(target)
        return self.own_token_ids if columns is None else self._ids_of(columns)

    def _choose(self, size: int) -> Tensor:
        columns = choose_columns(size, self.token_counts, self.config.target_vocab_size, self.own_token_ids)
        return cast(Tensor, columns)

    def _take_columns(self, heads: DraftVocabulary) -> None:
        """Lets this view keep the columns that its heads have chosen again."""
        ids = cast(Tensor, self._column_ids)
        ids.copy_(heads._ids_of(heads._choose(len(ids))))
        if self.borrowed_rows is not None:
            rows = take_lm_head_rows(self.target, ids)
            self.borrowed_rows.load_state_dict(rows.state_dict())

    def limit_vocabulary(self, size: int, token_counts: Tensor | None = None) -> Self:
        """Lets decoders score only the `size` most frequent tokens of those that these heads score. Without it they
        score all, or `default_draft_vocabulary` if the heads have counts and no vocabulary of their own.

        Drafts take less time, seldom tokens are not drafted, and the text stays the same. Nothing else changes:
        training and saved heads are whole. For a decoder that draws from q, q has these tokens only.

        Args:
            size: the number of all scored tokens = no limit.
            token_counts: [V], as in `fit_vocabulary`, in the place of those of the training data; None = these.

        Raises:
            ValueError: a size that is not possible, no counts, or a kind from outside that cannot do it.
        """
        if self.borrows_lm_head is None:
            name = self.config.head_type
            raise ValueError(f"draft_vocab_size is {size}, but the kind {name} does not set borrows_lm_head")
        self._learned.clear()
        counts = self.token_counts if token_counts is None else token_counts
        self._columns = choose_columns(size, counts, self.config.target_vocab_size, self.own_token_ids)
        self.draft_vocab_size, self.token_counts = size, counts
        return self

    def learn_draft_vocabulary(self) -> int | None:
        """Lets a loss, too, compare only the tokens that decoders draft (`limit_vocabulary`), in less time; saved heads
        are whole. Call it on bound heads that have counts; binding again ends it.

        Returns:
            the number of these tokens; None = all, since decoders draft all, or the heads have LM heads of their own.
        """
        self._learned.clear()
        has_own = any(name.rpartition(".")[2] == "lm_head" for name, _ in cast(nn.Module, self).named_modules())
        columns = None if has_own else self._find_columns(self.target)
        if columns is None:
            return None
        ids = columns.to(self.target.device)
        self._learned.append((ids, take_lm_head_rows(self.target, ids)))
        return ids.numel()

    def _find_columns(self, target: Target) -> Tensor | None:
        """The columns of scores that drafts for a target keep; None = all."""
        is_open = self.draft_vocab_size is None and self._column_ids is None and self.own_token_ids is None
        if not is_open or self.borrows_lm_head is None or self.token_counts is None:
            return self._columns
        size = default_draft_vocabulary(target.vocab_size, target.hidden_size, target.layers_size)
        return None if size is None else choose_columns(size, self.token_counts, self.config.target_vocab_size, None)

    def _ids_of(self, columns: Tensor) -> Tensor:
        own = self.own_token_ids
        return columns if own is None else own[columns.to(own.device)]
