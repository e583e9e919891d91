"""Examines a transformers model once: can it verify a tree, and what does it write into a cache?

Only `Target` uses this file. Every refusal is a ValueError with the reason why the model's steps cannot be
rolled back or verified as a tree.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.inference.cache.kv_cache import LayerSpec
from draftsmith.inference.cache.source import Source, SourceMemory
from draftsmith.inference.kernels.attention import STOCK, can_use_kernel, grouped_attention
from draftsmith.inference.targets.backbone import narrow
from draftsmith.inference.targets.encoder_decoder import PlacedDecoder
from draftsmith.inference.targets.forward_names import ForwardNames
from draftsmith.inference.targets.masks import TreeMasks
from draftsmith.inference.targets.model_config import (
    chooses_experts,
    find_attention,
    has_attention_interface,
    is_quantised,
    request_states,
)
from draftsmith.inference.targets.parts import LogitScaling, find_logit_scaling
from draftsmith.inference.targets.probing.probe_tree import (
    ProbeTree,
    RecordingCache,
    check_branches,
    check_finite,
)
from draftsmith.inference.targets.recurrent.replayable_layers import Recurrence, ReplayableLayers
from draftsmith.inference.targets.refusals import (
    MODEL_ERRORS,
    WrongNumbersError,
    draw_ids,
    is_single,
    refusing,
    relative_error,
    try_tokens,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capabilities:
    """What a model shows when it runs.

    Attributes:
        layer_specs: shapes of each layer's keys and values; None for layers without attention.
        scale_logits: from the LM head's output to logits; None if the model does something else.
        vocab_size: width of the logits.
        state_size: width of the last hidden state; None for encoder-decoder models.
        takes_packed_masks: whether it hands packed masks to its layers, and their attention reads them.
        takes_inference_mode: whether it runs under torch.inference_mode. Some quantised weights do not.
        first_layers: the model's first layers as models of their own, by number of layers; filled on demand.
        is_known_invariant: not empty once the model has passed the check of batch-invariant mode.
        obstacles: why that mode is not its default; told: not empty once the log has said so.
        recurrence: its recurrent layers; None if it has none.
        proven_media: sets of arguments of images, video or audio after which its text was proven (`prove_media`).
    """

    layer_specs: tuple[LayerSpec | None, ...]
    scale_logits: LogitScaling | None
    vocab_size: int
    state_size: int | None
    takes_inference_mode: bool
    takes_packed_masks: bool = False
    first_layers: dict[int, nn.Module] = field(default_factory=dict, compare=False)
    is_known_invariant: list[bool] = field(default_factory=list, compare=False)
    obstacles: list[str] = field(default_factory=list, compare=False)
    told: list[bool] = field(default_factory=list, compare=False)
    recurrence: Recurrence | None = None
    proven_media: set[frozenset[str]] = field(default_factory=set, compare=False)

    def of_a_twin(self) -> Capabilities:
        """Those of a model with the same weights whose layers compute in another way."""
        return replace(self, first_layers={}, is_known_invariant=[], obstacles=[])


def probe_model(
    model: Any, text_config: Any, masks: TreeMasks, device: torch.device, mixers: ReplayableLayers | None = None
) -> Capabilities:
    """Examines the model with four tokens.

    Args:
        mixers: of a recurrent model; `model` is their copy then.
    """
    return try_tokens(
        model, (1, 4, 7), lambda first: _examine_with(draw_ids(model, first, device), model, text_config, masks, mixers)
    )


@torch.no_grad()
def _examine_with(
    token_ids: Tensor, model: Any, text_config: Any, masks: TreeMasks, mixers: ReplayableLayers | None
) -> Capabilities:
    """Learns cache shapes and the way to logits; checks that the model follows masks and position ids."""
    name, tree = type(model).__name__, ProbeTree.of_tokens(token_ids, masks)
    cache = _open_cache(name, tree, mixers)
    with refusing(f"{name} does not run with a 4-D mask, position ids and a cache"):
        output = model.base_model(
            **ForwardNames(model.base_model).name(token_ids, tree.masks, tree.positions, cache),
            use_cache=True,
            output_hidden_states=request_states([0]),
            return_dict=True,
        )
    if getattr(output, "last_hidden_state", None) is None:
        raise ValueError(f"{name} does not hand out its last hidden states: a later release of transformers may")
    layer_types = getattr(text_config, "layer_types", None) or [*masks.windows] * text_config.num_hidden_layers
    specs = cache.list_specs(layer_types, masks.windows)
    num_states = len(output.hidden_states or ())
    if num_states != len(specs) + 1:
        raise ValueError(f"{name} reports {num_states} hidden states where {len(specs) + 1} are expected")
    plain = {"input_ids": token_ids[:, :2], "use_cache": False, "return_dict": True}
    plain_hidden = model.base_model(**plain).last_hidden_state
    other_ids = torch.cat([token_ids[:, :2], token_ids[:, 2:3].expand(-1, 2)], dim=1)
    longer, other = (
        model.base_model(**plain | {"input_ids": ids}).last_hidden_state[0] for ids in (token_ids, other_ids)
    )
    check_finite(model, "hidden states", [plain_hidden, longer, other], output.last_hidden_state)
    _check_window(model, token_ids, masks)
    noise = _measure_noise(model, plain_hidden[0], longer[:2], other[:2])
    check_branches(model, cache, output.last_hidden_state[0], plain_hidden[0], noise)
    logits = model(**plain).logits
    check_finite(model, "logits", [logits.masked_fill(logits == -torch.inf, 0.0)])  # some models forbid ids with -inf
    last = narrow(plain_hidden, model.dtype)
    scale_logits = find_logit_scaling(text_config, model.get_output_embeddings(), last, logits)
    is_fast = _takes_inference_mode(lambda: model(**plain))
    takes_packed = _takes_packed_masks(model, text_config, tree, masks, output.last_hidden_state, mixers)
    return Capabilities(
        *(specs, scale_logits, logits.shape[-1], plain_hidden.shape[-1], is_fast, takes_packed),
        recurrence=None if mixers is None else mixers.recurrence,
    )


def _open_cache(name: str, tree: ProbeTree, mixers: ReplayableLayers | None) -> RecordingCache:
    """An empty cache for a pass over the tree."""
    if mixers is None:
        return RecordingCache(name)
    states = mixers.new_states(1)
    mixers.plan_drafting(states, tree.parents)
    return RecordingCache(name, states)


@torch.no_grad()
def probe_encoder_decoder(model: Any, placed: PlacedDecoder, masks: TreeMasks, device: torch.device) -> Capabilities:
    """`probe_model` for an encoder-decoder model: the same tree, for a source of three tokens. It compares logits."""
    name, token_ids = type(model).__name__, draw_ids(model, 1, device)
    tree, cache = ProbeTree.of_tokens(token_ids, masks), RecordingCache(name)
    with refusing(f"{name} does not run as an encoder of token ids and a decoder with a 4-D mask and a cache"):
        encoded = model.get_encoder()(input_ids=token_ids[:, :3], return_dict=True)
        source = Source(token_ids[:, :3], torch.ones_like(token_ids[:, :3]).bool(), encoded.last_hidden_state)
        memory = SourceMemory(source)
        tree_logits = placed.run(memory, cache, token_ids, tree.positions, tree.key_positions, tree.masks)
        plain = {"encoder_outputs": encoded, "decoder_input_ids": token_ids[:, :2], "use_cache": False}
        logits = model(**plain, return_dict=True).logits
    check_finite(model, "encoder's last states", [encoded.last_hidden_state])
    check_finite(model, "logits", [logits], tree_logits)
    specs = cache.list_specs(["full_attention"] * (1 + max(cache.specs, default=0)), {"full_attention": None})
    check_branches(model, cache, tree_logits[0], logits[0], noise=0.0)
    return Capabilities(specs, None, logits.shape[-1], None, _takes_inference_mode(lambda: model(**plain)))


def _takes_packed_masks(
    model: Any, text_config: Any, tree: ProbeTree, masks: TreeMasks, states: Tensor, mixers: ReplayableLayers | None
) -> bool:
    """Whether the tree gets the same states [1, 4, D] under packed masks. If the Triton kernels run here, they read
    them."""
    if not masks.windows or not has_attention_interface(model) or find_attention(model) != STOCK:
        return False
    cache = _open_cache(type(model).__name__, tree, mixers)
    try:
        with grouped_attention(text_config):
            found = model.base_model(
                **ForwardNames(model.base_model).name(tree.token_ids, tree.pack_masks(masks), tree.positions, cache),
                use_cache=True,
                return_dict=True,
            ).last_hidden_state
        error = relative_error(found, states)
    except MODEL_ERRORS as failure:
        logger.info("%s does not run under packed masks: %s", type(model).__name__, failure)
        error = float("inf")
    is_same = error <= (1e-3 if is_single(states, model) else 0.1)
    if not is_same and can_use_kernel(states.device):
        logger.warning(
            "attention in Triton is not used: it does not run here, or changes the states of %s by %.2g. Trees are "
            "verified by torch's sdpa",
            type(model).__name__,
            error,
        )
    return is_same


def _takes_inference_mode(run: Callable[[], Any]) -> bool:
    try:
        with torch.inference_mode():
            run()
    except RuntimeError as error:
        if "inference" not in str(error).lower():
            raise
        return False
    return True


def _check_window(model: Any, token_ids: Tensor, masks: TreeMasks) -> None:
    """Checks that the model applies the sliding window of its config, with a copy whose window is two tokens.

    The copy must agree with the model under masks whose positions are half a window apart.
    """
    window = max((size for size in masks.windows.values() if size is not None), default=0)
    if window < 2:
        return
    decoder = next(part for part in (model.get_decoder(), model.base_model) if isinstance(part, PreTrainedModel))
    narrow: Any = copy.copy(decoder)  # shares the layers; the decoder's own stays as it is
    narrow.__dict__.pop("forward", None)  # accelerate's, which would run the decoder itself
    narrow.config = copy.deepcopy(decoder.config)
    narrow.config.sliding_window = 2
    positions = torch.arange(4, device=token_ids.device)[None]
    seen = masks.from_allowed(positions.new_ones(1, 4, 4).tril().bool(), *[positions * -(-window // 2)] * 2)
    call = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, "return_dict": True}
    wanted, masked, unbounded = (
        module(**call | own).last_hidden_state[0, 2:].float()
        for module, own in ((narrow, {}), (decoder, {"attention_mask": seen}), (decoder, {}))
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
    rounding = 1e-3 if is_single(hidden, model) else 0.03
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
