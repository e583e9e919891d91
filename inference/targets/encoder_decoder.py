"""Encoder-decoder targets (T5, BART and their kind): what the decoder reads of its source, and where its tokens stand.

The speculative decoding of Leviathan et al. (arXiv 2211.17192) was measured on T5. A source is encoded once; the
decoder's own tokens then go through the same cache, trees and acceptance as those of a decoder-only model.

Such models take no position ids. They count slots of the cache, to number learned positions or to measure the distances
that T5's position bias depends on. Slots are positions only while rows of equal length decode one token at a time, so
the decoder is run as a copy that shares every weight and submodule but the few that count: those read true positions.

Legend: B batch, N tokens of one pass, S cache slots in view, E source tokens, D hidden, H heads, V target vocabulary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from inference.cache.source import SourceMemory
from inference.cache.tree_cache import TreeCache


class _Places(threading.local):
    """Where the tokens of the pass that this thread runs stand: queries [B, N] and keys [B, S], both positions."""

    queries: Tensor | None = None
    keys: Tensor | None = None


class _PlacedCache(EncoderDecoderCache):
    """What the placed decoder is given for a pass. Nothing counts from its length any more, and the true one, which
    changes at every step, would make a compiled graph of every step."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class PlacedDecoder:
    """An encoder-decoder model whose decoder is told the positions of its tokens.

    Nothing of `model` is changed, and both may run at once, in several threads. Modules of it that are replaced later,
    outside of its attention layers, are not seen.

    Args:
        model: of transformers, for conditional generation.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._places = _Places()
        decoder = model.get_decoder()
        placed_decoder = _replace(decoder, self._place)
        self._placed: Any = _replace(model, lambda module: placed_decoder if module is decoder else None)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "decoder_position_ids" in accepted

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew, from the copied model."""
        return type(self), (self.model,)

    def run(
        self, source: SourceMemory, cache: Cache, token_ids: Tensor, positions: Tensor, keys: Tensor, masks: Any
    ) -> Tensor:
        """The model's logits [B, N, V] of tokens at `positions` [B, N]; slots in view stand at `keys` [B, S].

        Args:
            cache: for the self-attention.
            token_ids: [B, N] long.
            masks: additive, [B, 1, N, S].
        """
        self._places.queries, self._places.keys = positions, keys
        extra = {"decoder_position_ids": positions} if self._takes_positions else {}
        try:
            output = self._placed(
                encoder_outputs=BaseModelOutput(last_hidden_state=source.states),
                attention_mask=source.mask,
                decoder_input_ids=token_ids,
                decoder_attention_mask=masks,
                past_key_values=_PlacedCache(cache, source.cross),
                use_cache=True,
                return_dict=True,
                **extra,
            )
        finally:
            self._places.queries = self._places.keys = None
        source.leave_open()
        logits: Tensor = output.logits
        return logits.to(token_ids.device)

    def run_opened(
        self, cache: TreeCache, token_ids: Tensor, positions: Tensor, tree_positions: Tensor, masks: Any
    ) -> Tensor:
        """`run` for a cache that has a source, and whose slots are open.

        Args:
            tree_positions: [B, M], of the M slots of the tree.

        Raises:
            ValueError: the cache has no source.
        """
        if cache.source is None:
            raise ValueError("an encoder-decoder target has no source to read: call target.read_source(cache, source)")
        slots_seen, places = cache.slots_seen(None)
        keys = slots_seen.expand(len(positions), -1).scatter(1, places, tree_positions.expand_as(places))
        return self.run(cache.source, cache, token_ids, positions, keys, masks)

    def _place(self, module: nn.Module) -> nn.Module | None:
        """A copy that reads true positions, if the module is of a kind that counts slots."""
        if getattr(module, "has_relative_attention_bias", False) and hasattr(module, "compute_bias"):
            return _copy_module(module, compute_bias=functools.partial(_bias_by_distance, module, self._places))
        if isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters:
            return _copy_module(module, forward=functools.partial(_embed_positions, module.forward, self._places))
        return None


def _bias_by_distance(
    attention: Any, places: _Places, query_length: int, key_length: int, device: Any = None, **_: Any
) -> Tensor:
    """In the place of T5's `compute_bias`: the bias [B, H, N, S] by the distances between positions.

    Worked example, a tree of a root at position 5 and two children at 6, behind 5 committed tokens:

        slots      0 1 2 3 4 5 6 7
        positions  0 1 2 3 4 5 6 6      the second child, in slot 7, is 1 from the root and 0 from itself
    """
    assert places.queries is not None
    assert places.keys is not None
    # What the module itself gives for one query behind everything in view, nearest key first: [S, H].
    table = attention.compute_bias(1, key_length, device=device, past_seen_tokens=key_length - 1)[0, :, 0].flip(-1).T
    distances = (places.queries[:, :, None] - places.keys[:, None, :]).to(table.device)
    # Negative ones are to keys that no query may see.
    return nn.functional.embedding(distances.clamp(0, key_length - 1), table).permute(0, 3, 1, 2)


def _embed_positions(forward: Callable[..., Tensor], places: _Places, *args: Any, **kwargs: Any) -> Tensor:
    """In the place of the forward of a table of positions (BART, Marian): the rows [B, N, D] of the true ones."""
    assert places.queries is not None
    # Some put a dimension of 1 in front.
    return forward(*args, **kwargs | {"position_ids": places.queries}).reshape(*places.queries.shape, -1)


def _replace(module: nn.Module, find: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The module, if `find` replaces nothing within it; else a copy that differs in nothing but what is replaced."""
    found = find(module)
    if found is not None:
        return found
    children = {name: _replace(child, find) for name, child in module.named_children()}
    changed = {name: child for name, child in children.items() if child is not module._modules[name]}
    return _copy_module(module, _modules={**module._modules, **changed}) if changed else module


def _copy_module(module: nn.Module, **attributes: Any) -> nn.Module:
    """A copy that shares weights and submodules, with some attributes of its own."""
    copied: Any = copy.copy(module)
    inner = module.__dict__.get("_old_forward")
    if inner is not None:  # accelerate's hooks wrap a forward that is bound to the module itself
        copied.__dict__["_old_forward"] = types.MethodType(inner.__func__, copied)
        copied.__dict__["forward"] = functools.partial(copied.__dict__["forward"].func, copied)
    copied.__dict__.update(attributes)
    return copied  # type: ignore[no-any-return]
