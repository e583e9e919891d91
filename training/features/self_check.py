"""The check at the start of every run: do the heads' training states give the target's own distribution?

Legend: T checked tokens, F feature width, D hidden size.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from draftsmith.inference.targets.multimodal import take_media
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import find_documents
from draftsmith.training.data.streaming import ConversationStream
from draftsmith.training.features.sources import FeatureSource

logger = logging.getLogger(__name__)

NUM_TOKENS = 32  # tokens of the first row to check: one short pass of the model
NUM_BEST = 10  # the likeliest tokens of each position, whose log-probabilities are compared
# The largest differences that rounding explains: of a log-probability, and of a state relative to its length.
LOG_PROB_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2, torch.float16: 0.3, torch.bfloat16: 1.0}
STATE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_first_row(
    target: Target, source: FeatureSource, collate: Callable[[Any], Any], rows: Any, feature_layers: Sequence[int]
) -> None:
    """Runs `check_features` on the first of a run's rows, collated as the trainer will do it."""
    row = rows.first_rows(1)[0] if isinstance(rows, ConversationStream) else rows[0]
    if "media" in row:  # so that images are compared too
        row = next((rows[number] for number, media in enumerate(rows["media"]) if media), row)
    check_features(target, source, feature_layers, send_to_device(collate([row]), target.device))


@torch.no_grad()
def check_features(
    target: Target,
    source: FeatureSource,
    feature_layers: Sequence[int],
    batch: Mapping[str, Any],
) -> float:
    """Compares the states of a batch's first row with a pass of the stock model over its first tokens.

    Returns:
        the largest difference of log-probabilities.

    Raises:
        ValueError: the states are not the target's; gives the difference.
    """
    states = source(batch)
    documents = find_documents(batch)
    assert documents is not None
    count = int((documents.values[0] == documents.values[0, 0]).sum())  # the row's first document
    media: dict[str, Tensor] = {}
    if "media" in batch:  # `check_first_row` gives a single row; its images belong together
        shape, taken = batch["input_ids"].shape, take_media(target, batch["media"])
        media = {name: value[:, :count] if value.shape == shape else value for name, value in taken.items()}
    else:
        count = min(NUM_TOKENS, count)
    output = target.model(
        **media,
        input_ids=batch["input_ids"][:1, :count],
        attention_mask=torch.ones_like(batch["input_ids"][:1, :count]),
        output_hidden_states=True,
        use_cache=False,
        return_dict=True,
    )
    _check_tapped(target, states.features[0, :count], output.hidden_states, feature_layers)
    wanted = output.logits[0].to(target.device).float().log_softmax(-1)
    found = target.compute_logits(states.last_hidden[0, :count]).float().log_softmax(-1)
    num_best = min(NUM_BEST, wanted.shape[-1])
    best = wanted.topk(num_best, dim=-1).indices
    difference = float((found.gather(1, best) - wanted.gather(1, best)).abs().max())
    if not difference <= LOG_PROB_TOLERANCE[target.dtype]:
        raise ValueError(
            f"the states to train on do not give the target's distribution: log-probabilities of its {num_best} best "
            f"tokens differ by up to {difference:.3g} (allowed {LOG_PROB_TOLERANCE[target.dtype]:g}) over {count} "
            "tokens of the first row. Stored features: they are of another checkpoint or text; extract them again. "
            "Online: the model changes its states or logits in a way that is not known here; please report the model"
        )
    logger.info("self-check: log-probabilities from the states differ by at most %.2g from the target's", difference)
    return difference


def _check_tapped(target: Target, features: Tensor, hidden_states: Sequence[Tensor], layers: Sequence[int]) -> None:
    tolerance = STATE_TOLERANCE[target.dtype]
    for index, layer in enumerate(layers):
        found = features[:, index * target.hidden_size : (index + 1) * target.hidden_size].float()
        wanted = hidden_states[layer][0].to(target.device).float()
        difference = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not difference <= tolerance:
            raise ValueError(
                f"the states of layer {layer} to train on differ from the target's by {difference:.3g} of their length "
                f"(allowed {tolerance:g}): another model stored them (the same name with other weights or settings), "
                "or the file has changed. Extract the features again"
            )
