"""Which tokens of a text are in which group of layers. Everything here is on the host.

Legend: G groups.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of a text, which pass through the groups together: one token, or a part of the prompt."""

    start: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class TextInFlight:
    """One text's way through the groups.

    Every pass moves each segment on by one group. The token after the newest segment is predicted when this leaves the
    first group, and enters in the next pass. When a segment leaves the last group, the target's own next token is
    known. If the token in flight there is another, it and all younger ones are dropped.

    Worked example, three groups, prompt (5, 6) in one segment; the target's text goes on 7, 8:

        pass 1: [56 -  - ]   first group predicts 7, which enters
        pass 2: [7  56 - ]   first group predicts 9, which enters
        pass 3: [9  7  56]   56 leaves: the target's next token is 7, as predicted
        pass 4: [.  9  7 ]   7 leaves: the next token is 8, so 9 and its successor are dropped, and 8 enters

    Attributes:
        groups: [G] the segment in each group, or None; groups[0] enters in the next pass.
        known: number of tokens of prompt and emitted text.
        num_confirmed: predicted tokens that were right.
        num_dropped: tokens that had passed a group or more for nothing.
    """

    def __init__(self, prompt: list[int], num_groups: int, segment_size: int) -> None:
        self.known = len(prompt)
        parts = range(0, len(prompt), segment_size)
        self._waiting = deque(Segment(start, tuple(prompt[start : start + segment_size])) for start in parts)
        self.groups: list[Segment | None] = [None] * num_groups
        self.num_dropped = self.num_confirmed = 0
        self._enter()

    def _enter(self) -> None:
        self.groups[0] = self._waiting.popleft() if self._waiting else None

    @property
    def may_emit(self) -> bool:
        """Whether the segment in the last group is followed by the text's next token."""
        last = self.groups[-1]
        return last is not None and last.end == self.known

    def move(self, predicted: int, own: int) -> bool:
        """Moves everything on after a pass.

        Args:
            predicted: the first group's next token, read if none is waiting to enter that group.
            own: the target's own next token, read if `may_emit`: it is emitted.

        Returns:
            whether tokens in flight were dropped: the keys of positions from `known` - 1 on are then void.
        """
        newest = self.groups[0]
        if newest is not None and not self._waiting:
            self._waiting.append(Segment(newest.end, (predicted,)))
        if not self.may_emit:
            self._move_on()
            return False
        place = self.known
        self.known += 1
        self._move_on()
        following = next((one for one in self.groups if one is not None and one.start == place), None)
        if following is not None and following.token_ids == (own,):
            self.num_confirmed += 1
            return False
        # All that is in flight is younger than the token that left.
        self.num_dropped += sum(one is not None for one in self.groups[1:])
        self.groups = [Segment(place, (own,)), *([None] * (len(self.groups) - 1))]
        self._waiting.clear()
        return True

    def _move_on(self) -> None:
        self.groups = [None, *self.groups[:-1]]
        self._enter()
