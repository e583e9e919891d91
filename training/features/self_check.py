"""The check every run makes once: do the states that heads learn from give the target's own distribution?

Legend: T tokens that are checked, F feature width, D hidden size, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inference.targets.target import Target
from training.data.streaming import ConversationStream
from training.features.options import PreparedFeatures
from training.features.sources import FeatureSource, TargetStates
from training.losses.top_logits import restore_logits

logger = logging.getLogger(__name__)

NUM_TOKENS = 32  # of the first row; a model's pass over them is its only cost
NUM_BEST = 10  # tokens whose log-probabilities are compared at each position
# Largest differences between two orders of computing the same: in log-probability, and relative to a state's length.
LOG_PROB_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2, torch.float16: 0.3, torch.bfloat16: 1.0}
STATE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_first_row(target: Target, features: PreparedFeatures, rows: Any, feature_layers: Sequence[int]) -> float:
    """`check_features` on the first of a run's rows, read as the trainer will read it."""
    row = rows.first_rows(1)[0] if isinstance(rows, ConversationStream) else rows[0]
    batch = features.collate([row])
    batch = {name: value.to(target.device) for name, value in batch.items()}
    return check_features(target, features.peek, feature_layers, batch, dtype=features.dtype)


@torch.no_grad()
def check_features(
    target: Target,
    source: FeatureSource,
    feature_layers: Sequence[int],
    batch: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
) -> float:
    """Compares the states of a batch's first row with a pass of the stock model over its first tokens.

    Args:
        batch: as the trainer gets it, on the target's device.
        dtype: of the states: what they are stored in, if that is narrower than the target's.

    Returns:
        the largest difference of log-probabilities.

    Raises:
        ValueError: the states are not the target's, with the difference and its likely cause.
    """
    states = source(batch)
    count = min(NUM_TOKENS, int(batch["attention_mask"][0].sum()))
    if "document_ids" in batch:  # the first of the row
        count = min(count, int((batch["document_ids"][0] == batch["document_ids"][0, 0]).sum()))
    output = target.model(
        input_ids=batch["input_ids"][:1, :count],
        attention_mask=torch.ones_like(batch["input_ids"][:1, :count]),
        output_hidden_states=True,
        use_cache=False,
        return_dict=True,
    )
    wanted = output.logits[0].to(target.device).float().log_softmax(-1)
    _check_tapped(target, states.features[0, :count], output.hidden_states, feature_layers, STATE_TOLERANCE[dtype])
    found = _log_probabilities(target, states, count)
    best = wanted.topk(min(NUM_BEST, wanted.shape[-1]), dim=-1).indices
    if states.top_logits is not None:
        best = best[:, : min(best.shape[1], states.top_logits.values.shape[-1])]
    difference = float((found.gather(1, best) - wanted.gather(1, best)).abs().max())
    if not difference <= LOG_PROB_TOLERANCE[dtype]:
        cause = _guess_cause(target, states, count, wanted, best, LOG_PROB_TOLERANCE[dtype])
        raise ValueError(
            f"the states that the heads would learn from do not give the target's distribution: log-probabilities of "
            f"its {best.shape[1]} best tokens differ by up to {difference:.3g} (allowed {LOG_PROB_TOLERANCE[dtype]:g}) "
            f"over {count} tokens of the first row. {cause}"
        )
    logger.info("self-check: log-probabilities from the states differ by at most %.2g from the target's", difference)
    return difference


def _log_probabilities(target: Target, states: TargetStates, count: int) -> Tensor:
    """[T, V] float32, from what the teacher will be made of."""
    if states.top_logits is None:
        return target.compute_logits(states.last_hidden[0, :count]).float().log_softmax(-1)
    where = torch.zeros(states.top_logits.log_sum_exp.shape, dtype=torch.bool, device=target.device)
    where[0, :count] = True
    top = states.top_logits.select(where)
    return restore_logits(top, None, target.vocab_size).float() - top.log_sum_exp[:, None]


def _check_tapped(
    target: Target, features: Tensor, hidden_states: Sequence[Tensor], layers: Sequence[int], tolerance: float
) -> None:
    for index, layer in enumerate(layers):
        found = features[:, index * target.hidden_size : (index + 1) * target.hidden_size].float()
        wanted = hidden_states[layer][0].to(target.device).float()
        difference = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not difference <= tolerance:
            raise ValueError(
                f"the states of layer {layer} that the heads would learn from differ from the target's by "
                f"{difference:.3g} of their length (allowed {tolerance:g}): they were stored by another model (other "
                "weights or settings under the same name), or the file was changed. Extract the features again"
            )


def _guess_cause(
    target: Target, states: TargetStates, count: int, wanted: Tensor, best: Tensor, tolerance: float
) -> str:
    """Tries what usually is wrong, and says which of it helps."""
    if states.top_logits is not None:
        return "The stored teacher is that of another model: extract the features again"
    hidden = states.last_hidden[0, :count]
    if target.final_norm is not None:
        found = target.compute_logits(target.final_norm(hidden)).float().log_softmax(-1)
        if float((found.gather(1, best) - wanted.gather(1, best)).abs().max()) <= tolerance:
            return "They are states before the final norm, stored as if they were behind it: extract them again"
    logits = target.compute_logits(hidden).float()
    x, y = logits - logits.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    factor = float((x * y).sum() / (x * x).sum())
    agreement = float((x * y).sum() / (x.norm() * y.norm()))
    if agreement > 0.999:
        return (
            f"The model's logits are {factor:.4g} times those of its LM head, by a scale that is not known here: "
            "please report this model"
        )
    return "They are of another checkpoint, or of another text: extract the features again with this target and data"
