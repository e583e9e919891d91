"""TreeChoice: which policy drafts the next tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.step import Step
from draftsmith.inference.trees.policy import TreePolicy


class TreeChoice:
    """Always takes the same policy; `TreePlanner` chooses."""

    is_fixed = True  # whether the policy never changes, so that nobody asks or tells
    is_counting = False  # whether `learn` is to hear what all candidates would have accepted in the step just chosen

    def __init__(self, policy: TreePolicy | None) -> None:
        self.policy = policy

    def begin(self, step: Step, sampler: Sampler, batch_size: int) -> None:
        """Another text (batch) begins. What has to be measured is measured now."""

    def change(self, *, do_sample: bool) -> None:
        """Rows have joined or left a served batch, which has begun with and without `do_sample`."""

    def choose(self, num_rows: int, length: int) -> TreePolicy | None:
        """The next step's policy; None = plain decoding.

        Args:
            num_rows: rows in the batch; length: tokens in the longest of them.
        """
        return self.policy

    def learn(self, counted: Sequence[Sequence[int]], left: Sequence[int]) -> None:
        """Takes in the outcome of the step just chosen, as soon as the host has read it.

        Args:
            counted: `TreePolicy.count_accepted` of each row that was unfinished, in any order; empty lists after a step
                that is not counted.
            left: the tokens that each of these rows had to go.
        """

    def find_costs(self, step: Step, sampler: Sampler, batch_size: int) -> Any:
        """The measured costs of the trees to choose from.

        Raises:
            ValueError: there is nothing to choose.
        """
        raise ValueError(
            f"costs are measured for tree='auto' or 'gamma', and this decoder's tree is a {type(self.policy).__name__}"
        )
