"""What the losses are tested on, and the slow reference they are compared with.

Legend: B batch, T sequence length, C draft vocabulary, V target vocabulary, D hidden size.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftStep
from draftsmith.training.losses.draft_loss import LossOutput, draft_loss
from draftsmith.training.losses.teacher import Teacher, compute_teacher
from draftsmith.training.losses.terms import ScoredTokens, parse_loss
from tests.tiny_targets import random_prompt, target_of

BATCH, LENGTH, HIDDEN, VOCAB = 3, 12, 32, 128
# What is read of a position: only the token, the distribution, both, and states besides.
LOSS_TYPES = (
    "cross_entropy",
    "distillation",
    "1.8*total_variation+0.1*cross_entropy",
    "1.5*smooth_l1+0.1*distillation+topk_distillation",
)
every_loss = pytest.mark.parametrize("loss_type", LOSS_TYPES)


class Case:
    """Random states and heads of three steps, as `draft_loss` gets them.

    Args:
        draft_size: size of the draft vocabulary; None = all of the target's tokens.
    """

    def __init__(self, draft_size: int | None = None, seed: int = 0, shifts: tuple[int, ...] = (2, 3, 4)) -> None:
        torch.manual_seed(seed)
        self.target = target_of("llama")
        self.input_ids = random_prompt(LENGTH, seed=seed, batch_size=BATCH)
        self.last_hidden = torch.randn(BATCH, LENGTH, HIDDEN)
        self.draft_token_ids = None if draft_size is None else torch.randperm(VOCAB)[:draft_size].sort().values
        self.columns = draft_size or VOCAB
        self.loss_mask = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        self.loss_mask[0, 3:7] = 1
        self.loss_mask[0, 9:] = 1
        self.loss_mask[1, 5:10] = 1
        self.loss_mask[2, 2:] = 1
        self.hidden = [torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True) for _ in shifts]
        self.heads = [nn.Linear(HIDDEN, self.columns, bias=False) for _ in shifts]
        with torch.no_grad():  # so that scores are far apart, and a head often agrees with the target
            rows = torch.arange(VOCAB) if self.draft_token_ids is None else self.draft_token_ids
            for shift, hidden, head in zip(shifts, self.hidden, self.heads, strict=True):
                head.weight.copy_(self.target.lm_head.weight[rows])
                ahead = torch.roll(self.last_hidden, 1 - shift, dims=1)
                hidden.copy_(ahead + 0.7 * torch.randn_like(ahead))
        self.steps = [DraftStep(*step) for step in zip(shifts, self.hidden, self.heads, strict=True)]

    def teacher(self, loss_type: str) -> Teacher:
        return compute_teacher(
            self.target, self.last_hidden, self.input_ids, self.loss_mask, self.draft_token_ids, loss_type=loss_type
        )

    def run(self, loss_type: str, step_decay: float = 0.8, **options: Any) -> LossOutput:
        teacher = self.teacher(loss_type)
        return draft_loss(self.steps, teacher, self.loss_mask, loss_type=loss_type, step_decay=step_decay, **options)

    def gradients(self) -> list[Tensor]:
        tensors = [*self.hidden, *(head.weight for head in self.heads)]
        found = [tensor.grad for tensor in tensors]
        assert all(gradient is not None for gradient in found)
        for tensor in tensors:
            tensor.grad = None
        return [gradient for gradient in found if gradient is not None]


class Reference:
    """The same by loops over rows, slots and steps; `test_loss_terms.py` has the losses of single positions."""

    def __init__(self, case: Case, loss_type: str, step_decay: float = 0.8) -> None:
        ids = list(range(VOCAB)) if case.draft_token_ids is None else case.draft_token_ids.tolist()
        self.loss = torch.zeros(())
        self.loss_sums, self.top1, self.top5, self.positions = [], [], [], []
        for k, step in enumerate(case.steps):
            losses, top1, top5, positions = [], 0, 0, 0
            for row in range(BATCH):
                for slot in range(LENGTH - step.shift):
                    if not case.loss_mask[row, slot + step.shift]:
                        continue
                    positions += 1
                    scores = step.head(step.hidden[row, slot])
                    target_logits = case.target.lm_head(case.last_hidden[row, slot + step.shift - 1]).detach()
                    best, label = int(target_logits.argmax()), int(case.input_ids[row, slot + step.shift])
                    if best in ids:
                        ranking = scores.argsort(descending=True).tolist()
                        top1 += ranking[0] == ids.index(best)
                        top5 += ids.index(best) in ranking[:5]
                    if (label if loss_type == "cross_entropy" else best) not in ids:
                        continue
                    tokens = ScoredTokens(
                        scores[None],
                        target_logits[ids][None],
                        label=torch.tensor([ids.index(label) if label in ids else -1]),
                        argmax=torch.tensor([ids.index(best) if best in ids else -1]),
                        hidden=step.hidden[row, slot][None],
                        target_hidden=case.last_hidden[row, slot + step.shift - 1][None],
                    )
                    losses.append(parse_loss(loss_type)(tokens)[0])
            total = torch.stack(losses).sum() if losses else torch.zeros(())
            self.loss = self.loss + step_decay**k * total / max(positions, 1)
            self.loss_sums.append(total.item())
            self.top1.append(top1)
            self.top5.append(top5)
            self.positions.append(positions)
