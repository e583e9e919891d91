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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

SOURCE_MULTIPLE = 64  # sources are padded to a multiple of so many tokens, so that few shapes occur


@dataclass(frozen=True)
class Source:
    """The encoded source texts of a batch.

    Attributes:
        token_ids: [B, E] long, as given, for drafters that have an encoder of their own.
        mask: [B, E] bool, the real tokens, on whichever side the padding is.
        states: [B, E, D] what the encoder made of them.
    """

    token_ids: Tensor
    mask: Tensor
    states: Tensor

    @classmethod
    def of_call(cls, token_ids: Tensor, mask: Tensor | None, states: Tensor) -> Source:
        """From what transformers' `generate` has prepared: mask [rows, E] and states [rows, E, D] of every row that is
        decoded, and the B <= rows texts as they were given; `num_return_sequences` of each stand together."""
        token_ids = token_ids.to(states.device).repeat_interleave(states.shape[0] // token_ids.shape[0], dim=0)
        real = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.to(states.device).bool()
        return cls(token_ids, real, states)


class SourceMemory:
    """What the decoder reads of a batch's sources, for the rows of one cache; belongs to `TreeCache.source`.

    Attributes:
        states: [B, E, D], E a multiple of `SOURCE_MULTIPLE`.
        mask: [B, 1, 1, E] additive, in the dtype of the states.
        cross: the cross-attention's keys and values. The first pass writes them, later ones read.
    """

    def __init__(self, source: Source) -> None:
        padding = -source.states.shape[1] % SOURCE_MULTIPLE
        self.states = nn.functional.pad(source.states, (0, 0, 0, padding))
        real = nn.functional.pad(source.mask, (0, padding))
        mask = torch.zeros(real.shape, dtype=self.states.dtype, device=self.states.device)
        self.mask = mask.masked_fill_(~real, torch.finfo(mask.dtype).min)[:, None, None]
        self.cross = DynamicCache()
        self._is_open = False

    def leave_open(self) -> None:
        """Once the keys and values are written: tells torch.compile that the number of source tokens will change."""
        if self._is_open or torch.compiler.is_compiling():
            return
        self._is_open = True
        torch._dynamo.maybe_mark_dynamic(self.states, 1)
        torch._dynamo.maybe_mark_dynamic(self.mask, 3)
        layers: Sequence[Any] = self.cross.layers
        for layer in layers:
            torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
            torch._dynamo.maybe_mark_dynamic(layer.values, 2)

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows [B'] long, in this order."""
        self.states, self.mask = self.states.index_select(0, rows), self.mask.index_select(0, rows)
        self.cross.batch_select_indices(rows)  # type: ignore[no-untyped-call, unused-ignore]
        self._is_open = False  # these are other tensors

    def copy_of_rows(self, rows: Tensor) -> SourceMemory:
        """The rows [B'] long, which may come several times, in a memory of their own."""
        chosen = copy.copy(self)
        chosen.cross = copy.deepcopy(self.cross)
        chosen.select_rows(rows)
        return chosen


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
        return logits

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
    distances = places.queries[:, :, None] - places.keys[:, None, :]
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
