"""The weight of each drafting step in the loss: a fixed decay, or D-PACE.

Legend: B batch, T sequence length, K steps.
"""

import torch
from torch import Tensor

D_PACE = "d_pace"
SMOOTHING = 0.5  # alpha of D-PACE (arXiv 2605.18810): the part of a step's weight that a wrong draft keeps


def fixed_weights(num_steps: int, *, step_decay: float, depth_weights: str | None) -> tuple[float, ...]:
    """Returns the fixed weight of each step: step_decay^k (Medusa, section 2.2.1: lambda 0.8; EAGLE-3: 0.8^k).

    Under D-PACE it is 1, because D-PACE weighs each position.
    """
    return tuple(1.0 if depth_weights == D_PACE else step_decay**k for k in range(num_steps))


@torch.no_grad()
def weigh_by_d_pace(chances: Tensor, is_predicted: Tensor) -> Tensor:
    """D-PACE (arXiv 2605.18810): the derivative of the expected accepted tokens by the log-probability of step k.

    With c_k = (1 - alpha) q_k(x) + alpha and P_k = c_1 ... c_k, the smoothed chance that a draft survives step k, the
    weight of step k is P_k + ... + P_K over the steps that predict a token. The loss treats it as a constant.

    Args:
        chances: [K, B, T], q_k(x), the draft's probability of the token x that step k should predict.
        is_predicted: [K, B, T] bool; other positions neither end a draft nor lengthen it.

    Returns:
        [K, B, T]; 0 at other positions.

    Worked example: chances 0.5, 0 give c = 0.75, 0.5, so P = 0.75, 0.375 and the weights 1.125, 0.375.
    """
    lives = torch.where(is_predicted, (1 - SMOOTHING) * chances + SMOOTHING, 1.0).cumprod(0) * is_predicted
    return lives.flip(0).cumsum(0).flip(0) * is_predicted
