"""The loss of DFlash 2's selector in both published recipes, against loops over rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftStep
from draftsmith.training.losses.depth_weights import D_PACE
from tests.training.loss_cases import HIDDEN, VOCAB, Case

NUM_CANDIDATES = 16


class SelectorCase(Case):
    """Steps whose candidates are scored again."""

    def __init__(self, draft_size: int | None = None) -> None:
        super().__init__(draft_size)
        self.gates = [nn.Linear(HIDDEN, 4, bias=False) for _ in self.steps]
        self.tables = [nn.Embedding(self.columns, 4) for _ in self.steps]
        self.steps = [
            DraftStep(step.shift, step.hidden, step.head, rescore=self.rescorer(k), num_candidates=NUM_CANDIDATES)
            for k, step in enumerate(self.steps)
        ]

    def rescorer(self, k: int) -> Any:
        return lambda hidden, ids: (self.gates[k](hidden)[..., None, :] * self.tables[k](ids)).sum(-1)

    def gradients(self) -> list[Tensor]:
        own = [part.weight for part in (*self.gates, *self.tables)]
        found = [weight.grad for weight in own]
        for weight in own:
            weight.grad = None
        assert all(gradient is not None for gradient in found)
        return super().gradients() + [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("draft_size", [None, 40])
@pytest.mark.parametrize("loss_type", ["cross_entropy", "kl"])
def test_equals_a_loop(loss_type: str, draft_size: int | None) -> None:
    """Automodel learns the data's token where it is a candidate; speculators the target's best one, in the place of the
    last candidate where it is none."""
    case = SelectorCase(draft_size)
    teacher, found = case.teacher(loss_type), case.run(loss_type)
    plain = Case(draft_size)
    added, top1, num_missing = found.loss - plain.run(loss_type).loss, 0, 0
    expected = torch.zeros(())
    for k, step in enumerate(case.steps):
        losses = []
        for row, slot in case.loss_mask.roll(-step.shift, 1)[:, : -step.shift].nonzero().tolist():
            label, best = int(teacher.labels[row, slot + step.shift]), int(teacher.argmax[row, slot + step.shift - 1])
            logits = step.head(step.hidden[row, slot]).detach()
            ids = logits.topk(NUM_CANDIDATES).indices.tolist()
            scores = (logits + case.rescorer(k)(step.hidden[row, slot], torch.arange(case.columns))).detach()
            top1 += ids[int(scores[ids].argmax())] == best
            wanted = label if loss_type == "cross_entropy" else best
            num_missing += wanted not in ids
            if wanted < 0 or (loss_type == "cross_entropy" and wanted not in ids):
                losses.append(torch.zeros(()))
                continue
            ids = ids if wanted in ids else [*ids[:-1], wanted]
            losses.append(scores[ids].logsumexp(0) - scores[wanted])
        expected = expected + 0.8**k * torch.stack(losses).mean()
    torch.testing.assert_close(added, expected)
    assert int(sum(found.top1)) == top1
    assert 0 < num_missing < sum(int(count) for count in found.positions)


@pytest.mark.parametrize("loss_type", ["cross_entropy", "kl"])
def test_gradients_are_those_of_the_whole_graph(loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed early, in parts of three rows, and computed again in the backward pass."""
    monkeypatch.setattr("draftsmith.training.losses.draft_loss.BLOCK_ELEMENTS", 3 * VOCAB)
    case = SelectorCase()
    case.run(loss_type).loss.backward()
    early = case.gradients()
    case.run(loss_type, keeps_graph=True).loss.backward()
    for one, other in zip(early, case.gradients(), strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0


def test_d_pace_weighs_by_what_the_selector_drafts() -> None:
    case = SelectorCase()
    before = case.run("cross_entropy", depth_weights=D_PACE).loss
    with torch.no_grad():
        for table in case.tables:
            table.weight.mul_(3)
    plain = Case()
    assert case.run("cross_entropy", depth_weights=D_PACE).loss != before
    assert plain.run("cross_entropy", depth_weights=D_PACE).loss < before
