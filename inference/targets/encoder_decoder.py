"""Encoder-decoder targets (T5, BART): their decoder, run with the true positions of its tokens.

Leviathan et al. (arXiv 2211.17192) measured speculative decoding on T5. A source is encoded once. The decoder's tokens
then go through the same cache, trees and acceptance as those of a decoder-only model.

These models take no position ids. They count cache slots, either to number learned positions or to measure distances
for T5's position bias. Slots are positions only while rows of equal length decode one token at a time. So the decoder
runs as a copy that shares all weights and all submodules except the few that count slots; these read true positions.

Legend: B batch, N tokens of one pass, S cache slots in view, E source tokens, D hidden, H heads, V target vocabulary.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from draftsmith.inference.cache.source import SourceMemory
from draftsmith.inference.targets.copied_modules import copy_module, replace_modules
from draftsmith.inference.targets.forward_names import find_cache_name


class _Places(threading.local):
    """Positions in this thread's pass: of the queries [B, N] and of the keys [B, S]."""

    queries: Tensor | None = None
    keys: Tensor | None = None


class _PlacedCache(EncoderDecoderCache):
    """The cache that the placed decoder gets. It hides its length, which no module needs: with a length that changes at
    every step, torch.compile would build a graph for every step."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class PlacedDecoder:
    """An encoder-decoder model whose decoder is given the positions of its tokens.

    `model` is not changed, and both may run at once, in several threads. Replacing a module of `model` later may have
    no effect here.

    Args:
        model: a transformers model for conditional generation.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._places = _Places()
        decoder = model.get_decoder()
        placed_decoder = replace_modules(decoder, self._place)
        self._placed: Any = replace_modules(model, lambda module: placed_decoder if module is decoder else None)
        self._cache_name = find_cache_name(model)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "decoder_position_ids" in accepted

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying and unpickling construct a new object from the copied model."""
        return type(self), (self.model,)

    def run(
        self, source: SourceMemory, cache: Cache, token_ids: Tensor, positions: Tensor, keys: Tensor, masks: Any
    ) -> Tensor:
        """The model's logits [B, N, V].

        Args:
            cache: of the self-attention.
            token_ids: [B, N] long.
            positions: [B, N], of the tokens.
            keys: [B, S], positions of the slots in view.
            masks: [B, 1, N, S], additive.
        """
        self._places.queries, self._places.keys = positions, keys
        extra = {"decoder_position_ids": positions} if self._takes_positions else {}
        try:
            output = self._placed(
                encoder_outputs=BaseModelOutput(last_hidden_state=source.states),
                attention_mask=source.mask,
                decoder_input_ids=token_ids,
                decoder_attention_mask=masks,
                **{self._cache_name: _PlacedCache(cache, source.cross)},
                use_cache=True,
                return_dict=True,
                **extra,
            )
        finally:
            self._places.queries = self._places.keys = None
        source.leave_open()
        logits: Tensor = output.logits
        return logits.to(token_ids.device)

    def _place(self, module: nn.Module) -> nn.Module | None:
        """A copy of a module that counts slots, which reads true positions; None for other modules."""
        if getattr(module, "has_relative_attention_bias", False) and hasattr(module, "compute_bias"):
            return copy_module(module, compute_bias=functools.partial(_bias_by_distance, module, self._places))
        if isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters:
            return copy_module(module, forward=functools.partial(_embed_positions, module.forward, self._places))
        return None


def _bias_by_distance(
    attention: Any, places: _Places, query_length: int, key_length: int, device: Any = None, **_: Any
) -> Tensor:
    """Replaces T5's `compute_bias`: the bias [B, H, N, S] by the distances between positions.

    Worked example, a root at position 5 and two children at 6, after 5 committed tokens:

        slots      0 1 2 3 4 5 6 7
        positions  0 1 2 3 4 5 6 6      the second child, in slot 7, has distance 1 to the root and 0 to itself
    """
    assert places.queries is not None
    assert places.keys is not None
    # The module's own bias for one query after everything in view, nearest key first: [S, H].
    table = attention.compute_bias(1, key_length, device=device, past_seen_tokens=key_length - 1)[0, :, 0].flip(-1).T
    distances = (places.queries[:, :, None] - places.keys[:, None, :]).to(table.device)
    # A negative distance is to a key that the query may not see.
    return nn.functional.embedding(distances.clamp(0, key_length - 1), table).permute(0, 3, 1, 2)


def _embed_positions(forward: Callable[..., Tensor], places: _Places, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces the forward of a table of positions (BART, Marian): the rows [B, N, D] of the true positions."""
    assert places.queries is not None
    # Some tables return one more dimension of size 1.
    return forward(*args, **kwargs | {"position_ids": places.queries}).reshape(*places.queries.shape, -1)
