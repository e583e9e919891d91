"""The draft losses against loops over single positions: shifts, masks, the draft vocabulary, chunks, metrics.

Legend: B batch, T sequence length, C draft vocabulary, V target vocabulary, D hidden size.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftStep
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import Teacher
from tests.training.loss_cases import BATCH, HIDDEN, LENGTH, VOCAB, Case, Reference, every_loss


@every_loss
@pytest.mark.parametrize(
    ("draft_size", "shifts"), [(None, (2, 3, 4)), (128, (2,)), (50, (3, 7, 11, 12, 13)), (3, (2, 3, 4))]
)
def test_equals_the_reference(loss_type: str, draft_size: int | None, shifts: tuple[int, ...]) -> None:
    case = Case(draft_size, shifts=shifts)
    expected = Reference(case, loss_type, 0.7)
    found = case.run(loss_type, 0.7)
    torch.testing.assert_close(found.loss, expected.loss)
    assert [float(total) for total in found.loss_sums] == pytest.approx(expected.loss_sums, rel=1e-5)
    for name in ("top1", "top5", "positions"):
        assert [int(x) for x in getattr(found, name)] == getattr(expected, name), name
    if draft_size is None:
        assert 3 < expected.top1[0] < expected.positions[0]


@every_loss
def test_gradients_equal_the_references(loss_type: str) -> None:
    case = Case(50)
    case.run(loss_type).loss.backward()
    found = case.gradients()
    Reference(case, loss_type).loss.backward()
    for one, other in zip(found, case.gradients(), strict=True):
        torch.testing.assert_close(one, other)


@every_loss
@pytest.mark.parametrize(("depth_weights", "keeps_graph"), [(None, False), (None, True), ("d_pace", True)])
def test_parts_of_a_batch_add_up(loss_type: str, depth_weights: str | None, keeps_graph: bool) -> None:
    """One part for each row, each with the counts of the whole batch; deep steps predict in some rows only."""
    case = Case(50, shifts=(2, 5, 9))
    options: dict[str, Any] = {"depth_weights": depth_weights, "keeps_graph": keeps_graph}
    whole = case.run(loss_type, **options)
    whole.loss.backward()
    gradients = case.gradients()
    counts, mask, parts = torch.stack(whole.positions), case.loss_mask, []
    assert len(set(counts.tolist())) == 3
    for row in range(BATCH):
        case.loss_mask = torch.zeros_like(mask)
        case.loss_mask[row] = mask[row]
        parts.append(case.run(loss_type, counts=counts, **options).loss)
        parts[-1].backward()
    torch.testing.assert_close(torch.stack(parts).sum(), whole.loss)
    for one, other in zip(case.gradients(), gradients, strict=True):
        torch.testing.assert_close(one, other)


class TestChunks:
    @every_loss
    @pytest.mark.parametrize(
        ("rows", "keeps_graph", "draft_size"), [(1, True, None), (7, True, 50), (7, False, 50), (1000, False, None)]
    )
    def test_give_the_same_loss_and_gradients(
        self, loss_type: str, rows: int, keeps_graph: bool, draft_size: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Against plain gradients of all rows at once; the backward pass comes with a factor."""
        case = Case(draft_size)
        whole = case.run(loss_type, keeps_graph=True)
        (3 * whole.loss).backward()
        gradients = case.gradients()
        monkeypatch.setattr("draftsmith.training.losses.teacher.CHUNK_ELEMENTS", rows * case.columns)
        monkeypatch.setattr("draftsmith.training.losses.draft_loss.BLOCK_ELEMENTS", 3 * case.columns)
        chunked = case.run(loss_type, keeps_graph=keeps_graph)
        (3 * chunked.loss).backward()
        torch.testing.assert_close(chunked.loss, whole.loss)
        for name in ("top1", "top5", "positions"):
            assert getattr(chunked, name) == getattr(whole, name)
        for one, other in zip(case.gradients(), gradients, strict=True):
            torch.testing.assert_close(one, other)

    @every_loss
    def test_bound_what_is_alive(self, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """No call of either LM head sees more rows than a chunk; the target's sees those with a teacher, once."""
        case = Case(50)
        sizes: dict[str, list[int]] = {"target": [], "draft": []}

        def counted(name: str, head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def call(hidden: Tensor) -> Tensor:
                assert hidden.dim() == 2
                sizes[name].append(hidden.shape[0])
                return head(hidden)

            return call

        monkeypatch.setattr("draftsmith.training.losses.teacher.CHUNK_ELEMENTS", 5 * VOCAB)
        monkeypatch.setattr(case.target, "compute_logits", counted("target", case.target.compute_logits))
        case.steps = [DraftStep(step.shift, step.hidden, counted("draft", step.head)) for step in case.steps]
        teacher = case.teacher(loss_type)
        assert max(sizes["target"]) == 5
        assert sum(sizes["target"]) == case.loss_mask[:, 1:].sum()
        with torch.no_grad():
            draft_loss(case.steps, teacher, case.loss_mask, loss_type=loss_type, step_decay=1.0)
        assert max(sizes["draft"]) <= 5 * VOCAB // 50
        logits = teacher.logits
        assert (logits is None) == (loss_type == "cross_entropy"), "cross-entropy to the data needs no distributions"
        assert logits is None or logits.shape == (case.loss_mask[:, 1:].sum(), 50)

    @pytest.mark.parametrize("keeps_graph", [True, False])
    def test_keep_no_logits_for_the_backward_pass(self, keeps_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing that is kept is larger than states; gradients taken early are not part of the graph."""
        case = Case()
        teacher = case.teacher("distillation")
        monkeypatch.setattr("draftsmith.training.losses.teacher.CHUNK_ELEMENTS", 2 * VOCAB)
        kept: list[weakref.ref[Tensor]] = []

        def note(tensor: Tensor) -> Tensor:
            if not (teacher.logits is not None and tensor.data_ptr() == teacher.logits.data_ptr()):
                kept.append(weakref.ref(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = draft_loss(
                case.steps, teacher, case.loss_mask, loss_type="distillation", step_decay=1.0, keeps_graph=keeps_graph
            )
        alive = [tensor for reference in kept if (tensor := reference()) is not None]
        assert output.loss.requires_grad
        assert max((tensor.numel() for tensor in alive), default=0) <= BATCH * LENGTH * HIDDEN


class TestNothingToLearn:
    @every_loss
    @pytest.mark.parametrize("what", ["mask", "vocabulary", "length"])
    def test_is_a_loss_of_zero_with_gradients(self, loss_type: str, what: str) -> None:
        """Every parameter gets a gradient of zero: data-parallel training waits for each of them on each process."""
        case = Case(1 if what == "vocabulary" else None, shifts=(12, 13) if what == "length" else (2, 3))
        if what == "mask":
            case.loss_mask.zero_()
        if what == "vocabulary":
            case.draft_token_ids = torch.tensor([0])  # random prompts have no 0 ...
            with torch.no_grad():
                case.target.lm_head.weight[0] = 0  # ... and random states never score it best
        output = case.run(loss_type)
        assert output.loss.item() == 0
        assert [float(total) for total in output.loss_sums] == [0, 0]
        output.loss.backward()
        for gradient in case.gradients():
            assert gradient.abs().max() == 0


def test_a_tie_counts_as_a_hit_for_one_token_only() -> None:
    """Low-precision logits tie often at the top: a draft that scores all tokens alike is right for one of them."""
    case = Case(shifts=(2,))
    step = DraftStep(2, case.hidden[0], lambda hidden: torch.zeros(*hidden.shape[:-1], VOCAB))
    output = draft_loss([step], case.teacher("distillation"), case.loss_mask, loss_type="distillation", step_decay=1.0)
    assert int(output.top1[0]) < int(output.positions[0]) // 4


@every_loss
def test_low_precision_states_lose_in_float32(loss_type: str) -> None:
    case = Case(shifts=(2,))
    head = case.heads[0].to(torch.bfloat16)
    step = DraftStep(2, case.hidden[0].detach().bfloat16(), head)
    output = draft_loss([step], case.teacher(loss_type), case.loss_mask, loss_type=loss_type, step_decay=1.0)
    assert output.loss.dtype == torch.float32
    case.steps = [DraftStep(2, step.hidden, lambda hidden: head(hidden).float())]
    torch.testing.assert_close(output.loss, Reference(case, loss_type).loss)


@pytest.mark.filterwarnings("ignore:.*autocast:UserWarning")
def test_float16_keeps_gradients_that_only_the_scaled_loss_has() -> None:
    """A gradient of one of many tokens at one of many positions is below float16's smallest number."""
    generator = torch.Generator().manual_seed(0)
    length, columns, width = 512, 4096, 8
    head = nn.Linear(width, columns, bias=False)
    slots = torch.arange(length)
    teacher = Teacher(
        logits=torch.randn(length, columns, generator=generator),
        hidden=torch.zeros(length, width),
        rows=slots[None],
        argmax=torch.zeros(1, length, dtype=torch.long),
        labels=torch.zeros(1, length, dtype=torch.long),
        num_columns=columns,
    )
    hidden = torch.randn(1, length, width, generator=generator)
    found = []
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 2.0**16)):
        head.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.float16):
            step = DraftStep(2, hidden.clone().requires_grad_(), head)
            loss = draft_loss([step], teacher, torch.ones(1, length), loss_type="distillation").loss
        (scale * loss).backward()
        found.append(head.weight.grad / scale)
    assert (found[1] - found[0]).norm() < 0.002 * found[0].norm()
