"""The losses of steps with drawn slots, as block drafters hand them over, and of their confidence."""

import torch
from torch import Tensor, nn

from draftsmith.heads import DraftStep
from draftsmith.training.losses.draft_loss import draft_loss
from tests.training.loss_cases import BATCH, LENGTH, Case, every_loss


class TestDrawnSlots:
    @every_loss
    def test_all_of_them_in_any_order_lose_what_the_whole_sequence_does(self, loss_type: str) -> None:
        case = Case(50)
        expected = case.run(loss_type)
        slots = torch.stack([torch.randperm(LENGTH) for _ in range(BATCH)])
        padded = nn.functional.pad(slots, (0, 4), value=-1)
        case.steps = [
            DraftStep(step.shift, gather_slots(step.hidden, padded), step.head, slots=padded) for step in case.steps
        ]
        found = case.run(loss_type)
        torch.testing.assert_close(found.loss, expected.loss)
        for name in ("top1", "top5", "positions"):
            assert getattr(found, name) == getattr(expected, name), name

    @every_loss
    def test_some_of_them_lose_what_is_behind_them_alone(self, loss_type: str) -> None:
        """Slots 2 and 7 of row 0 predict, at shift 2, the tokens 4 and 9; row 2's slot 9 the token 11, its slot 10
        nothing."""
        case = Case(shifts=(2,))
        slots = torch.tensor([[2, 7], [-1, -1], [10, 9]])
        step = case.steps[0]
        drawn = DraftStep(2, gather_slots(step.hidden, slots), step.head, slots=slots)
        only = torch.zeros_like(case.loss_mask)
        only[0, [4, 9]], only[2, 11] = 1, 1
        teacher = case.teacher(loss_type)
        found, expected = (
            draft_loss([one], teacher, mask, loss_type=loss_type, step_decay=1.0)
            for one, mask in ((drawn, case.loss_mask), (step, only))
        )
        torch.testing.assert_close(found.loss, expected.loss)
        assert int(found.positions[0]) == int(expected.positions[0]) == 3


def gather_slots(hidden: Tensor, slots: Tensor) -> Tensor:
    return hidden.gather(1, slots.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))


class TestConfidence:
    """Its binary cross-entropy to what is accepted, added to the loss of the step."""

    @every_loss
    def test_learns_the_chance_of_acceptance(self, loss_type: str) -> None:
        case = Case(50, shifts=(3,))
        step, teacher = case.steps[0], case.teacher(loss_type)
        confidence = torch.randn(BATCH, LENGTH, requires_grad=True)
        alone, both = (
            draft_loss([each], teacher, case.loss_mask, loss_type=loss_type, step_decay=1.0)
            for each in (step, DraftStep(3, step.hidden, step.head, confidence=confidence))
        )
        ids, wanted = case.draft_token_ids.tolist(), []
        for row in range(BATCH):
            for slot in range(LENGTH - 3):
                target_logits = case.target.lm_head(case.last_hidden[row, slot + 2]).detach()
                best, label = int(target_logits.argmax()), int(case.input_ids[row, slot + 3])
                if not case.loss_mask[row, slot + 3] or (label if loss_type == "cross_entropy" else best) not in ids:
                    continue
                q = step.head(step.hidden[row, slot]).detach().softmax(-1)
                if loss_type == "cross_entropy":
                    accepted = torch.tensor(float(ids[int(q.argmax())] == best))
                else:
                    accepted = torch.minimum(q, target_logits[ids].softmax(-1)).sum()
                chance = confidence[row, slot].sigmoid()
                wanted.append(-(accepted * chance.log() + (1 - accepted) * (1 - chance).log()))
        assert 3 < len(wanted) < int(both.positions[0])
        mean = torch.stack(wanted).sum() / both.positions[0]
        torch.testing.assert_close(both.loss - alone.loss, mean, rtol=1e-4, atol=1e-5)
        step.hidden.grad = None
        (both.loss - alone.loss).backward()
        assert step.hidden.grad.abs().max() < 1e-6, "the drafts must not learn from what is said about them"
        assert confidence.grad.abs().max() > 0
