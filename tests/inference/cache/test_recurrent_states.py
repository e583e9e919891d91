"""RecurrentStates: what copied rows take over, and what they forget."""

import torch
from torch import Tensor

from draftsmith.inference.cache.recurrent_states import RecurrentStates, States, StateSpec

SUM = ("recurrent", 0)


def states_after(numbers: list[float]) -> RecurrentStates:
    """One row of a layer whose state is the sum of what it has read: these numbers, as drafts that were accepted."""

    def replay(rows: Tensor, nodes: Tensor, states: States) -> States:
        return {SUM: states[SUM] + torch.tensor([numbers])[rows].gather(1, nodes).sum(1, keepdim=True)}

    states = RecurrentStates({0: [StateSpec(SUM, (1,), torch.float32, torch.device("cpu"))]}, 1)
    states.plan_pass(None)
    states.record(0, replay, [])
    states.accept(torch.arange(len(numbers))[None], torch.tensor([len(numbers)]))
    return states


def test_copied_rows_forget_what_was_accepted_before() -> None:
    own, source = states_after([1.0, 2.0]), states_after([4.0, 8.0, 16.0])
    own.copy_rows(source, [0], [3])
    own.apply_accepted()
    assert own.lengths == [3]
    assert own.take(0, torch.tensor([0]))[SUM].tolist() == [[28.0]]
