"""Examines a transformers model once: can it verify a tree, and what does it write into a cache?

Only `Target` uses this file. Every refusal is a ValueError that says what the model does, and why this cannot be rolled
back or verified as a tree.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.targets.lm_head import find_logit_scaling
from inference.targets.model_config import chooses_experts, find_layer_windows, is_quantised, list_windows
from inference.targets.probe_tree import (
    Findings,
    MakeMasks,
    ProbeTree,
    RecordingCache,
    WrongNumbersError,
    check_branches,
    check_finite,
    draw_ids,
    is_single,
    refusing,
    takes_inference_mode,
)

logger = logging.getLogger(__name__)


def examine_model(model: Any, text_config: Any, make_masks: MakeMasks, device: torch.device) -> Findings:
    """Examines the model with four tokens. In models with experts a router can be at a near-tie, so wrong numbers are
    confirmed with other tokens before such a model is refused."""
    for first in (1, 4) if chooses_experts(model) else ():
        try:
            return _examine_with(draw_ids(model, first, device), model, text_config, make_masks)
        except WrongNumbersError as error:
            logger.info("%s: trying other tokens", error)
    return _examine_with(draw_ids(model, 7, device), model, text_config, make_masks)


@torch.no_grad()
def _examine_with(token_ids: Tensor, model: Any, text_config: Any, make_masks: MakeMasks) -> Findings:
    """Learns cache shapes and the way to logits; checks that the model follows masks and position ids."""
    name = type(model).__name__
    num_layers, tree = text_config.num_hidden_layers, ProbeTree.of_tokens(token_ids, make_masks)
    cache = RecordingCache(name)
    with refusing(f"{name} does not run with a 4-D mask, position ids and a cache"):
        output = model.base_model(
            input_ids=token_ids,
            attention_mask=tree.masks,
            position_ids=tree.positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=[0],
            return_dict=True,
        )
    missing = sorted(set(range(num_layers)) - set(cache.specs))
    if missing:
        raise ValueError(
            f"layers {missing} of {name} never write keys and values into the cache (shared or recurrent layers), so "
            f"they cannot be rolled back after a rejected draft"
        )
    if output.hidden_states is None or len(output.hidden_states) != num_layers + 1:
        found = None if output.hidden_states is None else len(output.hidden_states)
        raise ValueError(f"{name} reports {found} hidden states where {num_layers + 1} are expected")
    plain = {"input_ids": token_ids[:, :2], "use_cache": False, "return_dict": True}
    plain_hidden = model.base_model(**plain).last_hidden_state
    other_ids = torch.cat([token_ids[:, :2], token_ids[:, 2:3].expand(-1, 2)], dim=1)
    longer, other = (
        model.base_model(**plain | {"input_ids": ids}).last_hidden_state[0] for ids in (token_ids, other_ids)
    )
    check_finite(model, "hidden states", [plain_hidden, longer, other], output.last_hidden_state)
    _check_window(model, text_config, token_ids, make_masks)
    noise = _measure_noise(model, plain_hidden[0], longer[:2], other[:2])
    check_branches(cache, output.last_hidden_state[0], plain_hidden[0], noise)
    logits = model(**plain).logits
    check_finite(model, "logits", [logits.masked_fill(logits == -torch.inf, 0.0)])  # some models forbid ids with -inf
    scale_logits = find_logit_scaling(text_config, model.get_output_embeddings(), plain_hidden, logits)
    windows = list_windows(text_config)
    specs = tuple(replace(cache.specs[layer], window=windows[layer]) for layer in range(num_layers))
    is_fast = takes_inference_mode(lambda: model(**plain))
    return Findings(specs, scale_logits, logits.shape[-1], plain_hidden.shape[-1], is_fast)


def _check_window(model: Any, text_config: Any, token_ids: Tensor, make_masks: MakeMasks) -> None:
    """Checks that the model applies the sliding window of its config, with a copy whose window is two tokens.

    The copy must agree with the model under masks whose positions are half a window apart.
    """
    window = max((size for size in find_layer_windows(text_config).values() if size is not None), default=0)
    if window < 2:
        return
    decoder = next(part for part in (model.get_decoder(), model.base_model) if isinstance(part, PreTrainedModel))
    narrow: Any = copy.copy(decoder)  # shares the layers; the decoder's own stays as it is
    narrow.__dict__.pop("forward", None)  # accelerate's, which would run the decoder itself
    narrow.config = copy.deepcopy(decoder.config)
    narrow.config.sliding_window = 2
    positions = torch.arange(4, device=token_ids.device)[None]
    seen = make_masks(positions.new_ones(1, 4, 4).tril().bool(), *[positions * -(-window // 2)] * 2)
    call = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "return_dict": True}
    wanted, masked, unbounded = (
        module(**call | masks).last_hidden_state[0, 2:].float()
        for module, masks in ((narrow, {}), (decoder, {"attention_mask": seen}), (decoder, {}))
    )
    error, effect = (float((found - wanted).norm()) for found in (masked, unbounded))
    if not error <= effect / 2:
        raise WrongNumbersError(
            f"{type(model).__name__} does not mask by its config's sliding_window={window} as other models do, so a "
            f"tree cannot be masked: for a model without a window set sliding_window=None"
        )


def _measure_noise(model: Any, hidden: Tensor, longer: Tensor, other: Tensor) -> float:
    """The relative change of the states [2, D] of two tokens when a pass holds two more tokens after them.

    Two passes of one shape that differ only in the later tokens are rounded alike, so they must agree more closely.
    Experts are the exception: the number of tokens they compute at once depends on the later tokens.
    """
    name, size = type(model).__name__, float(hidden.float().norm())
    noise, leak = (float((longer - states).float().norm()) / size for states in (hidden, other))
    rounding = 1e-3 if is_single(hidden) else 0.03
    has_quantised = is_quantised(model)
    allowed = 0.1 if has_quantised else rounding
    allowed_leak = allowed if has_quantised or chooses_experts(model) else rounding / 30
    if not (noise <= allowed and leak <= allowed_leak):
        raise WrongNumbersError(
            f"the hidden states of {name} change by {noise:.2g} when tokens are added after them, and by {leak:.2g} "
            f"when these later tokens change: it is not a causal LM. Only the activations of quantised models may "
            f"depend on the whole pass (`model.is_quantized`)"
        )
    if noise > rounding:
        logger.warning(
            "the hidden states of %s change by %.2g with the number of tokens in a pass, as with quantised activations "
            "(LLM.int8): its texts can differ from plain decoding's more often than rounding explains. Where this "
            "matters, quantise only the weights",
            name,
            noise,
        )
    return noise
