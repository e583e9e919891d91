"""Row: one text that is being decoded, and the one place where it ends."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from draftsmith.inference.learning import TextStates
from draftsmith.inference.request.processors import NO_TOKEN


@dataclass(eq=False)
class Row:
    """One text. Everything here is on the host.

    Attributes:
        index: its number in its call.
        padded: the prompt as transformers shows it to a processor: padding on the left.
        num_padding: tokens of padding in `padded`.
        budget: tokens that it may still emit.
        end_ids: tokens that end it.
        is_end: called with every token that has not ended the text already; whether it ends the text.
        on_token: called with every token that is kept.
        states: gathers the target's states of the text, for a learner.
        new: the tokens emitted so far.
        steps: how many tokens each step gave: the prompt's first, then those of verify steps.
        is_finished: whether the text has ended.
        error: why no token can follow, where none can.
    """

    index: int
    padded: list[int]
    num_padding: int
    budget: int
    end_ids: Set[int] = frozenset()
    is_end: Callable[[int], bool] | None = None
    on_token: Callable[[int], None] | None = None
    states: TextStates | None = None
    new: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    is_finished: bool = False
    error: str | None = None

    def __post_init__(self) -> None:
        self.max_padded = len(self.padded) + max(1, self.budget)  # a full prompt still gets one token, as there

    def emit(self, tokens: Sequence[int]) -> int:
        """Adds the tokens that a step gave, up to the text's end; returns how many were kept. Nothing else ends a text,
        but for a reply or a stream that is given up."""
        self.steps.append(len(tokens))
        for kept, token in enumerate(tokens):
            if self.is_finished:
                return kept
            if token == NO_TOKEN:
                self.states = None
                self.end()
                self.error = (
                    f"no token can follow the {len(self.text)} tokens of row {self.index}: the target's logits are "
                    "NaN (a token drafted in the same pass can cause this), or logits processors forbid every "
                    "token. Look at target(**inputs).logits (half-precision weights that overflow give NaN), and "
                    "at the processors (bad words, prefixes, a grammar)"
                )
                return kept
            self.new.append(token)
            self.budget -= 1
            if self.on_token is not None:
                self.on_token(token)
            ends = token in self.end_ids or self.budget <= 0
            if ends or (self.is_end is not None and self.is_end(token)):
                self.end()
        return len(tokens)

    def end(self) -> None:
        """Ends the text here. It lets go of what is told its tokens."""
        states, self.states = self.states, None
        self.is_finished, self.is_end, self.on_token = True, None, None
        if states is not None:
            states.finish(self.text, len(self.prompt))

    def check(self) -> None:
        """Raises ValueError if the text has ended because no token can follow."""
        if self.error is not None:
            raise ValueError(self.error)

    @property
    def prompt(self) -> list[int]:
        """The prompt's real tokens."""
        return self.padded[self.num_padding :]

    @property
    def text(self) -> list[int]:
        """The prompt's real tokens, and the new ones."""
        return self.prompt + self.new

    @property
    def num_committed(self) -> int:
        """Tokens of the text in the cache: all but the newest, which is the next tree's root."""
        return len(self.padded) - self.num_padding + len(self.new) - 1
