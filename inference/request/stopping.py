"""Stopping: asks a call's stopping criteria after every token. The text grows in place and is never built again.

Legend: L padded prompt length as given, T tokens of a row's text so far.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria

from draftsmith.inference.request.row_processors import ask_criterion, criteria_of_row


class Stopping:
    """The stopping criteria of a call, with copies for each row, because they may keep a state.

    Args:
        prompts: per row, its L tokens as transformers shows them to a criterion, padding included.
        max_new: the most tokens that any row may emit.
        device: where criteria that are not transformers' own get the text.
    """

    def __init__(
        self, criteria: Sequence[Any], prompts: Sequence[Sequence[int]], max_new: int, device: torch.device
    ) -> None:
        self.criteria, self._prompts, self._max_new, self._device = criteria, prompts, max_new, device
        self._texts: dict[int, Tensor] = {}  # [1, L + max_new] of each row, on the host
        self._lengths = [len(prompt) for prompt in prompts]
        self._of_rows: dict[int, list[Any]] = {}
        stop_strings = (criterion for criterion in criteria if type(criterion) is StopStringCriteria)
        self._last_tokens = {id(criterion): _find_last_tokens(criterion) for criterion in stop_strings}

    def ends(self, index: int, token: int) -> bool:
        """Adds a token to the text of row `index`. Returns whether a criterion ends the text with it."""
        num_rows = len(self._prompts)
        if index not in self._texts:
            prompt = self._prompts[index]
            self._texts[index] = torch.zeros(1, len(prompt) + self._max_new, dtype=torch.long)
            self._texts[index][0, : len(prompt)] = torch.tensor(prompt)
            self._of_rows[index] = criteria_of_row(self.criteria) if num_rows > 1 else [*self.criteria]
        self._texts[index][0, self._lengths[index]] = token
        self._lengths[index] += 1
        text = self._texts[index][:, : self._lengths[index]]
        # Every criterion is called, because it may count calls. Stop strings end at few tokens, so few are looked at.
        asked = [one for one in self._of_rows[index] if token in self._last_tokens.get(id(one), (token,))]
        answers = [ask_criterion(criterion, text, index, num_rows, self._device) for criterion in asked]
        return any(answers)


def _find_last_tokens(criterion: StopStringCriteria) -> frozenset[int]:
    """The tokens with which a stop string may end."""
    first = criterion.max_valid_positions * criterion.num_stop_strings
    can_end = (criterion.embedding_vec[:, first:-1] > 0).any(1)  # by the lengths of the overlap of a token and an end
    return frozenset(can_end.nonzero().flatten().tolist())
