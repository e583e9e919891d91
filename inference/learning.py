"""What learners see of decoding: texts with the target's states of their tokens, which the passes compute anyway.

Legend: T tokens of a text whose states are known, F feature width, D hidden size.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_TOKENS = 2048  # of a text: about so many, the last ones, keep their states


@dataclass(frozen=True)
class SeenText:
    """A text that has been decoded.

    Attributes:
        token_ids: from the first token whose states are known to the text's end: T, or T + 1.
        num_prompt: how many of them are the prompt's.
        features: [T, F], the states that draft heads read.
        last_hidden: [T, D], the target's states after its final norm.
    """

    token_ids: list[int]
    num_prompt: int
    features: Tensor
    last_hidden: Tensor


class TextStates:
    """Gathers the states of one text, pass by pass.

    Where a cache held the beginning of a prompt, the text begins behind it; of a long text the last part is kept.

    Args:
        see: gets the text when it has ended.
    """

    def __init__(self, see: Callable[[SeenText], None]) -> None:
        self._see = see
        self._start = self._end = 0
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, position: int, features: Tensor, last: Tensor) -> None:
        """States [n, F] and [n, D] of the tokens from this position on. They must stay as they are."""
        if position != self._end:
            self._start, self._parts = position, []
        self._end = position + len(features)
        self._parts.append((features, last))
        while self._end - self._start - (size := len(self._parts[0][0])) >= MAX_TOKENS:
            self._start += size
            del self._parts[0]

    def finish(self, text: Sequence[int], num_prompt: int) -> None:
        """Hands the text on: all its tokens are known. Decoding goes on, whatever the learner does."""
        known = [*text[self._start :]]
        if not self._parts or not known:
            return
        try:
            features, last = (torch.cat(parts)[: len(known)] for parts in zip(*self._parts, strict=True))
            self._see(SeenText(known, max(0, num_prompt - self._start), features, last))
        except Exception:
            logger.exception("a learner could not take a text")


@dataclass(frozen=True)
class Trial:
    """A comparison of learned weights with those in use and the first ones, on texts that were held back.

    Attributes:
        time: seconds since 1970.
        num_texts, num_tokens: decoded until then; tokens of replies.
        num_learned: tokens of all steps of learning until then.
        before, after, first: acceptance length of the weights in use, of the learned ones, and of those that the heads
            had before they learned anything.
        is_swapped: whether the learned ones are in use now.
        is_undone: whether the first ones are: the texts have become others.
    """

    time: float
    num_texts: int
    num_tokens: int
    num_learned: int
    before: float
    after: float
    first: float
    is_swapped: bool
    is_undone: bool

    @property
    def length(self) -> float:
        """Acceptance length of the weights that are in use now."""
        return self.after if self.is_swapped else self.first if self.is_undone else self.before


@dataclass(frozen=True)
class LearningProgress:
    """num_texts, num_tokens, num_learned: as in `Trial`, until now. num_trials, num_swaps: of all trials; a swap
    brought other weights into use. trials: the newest, in their order."""

    num_texts: int
    num_tokens: int
    num_learned: int
    num_trials: int
    num_swaps: int
    trials: tuple[Trial, ...]


class Learner(ABC):
    """Improves draft heads with the texts of a `Decoder` or a server.

    Its methods are called in the decoding thread, between two steps.

    Attributes:
        feature_layers: the states that it wants to see.
        num_decoding: what decodes now: decoders in the middle of a text, servers with replies. They count themselves.
    """

    feature_layers: tuple[int, ...] = ()
    num_decoding = 0

    @abstractmethod
    def see(self, text: SeenText) -> None:
        """Takes a text that has ended."""

    @abstractmethod
    def swap(self) -> None:
        """Puts better weights into the heads, if there are."""

    @property
    @abstractmethod
    def progress(self) -> LearningProgress:
        """What was learned so far. For any thread."""
