"""Examine a transformers model once: can it verify a tree, and what does it write into a cache?

Used by `Target` alone. Every refusal is a ValueError that says what the model does and why that cannot be rolled back
or verified as a tree.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from inference.attention import GROUPED, STOCK
from inference.encoder_decoder import PlacedDecoder, Source, SourceMemory
from inference.kv_cache import LayerSpec, PlaneSpec

logger = logging.getLogger(__name__)

# Layer types whose whole past stays readable in the cache, so that a step can be forgotten.
_ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
_ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

# Empty slots between the probe's first token and the others: more than any window that a model applies on its own.
_GAP = 4200
# As models fail when they are called in a way they do not know; running out of memory is another matter.
_MODEL_ERRORS = (TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, RuntimeError)

MakeMasks = Callable[[Tensor, Tensor, Tensor], Any]
ScaleLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LengthLimit:
    """max_length: number of positions, or None; reason: where the number comes from, for error messages."""

    max_length: int | None
    reason: str


@dataclass(frozen=True)
class Findings:
    """layer_specs: what each layer caches; scale_logits: from LM head output to logits, None if not reproducible."""

    layer_specs: tuple[LayerSpec, ...]
    scale_logits: ScaleLogits | None
    vocab_size: int


def unwrap_model(model: nn.Module) -> Any:
    """The transformers model inside `model` (a PEFT model keeps its adapters in place), after the checks by config."""
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(causal_lm, PreTrainedModel):
        raise ValueError(f"a target is a transformers causal LM (AutoModelForCausalLM), got {type(model).__name__}")
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        raise ValueError("a PEFT model with virtual prompt tokens shifts every position: merge it or use LoRA")
    name, config = type(causal_lm).__name__, causal_lm.config
    if causal_lm.get_output_embeddings() is None:
        loader = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
        raise ValueError(f"{name} has no LM head: load it with {loader}")
    text_config = config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    other = ", ".join(sorted(layer_types - set(_ATTENTION_LAYER_TYPES)))
    if other or getattr(causal_lm, "_is_stateful", False):
        raise ValueError(
            f"{name} has layers of a kind that cannot be rolled back after a rejected draft, or that masks by rules of "
            f"its own ({other or 'a recurrent state'}): a target has {' and '.join(_ATTENTION_LAYER_TYPES)} layers only"
        )
    implementation = text_config._attn_implementation
    if implementation == GROUPED:  # another thread is in the middle of a pass
        implementation = STOCK
    if implementation not in _ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {implementation!r} cannot take a tree mask: load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
    if any(
        "alibi" in attribute and getattr(causal_lm.base_model, attribute) for attribute in dir(causal_lm.base_model)
    ):
        raise ValueError(
            f"{name} has ALiBi, which measures distances in slots of the cache instead of positions, so a node of a "
            f"tree would be scored by where its siblings lie: use a model with RoPE or learned positions"
        )
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False):
        raise ValueError(f"{name} attends in both directions (use_bidirectional_attention): it is no causal LM")
    if model.training:
        raise ValueError(f"{name} is in training mode, where dropout makes every pass different: call model.eval()")
    return causal_lm


def find_device(module: Any) -> torch.device:
    """Where a module's inputs belong: at its weight, or where accelerate brings a weight that it has put elsewhere."""
    weight: Tensor = module.weight
    if weight.device.type != "meta":
        return weight.device
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution_device is None:
        raise ValueError("the model's weights are on the meta device: load them, for example with from_pretrained")
    return torch.device(execution_device)


def find_layer_windows(text_config: Any) -> dict[str, int | None]:
    """Sliding window in positions, or None for full attention, per distinct layer type."""
    window = getattr(text_config, "sliding_window", None)
    if getattr(text_config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(text_config, "layer_types", None)
    if not layer_types:  # every layer the same (llama; mistral, phi3 with a window)
        return {"full_attention": None} if window is None else {"sliding_attention": int(window)}
    windows: dict[str, int | None] = {}
    for layer_type in sorted(set(layer_types)):
        if layer_type == "sliding_attention" and window is None:
            raise ValueError(f"the config has sliding_attention layers but no sliding_window ({window!r})")
        windows[layer_type] = int(window) if layer_type == "sliding_attention" and window is not None else None
    return windows


def _list_windows(text_config: Any) -> list[int | None]:
    """The window of every layer."""
    windows = find_layer_windows(text_config)
    layer_types = getattr(text_config, "layer_types", None) or list(windows) * text_config.num_hidden_layers
    return [windows[layer_type] for layer_type in layer_types]


def find_length_limit(text_config: Any) -> LengthLimit:
    """Positions the model is exact for: its position limit, or where its RoPE starts to depend on the whole pass."""
    limit = getattr(text_config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    found = LengthLimit(limit, f"max_position_embeddings={limit}")
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    settings = [value for value in rope.values() if isinstance(value, dict)] or [rope]  # one, or one per layer type
    for setting in settings:
        rope_type = setting.get("rope_type", setting.get("type", "default"))
        if rope_type is None or ("dynamic" not in rope_type and rope_type != "longrope"):
            continue
        switch = limit
        if rope_type == "longrope":
            switch = setting.get("original_max_position_embeddings") or limit
        if switch is not None and (found.max_length is None or switch <= found.max_length):
            found = LengthLimit(
                switch,
                f"RoPE of type {rope_type!r} rescales every position once a pass goes beyond {switch}, so tokens "
                f"verified together would differ from tokens decoded one by one",
            )
    return found


class _CannotRollBackError(ValueError):
    """Raised from inside a model's forward, when it asks the cache for another state than keys and values."""


class _WrongNumbersError(ValueError):
    """The model runs, but what it computes is not what a target must compute."""


class _RecordingCache(Cache):
    """Hands keys and values back, with empty slots behind the first token's, and remembers their shapes; refuses any
    other kind of state."""

    def __init__(self, name: str) -> None:
        super().__init__(layers=[])
        self.name = name
        self.specs: dict[int, LayerSpec] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = (
            PlaneSpec(rows.shape[1], rows.shape[3], rows.dtype, rows.device) for rows in (key_states, value_states)
        )
        self.specs[layer_idx] = LayerSpec(keys, values)
        return _insert_gap(key_states, 2), _insert_gap(value_states, 2)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _CannotRollBackError(
            f"{self.name} keeps a state besides keys and values (recurrent, convolution or index), which cannot be "
            f"rolled back after a rejected draft"
        )

    update_conv_state = update_recurrent_state = update_indexer = has_previous_state = _refuse
    get_conv_state = get_recurrent_state = _refuse

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return 4 + _GAP, 0


def _insert_gap(rows: Tensor, dim: int) -> Tensor:
    """Zeros (False) behind the first of the four tokens on this dimension."""
    first, others = rows.split([1, 3], dim)
    shape = [*rows.shape[:dim], _GAP, *rows.shape[dim + 1 :]]
    return torch.cat([first, rows.new_zeros(shape), others], dim)


def find_final_norm(causal_lm: Any) -> nn.Module | None:
    """The norm behind the last layer; None when the model has none of its own."""
    norms = [
        child
        for child in causal_lm.get_decoder().children()
        if "norm" in type(child).__name__.lower() and getattr(child, "weight", None) is not None
    ]
    return norms[-1] if norms else None


def take_first_layers(causal_lm: Any, num_layers: int) -> nn.Module:
    """The decoder cut off behind its first layers: the same modules, of which it merely holds fewer, and no final norm.

    Raises:
        ValueError: when the model has no such layers, or what comes out is not its hidden_states[num_layers].
    """
    name, decoder = type(causal_lm).__name__, causal_lm.get_decoder()
    total = causal_lm.config.get_text_config().num_hidden_layers
    if not 0 < num_layers < total:
        raise ValueError(f"asked for the first {num_layers} layers of {name}; allowed is 1 to {total - 1}")
    final_norm = find_final_norm(causal_lm)
    first: Any = copy.copy(decoder)
    first._modules = dict(decoder._modules)  # the decoder's own stays as it is
    first.__dict__.pop("forward", None)  # accelerate's, which would run the decoder itself
    for key, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            first._modules[key] = child[:num_layers]
        elif child is final_norm:
            first._modules[key] = nn.Identity()
    token_ids = _draw_ids(causal_lm, 1, find_device(causal_lm.get_input_embeddings()))
    try:
        with torch.no_grad():
            found = first(input_ids=token_ids, use_cache=False, return_dict=True).last_hidden_state
            states = decoder(input_ids=token_ids, use_cache=False, output_hidden_states=True, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    except _MODEL_ERRORS as error:
        raise ValueError(f"{name} does not run with its first {num_layers} layers alone: {error}") from error
    wanted = states.hidden_states[num_layers].to(found.device)
    difference = float((found - wanted).float().norm() / wanted.float().norm())
    if not difference <= (1e-4 if wanted.dtype in (torch.float32, torch.float64) else 1e-2):
        raise ValueError(
            f"{name} does not compute its first {num_layers} layers by themselves as within the whole model (they "
            f"differ by {difference:.2g})"
        )
    return first  # type: ignore[no-any-return]


def examine_model(model: Any, text_config: Any, make_masks: MakeMasks, device: torch.device) -> Findings:
    """`_examine_with` a few tokens; with others if that fails, since a router of experts may be at a near-tie."""
    for first in (1, 4):
        try:
            return _examine_with(_draw_ids(model, first, device), model, text_config, make_masks)
        except _WrongNumbersError as error:
            logger.info("%s: asking once more, with other tokens", error)
    return _examine_with(_draw_ids(model, 7, device), model, text_config, make_masks)


def _draw_ids(model: Any, first: int, device: torch.device) -> Tensor:
    """[1, 4] token ids: a root, a child, another child, and the first child's twin."""
    ids = torch.tensor([[first, first + 1, first + 2, first + 1]], device=device)
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    return ids % vocab_size


@torch.no_grad()  # not inference mode, in which some quantised weights do not run
def _examine_with(token_ids: Tensor, model: Any, text_config: Any, make_masks: MakeMasks) -> Findings:
    """A few forwards of four tokens: cache shapes, proof that masks and positions are honoured, the way to the logits.

    The tree is a root, a child, another child and the first child's twin. The twins must come out alike, which fails if
    the model ignores the mask (one would see its siblings) or the position ids (it would stand two further right), and
    like the same two tokens in a plain pass, which fails if it reads the mask in another way. The root lies thousands
    of empty slots before the others, so a model that applies windows or distances of its own to the slots fails too.
    """
    name = type(model).__name__
    num_layers, device = text_config.num_hidden_layers, token_ids.device
    positions = torch.tensor([[0, 1, 1, 1]], device=device)
    allowed = torch.eye(4, dtype=torch.bool, device=device)[None].clone()
    allowed[..., 0] = True
    cache = _RecordingCache(name)
    try:
        output = model.base_model(
            input_ids=token_ids,
            attention_mask=make_masks(_insert_gap(allowed, 2), positions, _insert_gap(positions, 1)),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=[0],
            return_dict=True,
        )
    except (_CannotRollBackError, torch.OutOfMemoryError):
        raise
    except _MODEL_ERRORS as error:
        raise ValueError(f"{name} does not run with a 4-D mask, position ids and a cache: {error}") from error
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
    longer_hidden = model.base_model(**plain | {"input_ids": token_ids}).last_hidden_state
    _check_window(model, text_config, token_ids, make_masks)
    noise = _measure_noise(name, plain_hidden[0], longer_hidden[0, :2])
    _check_branches(name, output.last_hidden_state[0], plain_hidden[0], noise)
    logits = model(**plain).logits
    scale_logits = _find_logit_scaling(text_config, model.get_output_embeddings(), plain_hidden, logits)
    windows = _list_windows(text_config)
    specs = tuple(replace(cache.specs[layer], window=windows[layer]) for layer in range(num_layers))
    return Findings(specs, scale_logits, logits.shape[-1])


@torch.inference_mode()
def examine_encoder_decoder(model: Any, placed: PlacedDecoder, make_masks: MakeMasks, device: torch.device) -> Findings:
    """`examine_model` for an encoder-decoder model: the same tree, behind a source of three tokens, by its logits."""
    name = type(model).__name__
    token_ids = torch.tensor([[1, 2, 3, 2]], device=device) % model.get_input_embeddings().weight.shape[0]
    positions = torch.tensor([[0, 1, 1, 1]], device=device)
    allowed = torch.eye(4, dtype=torch.bool, device=device)[None].clone()
    allowed[..., 0] = True
    cache = _RecordingCache(name)
    try:
        encoded = model.get_encoder()(input_ids=token_ids[:, :3], return_dict=True)
        source = Source(token_ids[:, :3], torch.ones_like(token_ids[:, :3]).bool(), encoded.last_hidden_state)
        key_positions = _insert_gap(positions, 1)
        masks = make_masks(_insert_gap(allowed, 2), positions, key_positions)
        tree_logits = placed.run(SourceMemory(source), cache, token_ids, positions, key_positions, masks)
        plain = {"encoder_outputs": encoded, "decoder_input_ids": token_ids[:, :2], "use_cache": False}
        logits = model(**plain, return_dict=True).logits
    except (_CannotRollBackError, torch.OutOfMemoryError):
        raise
    except _MODEL_ERRORS as error:
        raise ValueError(
            f"{name} does not run as an encoder of token ids and a decoder with a 4-D mask and a cache: {error}"
        ) from error
    if not cache.specs or set(cache.specs) != set(range(len(cache.specs))):
        raise ValueError(
            f"only the layers {sorted(cache.specs)} of the decoder of {name} write keys and values into the cache, so "
            f"it cannot be rolled back after a rejected draft"
        )
    _check_branches(name, tree_logits[0], logits[0], noise=0.0)
    return Findings(tuple(cache.specs[layer] for layer in range(len(cache.specs))), None, logits.shape[-1])


def _check_window(model: Any, text_config: Any, token_ids: Tensor, make_masks: MakeMasks) -> None:
    """Does the model apply the window that its config names? It is asked with a window of two tokens, in a copy.

    The masks of that window come from positions that lie half the true one apart.
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
    if error > effect / 2:
        raise _WrongNumbersError(
            f"{type(model).__name__} does not mask by its config's sliding_window={window} as other models do, so its "
            f"trees cannot be masked: a target without a window has sliding_window=None"
        )


def _measure_noise(name: str, hidden: Tensor, longer: Tensor) -> float:
    """By how much the states [2, D] of two tokens change, relatively, when a pass holds two more behind them."""
    noise = float((longer - hidden).float().norm() / hidden.float().norm())
    if not noise <= 0.1:
        raise _WrongNumbersError(
            f"the hidden states of {name} change by {noise:.2g} when tokens are added behind them: it is no causal LM"
        )
    if noise > (1e-3 if _is_single(hidden) else 0.03):
        logger.warning(
            "the hidden states of %s change by %.2g with the number of tokens in a pass, as they do when activations "
            "are quantised (LLM.int8): its texts can differ from plain decoding's more often than by rounding; where "
            "that matters, quantise the weights alone",
            name,
            noise,
        )
    return noise


def _check_branches(name: str, tree_hidden: Tensor, plain_hidden: Tensor, noise: float) -> None:
    """Rows 0, 1 and 3 of the tree pass [4, D] are rows 0, 1 and 1 of the plain pass [2, D]; see examine_model. Rows of
    hidden states, or of logits."""
    is_single = _is_single(plain_hidden)
    size = plain_hidden[1].float().norm()
    for row, wanted, tolerance in (
        (3, tree_hidden[1], 1e-4 if is_single else 1e-2),  # one pass, so all but equal
        (0, plain_hidden[0], 1e-3 if is_single else 0.1),
        (1, plain_hidden[1], 1e-3 if is_single else 0.1),
    ):
        difference = float((tree_hidden[row] - wanted).float().norm() / size)
        if not difference <= max(tolerance, 3 * noise):
            raise _WrongNumbersError(
                f"{name} does not compute a tree as separate continuations (twins differ by {difference:.2g}); "
                f"it reads 4-D masks or counts positions in a way of its own"
            )


def _is_single(values: Tensor) -> bool:
    return values.dtype in (torch.float32, torch.float64)


def _find_logit_scaling(config: Any, lm_head: Any, hidden: Tensor, logits: Tensor) -> ScaleLogits | None:
    """What turns the LM head's output for `hidden` [1, 2, D] into the model's `logits` [1, 2, V]; None if nothing does.

    The config's names are not enough: `logits_scaling` divides in Granite and multiplies in HyperCLOVA X.
    """
    try:
        raw: Tensor = lm_head(hidden).to(logits.device)
    except RuntimeError:  # another width: the model does more before its head
        return None
    cap = getattr(config, "final_logit_softcapping", None)
    factors = [1.0]
    for key in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        value = getattr(config, key, None)
        if isinstance(value, (int, float)) and value not in (0, 1):
            factors += [float(value), 1.0 / float(value)]
    for factor in factors:
        scale = _LogitScaling(factor, cap)
        if raw.shape == logits.shape and torch.allclose(scale(raw).float(), logits.float(), rtol=1e-3, atol=1e-3):
            return scale
    return None


@dataclass(frozen=True)
class _LogitScaling:
    """logits = cap * tanh(raw * factor / cap), in the steps and the dtype in which the models do it."""

    factor: float
    cap: float | None

    def __call__(self, raw: Tensor) -> Tensor:
        logits = raw if self.factor == 1.0 else raw * self.factor
        if self.cap is None:
            return logits
        return torch.tanh(logits / self.cap) * self.cap
