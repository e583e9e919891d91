"""Each loss against sums over single tokens, its gradient against finite differences, and both where chances vanish.

Legend: M positions, C draft vocabulary, D hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.training.losses.draft_loss import check_loss
from draftsmith.training.losses.terms import LOSSES, ScoredTokens, parse_loss
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import tiny_target

ROWS, COLUMNS, WIDTH = 5, 13, 4
every_loss = pytest.mark.parametrize("name", LOSSES)


def random_tokens(seed: int = 0, dtype: torch.dtype = torch.float64) -> ScoredTokens:
    """Positions whose label (row 1), argmax (row 2) or both (row 3) are outside the draft vocabulary."""
    torch.manual_seed(seed)
    return ScoredTokens(
        logits=(2 * torch.randn(ROWS, COLUMNS, dtype=dtype)).requires_grad_(),
        teacher_logits=2 * torch.randn(ROWS, COLUMNS, dtype=dtype),
        label=torch.tensor([3, -1, 0, -1, 12]),
        argmax=torch.tensor([5, 12, -1, -1, 0]),
        hidden=torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True),
        target_hidden=3 * torch.randn(ROWS, WIDTH, dtype=dtype),
    )


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def slow_loss(name: str, tokens: ScoredTokens, row: int) -> float:
    """One position's loss, in Python's own arithmetic."""
    q, p = softmax(tokens.logits[row].tolist()), softmax(tokens.teacher_logits[row].tolist())
    label, argmax = int(tokens.label[row]), int(tokens.argmax[row])
    acceptance = sum(min(a, b) for a, b in zip(p, q, strict=True))
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    distances = [
        abs(a - b) for a, b in zip(tokens.hidden[row].tolist(), tokens.target_hidden[row].tolist(), strict=True)
    ]
    share = math.exp(-3 * acceptance)
    slow: dict[str, Callable[[], float]] = {
        "cross_entropy": lambda: -math.log(q[label]) if label >= 0 else 0.0,
        "argmax_cross_entropy": lambda: -math.log(q[argmax]) if argmax >= 0 else 0.0,
        "distillation": lambda: -sum(a * math.log(b) for a, b in zip(p, q, strict=True)),
        "topk_distillation": lambda: -sum(a * math.log(b) for a, b in sorted(zip(p, q, strict=True))[-10:]),
        "kl": lambda: forward,
        "reverse_kl": lambda: sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
        "total_variation": lambda: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "lk_alpha": lambda: -math.log(acceptance),
        "lk_lambda": lambda: share * forward + (1 - share) * (1 - acceptance),
        "smooth_l1": lambda: sum(d**2 / 2 if d < 1 else d - 0.5 for d in distances) / WIDTH,
    }
    return slow[name]()


class TestEveryLoss:
    @every_loss
    def test_equals_a_sum_over_single_tokens(self, name: str) -> None:
        tokens = random_tokens()
        expected = [slow_loss(name, tokens, row) for row in range(ROWS)]
        torch.testing.assert_close(parse_loss(name)(tokens), torch.tensor(expected, dtype=torch.float64))

    @pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_lambda"])
    def test_has_the_gradient_of_its_value(self, name: str) -> None:
        """By finite differences."""
        tokens = random_tokens()

        def loss(logits: Tensor, hidden: Tensor) -> Tensor:
            return parse_loss(name)(replace(tokens, logits=logits, hidden=hidden))

        assert torch.autograd.gradcheck(loss, (tokens.logits, tokens.hidden))

    def test_lk_lambda_takes_its_weight_for_a_constant(self) -> None:
        tokens = random_tokens()
        share = torch.exp(-3 * tokens.overlap.detach())
        parts = share * LOSSES["kl"].function(tokens) + (1 - share) * LOSSES["total_variation"].function(tokens)
        (expected,) = torch.autograd.grad(parts.sum(), tokens.logits, retain_graph=True)
        (found,) = torch.autograd.grad(parse_loss("lk_lambda")(tokens).sum(), tokens.logits)
        torch.testing.assert_close(found, expected)

    @every_loss
    @pytest.mark.parametrize("gap", [50.0, 1e4])
    def test_is_finite_where_chances_vanish(self, name: str, gap: float) -> None:
        """Target and draft both nearly one-hot, on the same and on different tokens; tokens the target rules out."""
        logits = torch.zeros(4, COLUMNS)
        logits[:, 2] = gap
        teacher = torch.zeros(4, COLUMNS)
        teacher[0, 2], teacher[1, 7] = gap, gap
        teacher[2, :7], teacher[3, 3:] = -math.inf, -math.inf
        tokens = ScoredTokens(
            logits.requires_grad_(),
            teacher,
            label=torch.tensor([2, 7, 8, 0]),
            argmax=torch.tensor([2, 7, 7, 0]),
            hidden=(gap * torch.ones(4, WIDTH)).requires_grad_(),
            target_hidden=torch.zeros(4, WIDTH),
        )
        loss = parse_loss(name)(tokens)
        assert loss.isfinite().all(), loss
        assert (loss > -1e-6).all()
        gradients = torch.autograd.grad(loss.sum(), [tokens.logits, tokens.hidden], materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)

    @every_loss
    def test_says_what_it_reads(self, name: str) -> None:
        """Without a distribution when it needs none; and what it does not say it reads changes nothing."""
        tokens = random_tokens()
        reads = LOSSES[name].reads
        other = random_tokens(seed=1)
        fields = {
            "label": {"label": other.label.roll(1)},
            "argmax": {"argmax": other.argmax.roll(1)},
            "distribution": {"teacher_logits": other.teacher_logits},
            "states": {"target_hidden": other.target_hidden},
        }
        before = parse_loss(name)(tokens)
        for kind, change in fields.items():
            is_same = torch.equal(parse_loss(name)(replace(tokens, **change)), before)
            assert is_same == (kind != reads), kind
        assert parse_loss(name).needs_distribution == (reads == "distribution")


class TestMixtures:
    def test_are_weighted_sums(self) -> None:
        tokens = random_tokens()
        mixture = parse_loss(" 1.8*total_variation + .1 * cross_entropy+smooth_l1 ")
        assert mixture.weights == {"total_variation": 1.8, "cross_entropy": 0.1, "smooth_l1": 1.0}
        expected = sum(weight * LOSSES[name].function(tokens) for name, weight in mixture.weights.items())
        torch.testing.assert_close(mixture(tokens), expected)

    @pytest.mark.parametrize(
        ("loss_type", "expected"),
        [
            ("cross_entropy", [True, False, True, False, True]),
            ("smooth_l1+cross_entropy", [True, False, True, False, True]),
            ("distillation", [True, True, False, False, True]),
        ],
    )
    def test_say_where_there_is_a_loss(self, loss_type: str, expected: list[bool]) -> None:
        tokens = random_tokens()
        assert parse_loss(loss_type).has_loss(tokens.label, tokens.argmax).tolist() == expected

    @pytest.mark.parametrize(
        ("loss_type", "message"),
        [
            ("total_variaton", "there is no loss 'total_variaton'; did you mean 'total_variation'"),
            ("0*kl", "the weight '0' of kl is not above 0"),
            ("kl+0.5*kl", "names kl twice"),
        ],
    )
    def test_that_cannot_be_read(self, loss_type: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_loss(loss_type)


def test_states_are_compared_only_where_steps_estimate_them() -> None:
    target = tiny_target("llama")
    check_loss("smooth_l1+0.1*distillation", tiny_heads("eagle", target))
    check_loss("distillation", tiny_heads("medusa", target))
    with pytest.raises(ValueError, match=r"loss_type 'smooth_l1.* steps of medusa heads"):
        check_loss("smooth_l1+0.1*distillation", tiny_heads("medusa", target))
