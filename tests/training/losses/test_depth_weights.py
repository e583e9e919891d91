"""Weights of drafting steps: fixed ones, and D-PACE against loops over slots."""

import pytest
import torch

from draftsmith.heads import DraftStep
from draftsmith.training.losses.depth_weights import weigh_by_d_pace
from draftsmith.training.losses.draft_loss import draft_loss
from tests.training.loss_cases import BATCH, LENGTH, Case, every_loss
from tests.training.losses.test_losses_of_slots import gather_slots


def test_d_pace_is_the_gradient_of_the_expected_length() -> None:
    """With respect to log c of each step, the expected length being the sum over steps of c_1 ... c_k."""
    torch.manual_seed(0)
    chances = torch.rand(4, 1, 6, dtype=torch.float64)
    log_c = (0.5 * chances + 0.5).log().requires_grad_()
    log_c.cumsum(0).exp().sum().backward()
    found = weigh_by_d_pace(chances, torch.ones_like(chances, dtype=torch.bool))
    torch.testing.assert_close(found, log_c.grad)


def slow_d_pace(case: Case, loss_type: str) -> torch.Tensor:
    """Loops over slots; every position's own loss comes from `draft_loss` with a mask of only that position."""
    ids = list(range(128)) if case.draft_token_ids is None else case.draft_token_ids.tolist()
    teacher = case.teacher(loss_type)
    sums, counts = [torch.zeros(()) for _ in case.steps], [0] * len(case.steps)
    for row in range(BATCH):
        for slot in range(LENGTH):
            lives, alive, losses = [], 1.0, []
            for step in case.steps:
                place = slot + step.shift
                if place >= LENGTH or not case.loss_mask[row, place]:
                    lives.append(0.0)
                    losses.append(None)
                    continue
                only = torch.zeros_like(case.loss_mask)
                only[row, place] = 1
                output = draft_loss([step], teacher, only, loss_type=loss_type)
                label, best = int(case.input_ids[row, place]), int(teacher.argmax[row, place - 1])
                chance = 0.0
                if label in ids and (loss_type == "cross_entropy" or best >= 0):
                    chance = float(step.head(step.hidden[row, slot]).detach().softmax(-1)[ids.index(label)])
                alive *= 0.5 * chance + 0.5
                lives.append(alive)
                losses.append(output)
            for k, output in enumerate(losses):
                if output is not None:
                    sums[k] = sums[k] + sum(lives[k:]) * output.loss
                    counts[k] += 1
    return sum((total / max(count, 1) for total, count in zip(sums, counts, strict=True)), torch.zeros(()))


@every_loss
@pytest.mark.parametrize("draft_size", [None, 50])
def test_d_pace_equals_the_reference(loss_type: str, draft_size: int | None) -> None:
    case = Case(draft_size)
    found = case.run(loss_type, depth_weights="d_pace")
    torch.testing.assert_close(found.loss, slow_d_pace(case, loss_type))
    found.loss.backward()
    gradients = case.gradients()
    slow_d_pace(case, loss_type).backward()
    for one, other in zip(gradients, case.gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_d_pace_finds_the_steps_of_a_slot_wherever_their_columns_are() -> None:
    """P-EAGLE's deeper steps draft from fewer slots, in another order; what is left out ends the draft there."""
    case = Case()
    order = torch.stack([torch.randperm(LENGTH) for _ in range(BATCH)])
    padded = torch.nn.functional.pad(order, (0, 3), value=-1)
    expected = case.run("distillation", depth_weights="d_pace")
    first, second, third = case.steps
    case.steps = [first, DraftStep(3, gather_slots(second.hidden, padded), second.head, slots=padded), third]
    torch.testing.assert_close(case.run("distillation", depth_weights="d_pace").loss, expected.loss)
    some = order[:, :5]
    case.steps = [first, second, DraftStep(4, gather_slots(third.hidden, some), third.head, slots=some)]
    found = case.run("distillation", depth_weights="d_pace")
    assert found.positions[2] < expected.positions[2]
    assert found.loss_sums[0] < expected.loss_sums[0], "drafts that stop earlier are worth less"
