"""Muon beside AdamW: who trains what, one schedule for both, checkpoints that go on exactly."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.training.options.training_options import HeadsTrainingArguments, check_muon
from draftsmith.training.run.optimizer import MuonWithAdamW
from tests.conftest import needs_muon

pytestmark = needs_muon


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 9, bias=False)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden(x).tanh())


def make_optimizer(model: nn.Module) -> MuonWithAdamW:
    return MuonWithAdamW(
        model.named_parameters(),
        muon_learning_rate=0.02,
        learning_rate=0.01,
        betas=(0.8, 0.7),
        eps=0.003,
        weight_decay=0.1,
    )


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)], ids=str)
def test_on_a_cpu_muon_is_torchs_without_its_rounding_to_bfloat16(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    one = nn.Parameter(torch.randn(shape))
    other = nn.Parameter(one.detach().clone())
    ours = MuonWithAdamW([("hidden", one)], muon_learning_rate=0.02, learning_rate=0.01, weight_decay=0.1)
    torchs = torch.optim.Muon([other], lr=0.02, weight_decay=0.1)
    for _ in range(3):
        one.grad = torch.randn(shape)
        other.grad = one.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def make_separate_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """The same as `make_optimizer`, with an optimizer for each parameter."""
    return [
        MuonWithAdamW([("hidden", model.hidden.weight)], muon_learning_rate=0.02, learning_rate=0.0, weight_decay=0.1),
        torch.optim.AdamW([model.lm_head.weight], lr=0.01, betas=(0.8, 0.7), eps=0.003, weight_decay=0.1),
        torch.optim.AdamW([model.hidden.bias], lr=0.01, betas=(0.8, 0.7), eps=0.003, weight_decay=0.0),
    ]


def train(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: range, *, decay: float = 1.0) -> None:
    """Every step takes `decay` times the learning rates of the one before."""
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay**step) for optimizer in optimizers]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 6, generator=generator)
        labels = torch.randint(9, (8,), generator=generator)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("decay", [1.0, 0.5], ids=["constant", "decaying"])
def test_each_parameter_moves_as_its_own_optimizer_moves_it(decay: float) -> None:
    model, reference = Model(), Model()
    train(model, [make_optimizer(model)], range(3), decay=decay)
    train(reference, make_separate_optimizers(reference), range(3), decay=decay)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, rtol=0, atol=0)
    assert torch.equal(model.frozen, torch.ones(3, 3))


def test_a_restored_optimizer_goes_on_exactly() -> None:
    whole, halves = Model(), Model()
    train(whole, [make_optimizer(whole)], range(6))
    first = make_optimizer(halves)
    train(halves, [first], range(3))
    second = make_optimizer(halves)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(halves, [second], range(3, 6))
    for (name, one), other in zip(whole.named_parameters(), halves.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("strategy", ["FSDP", "DEEPSPEED"])
def test_fsdp_and_deepspeed_are_refused(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    muon, adamw = (HeadsTrainingArguments(**options, muon_learning_rate=rate) for rate in (0.04, None))
    check_muon(muon)
    monkeypatch.setenv(f"ACCELERATE_USE_{strategy}", "true")
    check_muon(adamw)
    with pytest.raises(ValueError, match=r"got muon_learning_rate 0.04 under .*`--muon_learning_rate none`"):
        check_muon(muon)
