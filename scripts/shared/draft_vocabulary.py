"""`--draft_vocab_size` and `--draft_vocab_data`: heads that score only the most frequent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftsmith.heads import DraftHeads

SIZE_HELP = (
    "The heads score only the N most frequent tokens of their training data: faster drafts, the same text; none = all, "
    "or 8,192 or 32,000 where the LM head is a large part of the target."
)
DATA_HELP = (
    "Count the tokens of these conversations for --draft_vocab_size (files, folders or hub ids, as --dataset of "
    "training); none = the counts beside the heads."
)


@dataclass
class DraftVocabulary:
    """How many tokens heads score, and the conversations from which these are chosen; [] = each heads' training
    data."""

    size: int
    data: list[str]
    _counts: Tensor | None = None

    @classmethod
    def of(cls, args: Any) -> DraftVocabulary | None:
        """The program's options; None = the heads score all tokens.

        Raises:
            ValueError: one of the options does nothing.
        """
        if args.draft_vocab_size is None:
            if args.draft_vocab_data:
                raise ValueError(
                    f"got --draft_vocab_data {' '.join(args.draft_vocab_data)} without --draft_vocab_size: give the "
                    "number of tokens too, such as 8192"
                )
            return None
        if not args.heads:
            raise ValueError(f"got --draft_vocab_size {args.draft_vocab_size} without --heads: only heads have one")
        return cls(args.draft_vocab_size, args.draft_vocab_data)

    def limit(self, heads: DraftHeads, tokenizer: Any) -> None:
        """Limits heads, and counts the tokens of the data when it is first called."""
        if self.data and self._counts is None:
            from draftsmith.training.data.collation import count_tokens
            from draftsmith.training.data.options import DataArguments
            from draftsmith.training.data.training_sets import load_every_row

            rows = load_every_row(DataArguments(dataset=self.data), tokenizer)
            self._counts = count_tokens(rows, heads.config.target_vocab_size)
        own = heads.config.target_vocab_size if heads.draft_token_ids is None else len(heads.draft_token_ids)
        heads.limit_vocabulary(min(self.size, own), self._counts)  # beside heads that score more
