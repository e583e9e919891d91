"""Muon for the hidden matrices, AdamW for everything else, as one optimizer that Trainer schedules and checkpoints."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al. 2024; arXiv 2502.16982) on 2-D weights, `torch.optim.AdamW` on all others.

    AdamW trains LM heads, embeddings, norms and biases, for which Muon is not made. Heads learn more from the same
    tokens than with AdamW for all weights. On a CPU, Muon computes in float32: in bfloat16 it takes 30 times as long
    without bfloat16 instructions.

    Args:
        named_parameters: the heads' parameters; parameters without gradients are left out.
        muon_learning_rate: scale of the orthogonalised updates, times sqrt(max(1, rows / columns)); 0.02 to 0.05 fits.
        learning_rate, betas, eps: AdamW's.
        more_groups: further groups for AdamW, as torch's optimizers take them.
        weight_decay: for both optimizers, on matrices only.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_learning_rate: float,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        more_groups: Iterable[dict[str, Any]] = (),
    ) -> None:
        hidden: list[nn.Parameter] = []
        lm_heads: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                vectors.append(parameter)
            else:
                is_of_tokens = any(part.endswith(("lm_head", "embedding")) for part in name.split("."))
                (lm_heads if parameter.ndim > 2 or is_of_tokens else hidden).append(parameter)
        # AdamW's groups first: Trainer logs the learning rate of the first one.
        adamw_groups: list[dict[str, Any]] = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((lm_heads, weight_decay), (vectors, 0.0))
            if params
        ]
        adamw_groups += more_groups
        muon_groups: list[dict[str, Any]] = [{"params": hidden}] if hidden else []
        self._members: list[torch.optim.Optimizer] = []
        if adamw_groups:
            self._members.append(torch.optim.AdamW(adamw_groups, lr=learning_rate, betas=betas, eps=eps))
        if muon_groups:
            self._members.append(torch.optim.Muon(muon_groups, lr=muon_learning_rate, weight_decay=weight_decay))
        super().__init__([group for member in self._members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Makes the members use this optimizer's groups and state, so that schedules and checkpoints reach them."""
        start = 0
        for member in self._members:
            end = start + len(member.param_groups)
            member.param_groups, member.state = self.param_groups[start:end], self.state
            start = end

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for member in self._members:
            if isinstance(member, torch.optim.AdamW):
                member.step()
            else:
                _step_muon(member)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


@torch.no_grad()
def _step_muon(muon: torch.optim.Optimizer) -> None:
    """`muon.step()`; for weights on a CPU the same in float32."""
    if any(weight.device.type != "cpu" for group in muon.param_groups for weight in group["params"]):
        muon.step()
        return
    for group in muon.param_groups:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = muon.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            average = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
            update = orthogonalize(
                weight.grad.lerp(average, group["momentum"]), group["ns_coefficients"], group["ns_steps"]
            )
            rows, columns = weight.shape
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(update, alpha=group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """A matrix with the singular vectors of `matrix` and singular values near 1 (0.7 to 1.2), by Newton-Schulz
    iterations: a X + (b A + c A A) X with A = X X^T."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
