"""DraftChain: the committed text, the drafts after it, and which of them the target was asked about. No tensors but
features, no time, no messages."""

from torch import Tensor

from draftsmith.inference.distributed.messages import Answer, Task


class DraftChain:
    """The text and its drafts.

    Worked example, text [5, 6], and the target would write 7 8 1:

        chain.drafts += [7, 8, 9]
        chain.ask(keep=1)             Task(0, keep=1, start=1, token_ids=[6, 7, 8, 9]): all of them
        chain.take(Answer(0, 1, [7, 8, 1, 4]))
        chain.text                    [5, 6, 7, 8, 1]: 1 is the target's own, so 9 and the answer after it are dropped
        chain.version                 1

    Attributes:
        text: committed tokens, prompt included.
        drafts: tokens after the text.
        version: changes when drafts are dropped, or would have been.
        covered: the target was asked for the tokens that follow the positions before this one.
        features: by position, the target's features of committed tokens [F] that nobody has taken.
        num_accepted: drafts committed in this round.
        round_lengths: drafts committed in each round that is over.
    """

    def __init__(self, text: list[int]) -> None:
        self.text, self.version = text, 0
        self.drafts: list[int] = []
        self.features: dict[int, Tensor] = {}
        self.num_accepted = 0
        self.round_lengths: list[int] = []
        self._answers: dict[int, int] = {}
        self.covered = self.root

    @property
    def root(self) -> int:
        """The position of the last committed token."""
        return len(self.text) - 1

    @property
    def end(self) -> int:
        """Tokens, drafts included."""
        return len(self.text) + len(self.drafts)

    def token(self, position: int) -> int:
        """The token at a position of the text or the drafts."""
        past = position - len(self.text)
        return self.text[position] if past < 0 else self.drafts[past]

    def wants_task(self, lookahead: int) -> bool:
        """Whether to ask the target now: the next token is not being computed, or `lookahead` positions wait."""
        return self.covered <= self.root or self.end - self.covered >= lookahead

    def ask(self, keep: int) -> Task:
        """A task over all positions that are not covered, for a server that holds the first `keep` tokens."""
        keep = min(keep, self.covered)
        tokens = self.text[keep:] + self.drafts[max(0, keep - len(self.text)) :]
        task = Task(self.version, keep, self.covered, tokens)
        self.covered = self.end
        return task

    def take(self, answer: Answer) -> list[int]:
        """Takes in an answer, and returns the tokens that it commits; none if an earlier answer is still missing."""
        if answer.version != self.version:
            return []
        for place, token in enumerate(answer.token_ids):
            position = answer.start + place
            self._answers[position] = token
            if answer.features is not None:
                self.features[position] = answer.features[place]
        committed: list[int] = []
        while self.root in self._answers:
            token = self._answers.pop(self.root)
            committed.append(token)
            self.text.append(token)
            if not self.drafts or self.drafts[0] != token:
                self._end_round()
                break
            del self.drafts[0]
            self.num_accepted += 1
        return committed

    def _end_round(self) -> None:
        self.round_lengths.append(self.num_accepted)
        self.version += 1
        self.drafts, self._answers, self.num_accepted = [], {}, 0
        self.covered = self.root
        self.features = {position: one for position, one in self.features.items() if position < self.root}
