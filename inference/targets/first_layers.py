"""Parts of a decoder: its final norm, and its first layers as a model of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from inference.targets.model_config import find_device
from inference.targets.probe_tree import draw_ids, is_single, refusing


def find_final_norm(causal_lm: Any) -> nn.Module | None:
    """The norm after the last layer; None when there is no such module."""
    norms = [
        child
        for child in causal_lm.get_decoder().children()
        if "norm" in type(child).__name__.lower() and getattr(child, "weight", None) is not None
    ]
    return norms[-1] if norms else None


@torch.no_grad()
def find_final_norm_gain(causal_lm: Any) -> Tensor | None:
    """The factor of each channel in the model's final norm ([D], its dtype), or None when there is no such norm.

    It is measured by running the norm: some norms add one to their weight (Gemma), some subtract the mean.
    """
    norm: Any = find_final_norm(causal_lm)
    if norm is None:
        return None
    weight: Tensor = norm.weight
    signs = torch.ones(weight.shape, dtype=weight.dtype, device=find_device(norm))
    signs[1::2] = -1  # mean 0 and root mean square 1, which normalising does not change
    gain: Tensor = (norm(signs) - norm(-signs)) * signs / 2
    return gain


def take_first_layers(causal_lm: Any, num_layers: int) -> nn.Module:
    """The decoder cut off after its first layers: the same modules, without the later layers and the final norm.

    Raises:
        ValueError: the model has no such layers, or the output differs from its hidden_states[num_layers].
    """
    name, decoder = type(causal_lm).__name__, causal_lm.get_decoder()
    total = causal_lm.config.get_text_config().num_hidden_layers
    if not 0 < num_layers < total:
        raise ValueError(f"asked for the first {num_layers} layers of {name}; allowed is 1 to {total - 1}")
    final_norm = find_final_norm(causal_lm)
    first: Any = copy.copy(decoder)
    first._modules = dict(decoder._modules)  # the decoder's own stays as it is
    first.__dict__.pop("forward", None)  # accelerate's would run the decoder itself
    for key, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            first._modules[key] = child[:num_layers]
        elif child is final_norm:
            first._modules[key] = nn.Identity()
    token_ids = draw_ids(causal_lm, 1, find_device(causal_lm.get_input_embeddings()))
    with refusing(f"{name} does not run with its first {num_layers} layers only"), torch.no_grad():
        found = first(input_ids=token_ids, use_cache=False, return_dict=True).last_hidden_state
        states = decoder(input_ids=token_ids, use_cache=False, output_hidden_states=True, return_dict=True)
    wanted = states.hidden_states[num_layers].to(found.device)
    difference = float((found - wanted).float().norm() / wanted.float().norm())
    if not difference <= (1e-4 if is_single(wanted) else 1e-2):
        raise ValueError(
            f"the first {num_layers} layers of {name} give other states by themselves than within the whole model "
            f"(they differ by {difference:.2g})"
        )
    return first  # type: ignore[no-any-return]
