"""Full passes of a target without a cache, for training.

Legend: B batch, T tokens, D hidden, F = len(feature_layers) * D.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from draftsmith.heads.modules.documents import gather_documents, split_documents
from draftsmith.heads.modules.host_tensors import OnHost
from draftsmith.inference.shared_swaps import SharedSwap
from draftsmith.inference.targets.multimodal import take_media
from draftsmith.inference.targets.target import Target

_HAS_SINGLE_TEXTS = ContextVar("has_single_texts", default=False)
_FIND_PACKED = masking_utils.find_packed_sequence_indices


@dataclass(frozen=True)
class TargetStates:
    """The target's states of a batch; values at padding are unspecified.

    Attributes:
        features: [B, T, F], the tapped hidden states; F is 0 when no layers were asked for.
        last_hidden: [B, T, D], after the final norm.
    """

    features: Tensor
    last_hidden: Tensor


def encode(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | OnHost,
    *,
    feature_layers: Sequence[int] = (),
    with_autograd: bool = False,
    document_ids: Tensor | OnHost | None = None,
    num_groups: int | None = None,
    media: Mapping[str, Any] | None = None,
) -> TargetStates:
    """Hidden states of whole texts, without logits; they may enter an autograd graph.

    Args:
        input_ids: [B, T] long, right-padded.
        attention_mask: [B, T], 1 on real tokens. The model gets no mask: causal attention keeps real tokens from the
            padding after them, and its kernels then need no [T, T]. Positions are 0..T-1.
        feature_layers: hidden states to hand over, in this order.
        with_autograd: keep the pass's own graph too, for weights that are trained (adapters).
        document_ids: [B, T], for rows that hold several documents (`split_documents`). Each document begins at
            position 0 and sees no other; every group of documents is a pass of its own. States at padding are zero.
            None = one document per row.
        num_groups: passed to `split_documents`.
        media: what a processor made of the rows' images (`take_media`). The rows are then a single pass, in which the
            model counts the positions itself.
    """
    target.refuse_features()
    if document_ids is not None and not media:
        groups = split_documents(document_ids, num_groups=num_groups)
        options: Any = {"feature_layers": feature_layers, "with_autograd": with_autograd}
        parts = [encode(target, group.read(input_ids), group.mask, **options) for group in groups]
        return TargetStates(
            gather_documents(groups, [part.features for part in parts], input_ids.shape),
            gather_documents(groups, [part.last_hidden for part in parts], input_ids.shape),
        )
    positions: Tensor | None = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if media:
        positions, media = None, take_media(target, media)
    with torch.set_grad_enabled(with_autograd and torch.is_grad_enabled()), _single_texts():
        states = target.backbone.read(input_ids, positions, feature_layers=feature_layers, media=media)
    return TargetStates(states.last[..., :0] if states.features is None else states.features, states.last)


@contextmanager
def _single_texts() -> Iterator[None]:
    """transformers otherwise looks for packed texts in the position ids of every pass, and so waits for the device. In
    the passes of other threads it still does."""
    token = _HAS_SINGLE_TEXTS.set(True)
    try:
        with SharedSwap(masking_utils, "find_packed_sequence_indices", _find_packed):
            yield
    finally:
        _HAS_SINGLE_TEXTS.reset(token)


def _find_packed(position_ids: Tensor) -> Tensor | None:
    return None if _HAS_SINGLE_TEXTS.get() else _FIND_PACKED(position_ids)


@contextmanager
def recomputing_layers(target: Target) -> Iterator[None]:
    """Gradient checkpointing for `encode(with_autograd=True)`: inside this context, the layers keep only their inputs,
    and run again in the backward pass.

    transformers checkpoints layers in training mode only, in which a target's passes would differ from decoding.

    Raises:
        ValueError: transformers can checkpoint none of the model's layers.
    """
    model = target.backbone.causal_lm
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be run again: leave gradient_checkpointing out"
        )

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), target.backbone.attention()  # the pass's own is over when the layers run again

    with ExitStack() as stack:
        for layer in layers:
            # An overlapping thread finds the layers replaced, and its own replacement is not used.
            forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
            stack.enter_context(SharedSwap(layer, "forward", forward))
        yield
