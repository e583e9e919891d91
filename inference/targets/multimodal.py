"""Prompts with images, video or audio: the model's own forward reads them, and text follows as after any prompt.

The model embeds its media, gives every token its position (several axes in some models) and masks the prompt in its own
way. All of that happens once, in a pass over the whole prompt that is the one of transformers' `generate`. Its keys and
values go into our cache. The text after the prompt counts on from the position of the prompt's last token, on every
axis, as in transformers: each row keeps the offset from slots to positions (`KVCache.offsets`).

Legend: B batch, L prompt length with padding, T longest prompt, A axes of positions, F feature width, V target
vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from draftsmith.inference.cache.kv_cache import EMPTY, KVCache
from draftsmith.inference.targets.backbone import TargetOutput
from draftsmith.inference.targets.forward_names import CACHE_NAMES, find_cache_name
from draftsmith.inference.targets.model_config import refuse_training, request_states
from draftsmith.inference.targets.target import Target

# Arguments of forward that every language model has. Any other argument belongs to media.
_TEXT_ARGUMENTS = {
    *("self", "args", "kwargs", "input_ids", "attention_mask", "position_ids", "inputs_embeds", *CACHE_NAMES),
    *("labels", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "logits_to_keep"),
    "cache_position",
}


@dataclass(frozen=True)
class Media:
    """Prompts with media, as the model's forward reads them.

    Attributes:
        arguments: of the forward; its prompts are padded on the left.
        counts: [B] long, tokens of each row without padding.
        longest: the largest of them.
    """

    arguments: dict[str, Any]
    counts: Tensor
    longest: int


def media_names(target: Target) -> Set[str]:
    """The arguments of the model's forward that belong to media; none for models that only read text."""
    causal_lm = target.backbone.causal_lm
    if target.is_encoder_decoder or causal_lm.config.get_text_config() is causal_lm.config:
        return frozenset()
    return inspect.signature(type(causal_lm).forward).parameters.keys() - _TEXT_ARGUMENTS


def take_media(target: Target, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the model's forward takes of a processor's inputs for images, on the target's device and in its dtype."""
    dtypes = {name: target.dtype if value.is_floating_point() else value.dtype for name, value in inputs.items()}
    return {name: inputs[name].to(target.device, dtypes[name]) for name in inputs.keys() & media_names(target)}


def prepare_media(
    target: Target, input_ids: Tensor, counts: Sequence[int], names: Set[str], model_kwargs: Mapping[str, Any]
) -> Media | None:
    """The prompts as the model's forward reads them; None if they have no media.

    Args:
        input_ids: [B, L] long, padded on the left.
        counts: tokens of each row without padding.
        names: the media among the arguments of the call.
        model_kwargs: as transformers' `generate` hands them to a decoding method, with positions and the mask.

    Raises:
        ValueError: this target does not read media exactly.
    """
    if all(_is_text(model_kwargs.get(name), input_ids) for name in names):
        return None
    causal_lm = target.backbone.causal_lm
    if min(counts) < input_ids.shape[1]:
        target.refuse_recurrent(f"rows with {', '.join(sorted(names))} cannot have padding", "decode them one by one")
    if target.is_batch_invariant:
        raise ValueError(
            f"{', '.join(sorted(names))} cannot be read with batch_invariant=True: the model's own pass over them "
            "depends on the other rows; leave batch_invariant out"
        )
    others = {name: value for name, value in model_kwargs.items() if name not in CACHE_NAMES}
    arguments = causal_lm.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **others)
    return Media(arguments, torch.tensor(counts, device=target.device), max(counts))


def _is_text(value: Any, input_ids: Tensor) -> bool:
    """Whether an argument only says that every token is text."""
    is_types = isinstance(value, Tensor) and value.shape == input_ids.shape and not value.is_floating_point()
    return is_types and not bool(value.any())


@torch.no_grad()
def read_media(target: Target, cache: KVCache, media: Media, *, feature_layers: Sequence[int] = ()) -> TargetOutput:
    """Reads prompts with media into an empty cache and commits them, in one pass of the model.

    Returns:
        logits [B, 1, V] of each row's last token, and features [B, T, F], padded on the right.
    """
    refuse_training(target.model)
    longest, counts = media.longest, media.counts
    steps = torch.arange(longest, device=counts.device)
    slots = (steps - (longest - counts[:, None])) % longest  # a row's padding comes after its tokens
    cache.open_slots(longest, EMPTY)
    target.plan_reading(cache, counts)
    causal_lm = target.backbone.causal_lm
    own = {
        find_cache_name(causal_lm): _PromptCache(cache, slots, counts, num_given=media.arguments["input_ids"].shape[1]),
        "use_cache": True,
        "output_hidden_states": request_states(feature_layers),
        "return_dict": True,
    }
    output = causal_lm(**media.arguments | own)
    positions: Tensor = media.arguments["position_ids"]
    offsets = positions[..., -1:] - (counts[:, None] - 1)
    cache.offsets = offsets if bool(offsets.any()) else None
    cache.advance(counts)
    features = None
    if feature_layers:
        states = [output.hidden_states[layer].to(target.device) for layer in feature_layers]
        joined = torch.cat(states, dim=-1)[:, -longest:]
        features = torch.empty_like(joined)
        features[torch.arange(len(slots), device=slots.device)[:, None], slots] = joined
    return TargetOutput(output.logits[:, -1:].to(target.device), features)


class _PromptCache(Cache):
    """Copies the keys and values of the prompts into a `KVCache`; the layers get back what they gave.

    Args:
        slots: [B, T] long, of each of the last T tokens.
        counts: as in `Media`.
        num_given: L.
    """

    def __init__(self, cache: KVCache, slots: Tensor, counts: Tensor, *, num_given: int) -> None:
        super().__init__(layers=[])
        self._cache, self._slots, self._num_given = cache, slots, num_given
        self.states = cache.states  # recurrent layers look here
        self._is_padding = (slots >= counts[:, None])[:, None, :, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != self._num_given:
            raise ValueError(
                f"the model reads {key_states.shape[2]} tokens where the prompt has {self._num_given}: let the "
                "processor write one placeholder token for each token of an image or a sound"
            )
        size, is_padding = self._slots.shape[1], self._is_padding.to(key_states.device)
        # Zeroes where padding was: what it computes may be NaN, which would spoil later passes.
        keys, values = (states[:, :, -size:].masked_fill(is_padding, 0) for states in (key_states, value_states))
        self._cache.write(layer_idx, self._slots, keys, values)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0
