"""Targets whose layers repeat: groups of layers with the same weights, one after another (SPEED, arXiv 2310.12072).

Legend: G groups, K layers of a group, B rows, T tokens of one pass, D hidden, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.cache.kv_cache import KVCache, Span
from draftsmith.inference.targets.forward_names import find_cache_name
from draftsmith.inference.targets.model_config import refuse_training, unwrap_model
from draftsmith.inference.targets.parts import find_final_norm, take_first_layers
from draftsmith.inference.targets.refusals import draw_ids, is_single, relative_error
from draftsmith.inference.targets.target import Target


class LayerGroups:
    """The first of G groups of layers that have the same weights, to run in the place of each.

    Attributes:
        num_groups: G.
        group_size: K.

    Raises:
        ValueError: the target's layers do not repeat, or its groups do more than run the first one again.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        target.refuse_recurrent("tokens in flight cannot be dropped", "pipelined decoding needs attention only")
        causal_lm = unwrap_model(target.model)
        name, layers = type(causal_lm).__name__, find_layers(causal_lm)
        self.group_size = 0 if layers is None else find_group_size(layers)
        if layers is None or self.group_size == len(layers) or find_final_norm(causal_lm) is None:
            raise ValueError(
                f"the layers of this {name} do not repeat, so tokens of several positions cannot share a pass over "
                "the weights: pipelined decoding needs a model that was trained with tied layers "
                "(draftsmith.inference.targets.layer_groups.tie_layers)"
            )
        self.num_groups = len(layers) // self.group_size
        self.group: Any = take_first_layers(causal_lm, self.group_size)
        self._cache_name = find_cache_name(self.group)
        self._check(causal_lm, name)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Keys and values of the K layers; a row belongs to one group of one text."""
        specs = self.target.capabilities.layer_specs[: self.group_size]
        return KVCache(specs, num_rows, capacity, device=self.target.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B, T] long -> [B, T, D], what the first group reads."""
        embedded: Tensor = self.target.embed_tokens(token_ids)
        return embedded

    def run(self, hidden: Tensor, cache: KVCache, longest: int) -> Tensor:
        """One pass over the group's weights: [B, T, D], what the next group reads. Commits nothing.

        Row b's tokens stand at positions lengths[b], lengths[b] + 1, ...; each sees the row's tokens before it.

        Args:
            longest: no row holds more tokens.
        """
        cache.open_slots(hidden.shape[1], Span(0, longest))
        positions = cache.lengths[:, None] + cache.first_slots(hidden.shape[1])
        if self.target.max_length is not None:
            positions = positions.clamp(max=self.target.max_length - 1)
        masks = self.target.masks.of_prompts(cache, positions)
        return self._run(hidden, positions, masks, cache)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states that leave a group [..., D]."""
        return self.target.compute_logits(self.target.apply_final_norm(hidden))

    def _run(self, hidden: Tensor, positions: Tensor | None, masks: Any, cache: KVCache | None) -> Tensor:
        refuse_training(self.target.model)
        with self.target.backbone.attention():
            output = self.group(
                inputs_embeds=hidden,
                attention_mask=masks,
                position_ids=positions,
                **{self._cache_name: cache},
                use_cache=cache is not None,
                return_dict=True,
            )
        found: Tensor = output.last_hidden_state
        return found

    @torch.no_grad()
    def _check(self, causal_lm: Any, name: str) -> None:
        token_ids = draw_ids(causal_lm, 1, self.target.device)
        states = causal_lm.get_decoder()(
            input_ids=token_ids, use_cache=False, output_hidden_states=True, return_dict=True
        ).hidden_states
        hidden = self.embed(token_ids)
        for group in range(1, self.num_groups + 1):
            hidden = self._run(hidden, None, None, None)
            wanted = states[group * self.group_size]
            found = self.target.apply_final_norm(hidden) if group == self.num_groups else hidden
            difference = relative_error(found, wanted)
            if not difference <= (1e-4 if is_single(wanted, causal_lm) else 1e-2):
                raise ValueError(
                    f"group {group} of the layers of {name} has the weights of the first, and gives other states "
                    f"(they differ by {difference:.2g}): its layers depend on their place, so they cannot be pipelined"
                )


def find_layers(causal_lm: Any) -> nn.ModuleList | None:
    """The decoder's layers, or None."""
    total = causal_lm.config.get_text_config().num_hidden_layers
    parts = causal_lm.get_decoder().children()
    return next((part for part in parts if isinstance(part, nn.ModuleList) and len(part) == total), None)


def find_group_size(layers: nn.ModuleList) -> int:
    """K, the smallest number of layers after which the weights repeat; the number of all layers where none do."""
    weights = [dict(layer.state_dict(keep_vars=True)) for layer in layers]
    total = len(weights)
    for size in range(1, total):
        if total % size == 0 and all(_is_same(weights[place], weights[place % size]) for place in range(size, total)):
            return size
    return total


def _is_same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return weights.keys() == others.keys() and all(
        weight is others[name] or (weight.shape == others[name].shape and torch.equal(weight, others[name]))
        for name, weight in weights.items()
    )


def tie_layers(model: nn.Module, group_size: int) -> None:
    """Makes the layers of a causal LM repeat: layer i gets the parameters of layer i % `group_size`, in place.

    The parameters are shared, so training keeps them equal. `save_pretrained` writes every layer, and a model that was
    loaded again has equal layers, which is all that pipelined decoding asks for.

    Raises:
        ValueError: the number of layers is no multiple of `group_size`, or layers differ in shape.
    """
    causal_lm = unwrap_model(model)
    layers = find_layers(causal_lm)
    if layers is None or not 0 < group_size < len(layers) or len(layers) % group_size:
        raise ValueError(
            f"group_size is {group_size}, and {type(causal_lm).__name__} has "
            f"{'no list of layers' if layers is None else f'{len(layers)} layers'}: give a divisor of their number"
        )
    for place in range(group_size, len(layers)):
        first, later = layers[place % group_size], layers[place]
        shapes = [{name: weight.shape for name, weight in layer.named_parameters()} for layer in (first, later)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"layers {place % group_size} and {place} differ in shape, so they cannot share weights")
        for name, weight in first.named_parameters():
            parent, _, own = name.rpartition(".")
            setattr(later.get_submodule(parent), own, weight)
