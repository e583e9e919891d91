"""A drafter with teeth: it knows the true continuation and mixes it with decoys at chosen nodes.

Random heads accept almost nothing, so they test little. This one lets every depth, branch, commit and trim happen: at
each position a schedule says at which rank the true token stands among the candidates, or that it is missing.

Legend: B batch, R texts, T positions of the longest text and one more, W frontier nodes, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference import Drafter, DraftLogits


@dataclass
class _Script:
    """truth: [R, T] the texts, each continued with its last token; known: [R] their lengths; ranks: [R, T] where the
    true token of a position stands (num_candidates or more: nowhere); decoys: [R, T, C] other tokens, all distinct."""

    truth: Tensor
    known: Tensor
    ranks: Tensor
    decoys: Tensor


@dataclass
class ScriptedState:
    """rows: [B] which text each row has; lengths: [B] accepted slots; is_true: [B, W] whether each frontier node's path
    is the true continuation; is_prefix: one row that is read for all texts, which begin alike."""

    script: _Script
    rows: Tensor
    lengths: Tensor
    is_true: Tensor
    is_prefix: bool


@dataclass
class ScriptedDrafter(Drafter):
    """Drafts for rows whose full texts are known.

    Args:
        texts: per row, prompt and continuation [length]. A state of fewer rows is given others by `copy_rows`; until
            then it has the first texts, and a single row has what all texts begin with.
        vocab_size: V.
        ranks: the true token's rank at a position is one of these (by the position's hash); num_candidates or more =
            missing.
        num_candidates: C real candidates a node; the others are decoys.
        feature_layers: layers to tap, so that features flow as they do for heads; only their shape is checked.
        is_strict: refuse tokens that are not the text's; otherwise write them down in `strangers`.

    Attributes:
        offered: the (depth, rank) at which true tokens were offered. Not what a policy took of it, and a step accepted:
            `watch_commits` (tests/lossless/matrix/cases.py) notes that.
        strangers: the (text, position) at which rows were first given other tokens than their text has.
    """

    texts: list[Tensor]
    vocab_size: int
    ranks: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 9)
    num_candidates: int = 4
    feature_layers: tuple[int, ...] = (1, 2)
    max_depth: int | None = None
    can_copy_rows: bool = True
    is_strict: bool = True
    offered: set[tuple[int, int]] = field(default_factory=set)
    strangers: list[tuple[int, int]] = field(default_factory=list)

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> ScriptedState:
        assert batch_size <= len(self.texts), f"{batch_size} rows and {len(self.texts)} texts"
        return ScriptedState(
            self._write_script(),
            torch.arange(batch_size),
            torch.zeros(batch_size, dtype=torch.long),
            torch.ones(batch_size, 1, dtype=torch.bool),
            batch_size == 1 < len(self.texts),
        )

    def copy_rows(
        self,
        state: ScriptedState,
        source: ScriptedState,
        rows: Sequence[int] | Tensor,
        lengths: Tensor,
        *,
        max_slots: int,
    ) -> None:
        """Row i of the fresh `state` takes the text of row rows[i] of `source` and its first lengths[i] slots."""
        rows = torch.as_tensor(rows)
        assert rows.shape == lengths.shape == state.lengths.shape
        assert bool((lengths <= source.lengths[rows]).all()), "more slots are copied than there are"
        assert int(lengths.max()) <= max_slots
        state.lengths = lengths.clone()
        if not source.is_prefix:  # else each row has a text of its own, which begins so
            state.rows, state.is_prefix = source.rows[rows], False

    def keep_rows(self, state: ScriptedState, rows: Sequence[int]) -> None:
        """Row i takes the text and the slots of row rows[i]."""
        state.rows, state.lengths = state.rows[list(rows)], state.lengths[list(rows)]

    def extend(
        self, state: ScriptedState, features: Tensor | None, next_token_ids: Tensor, counts: Tensor, *, max_slots: int
    ) -> DraftLogits:
        assert (features is not None) == bool(self.feature_layers)
        assert features is None or features.shape[:2] == next_token_ids.shape
        # The slots must be the true text, one token ahead of their features.
        steps = torch.arange(next_token_ids.shape[1])
        places = state.lengths[:, None] + 1 + steps
        is_known = (steps < counts[:, None]) & (places < state.script.known[state.rows, None])
        wrong = is_known & (next_token_ids != self._read(state, state.script.truth, places))
        for row, slot in wrong.nonzero().tolist():
            text, place = int(state.rows[row]), int(places[row, slot])
            assert not self.is_strict, f"row {row} was given other tokens than its text at {place}"
            if text not in dict(self.strangers):
                self.strangers.append((text, place))
        state.lengths = state.lengths + counts
        assert int(state.lengths.max()) <= max_slots
        state.is_true = torch.ones(len(counts), 1, dtype=torch.bool)
        return self._candidates(state, depth=0)

    def expand(self, state: ScriptedState, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        truth = self._read(state, state.script.truth, state.lengths[:, None] + depth)
        state.is_true = state.is_true.gather(1, parents) & (token_ids == truth)
        return self._candidates(state, depth)

    def _candidates(self, state: ScriptedState, depth: int) -> DraftLogits:
        """Log-scores falling by rank, so that all candidates stand near each other in a dynamic tree's re-rank."""
        places = state.lengths[:, None] + depth + 1  # of the children
        ranks = self._read(state, state.script.ranks, places)  # [B, 1]
        decoys = self._read(state, state.script.decoys, places)  # [B, 1, C]
        columns = torch.arange(self.num_candidates)
        is_truth = state.is_true[..., None] & (columns == ranks[..., None])  # [B, W, C]
        token_ids = torch.where(is_truth, self._read(state, state.script.truth, places)[..., None], decoys)
        self.offered.update((depth, rank) for rank in is_truth.any(0).any(0).nonzero()[:, 0].tolist())
        return DraftLogits((-1.2 * columns).expand(token_ids.shape), token_ids)

    @staticmethod
    def _read(state: ScriptedState, table: Tensor, places: Tensor) -> Tensor:
        """Entries [B, S, ...] of a table [R, T, ...] at places [B, S]; all beyond the texts are alike."""
        return table[state.rows[:, None], places.clamp(max=table.shape[1] - 1)]

    def _write_script(self) -> _Script:
        """The same for a text whatever the others are."""
        longest = 1 + max(map(len, self.texts))
        truth = torch.stack([torch.cat([text, text[-1:].expand(longest - len(text))]) for text in self.texts])
        ranks, turns = [], []
        for row in range(len(self.texts)):
            generator = torch.Generator().manual_seed(700 + row)
            drawn = torch.randint(2**31, (1024, 2), generator=generator)[torch.arange(longest) % 1024]
            ranks.append(torch.tensor(self.ranks)[drawn[:, 0] % len(self.ranks)])
            turns.append(drawn[:, 1:] % (self.vocab_size - 1))
        # Steps of 1 to V - 1 from the truth, so that no decoy is the truth and no two are alike.
        steps = 1 + (torch.stack(turns) + torch.arange(self.num_candidates)) % (self.vocab_size - 1)
        decoys = (truth[..., None] + steps) % self.vocab_size
        return _Script(truth, torch.tensor([len(text) for text in self.texts]), torch.stack(ranks), decoys)
