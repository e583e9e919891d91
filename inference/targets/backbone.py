"""Backbone: one forward pass of a decoder-only model, with the hidden states that are asked for.

Legend: B batch, T tokens of one pass, D hidden, F = len(feature_layers) * D, V target vocabulary. Hidden states are
numbered as transformers does: hs[0] embeddings, hs[i] the input of layer i, hs[n] the last state AFTER the final norm.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from draftsmith.inference.kernels.attention import grouped_attention, hold_grouped_attention
from draftsmith.inference.targets.forward_names import ForwardNames
from draftsmith.inference.targets.model_config import has_attention_interface, refuse_training, request_states


@dataclass(frozen=True)
class PassOutput:
    """The outputs of one forward pass.

    Attributes:
        last: [B, T, D], the hidden states after the final norm; [B, T, 0] of an encoder-decoder model.
        features: [B, T, F], or None when no layers were asked for.
        logits: [B, T, V], or None where they are computed from `last` (`Target.compute_logits`).
    """

    last: Tensor
    features: Tensor | None
    logits: Tensor | None = None


@dataclass(frozen=True)
class TargetOutput:
    """What a pass over N tokens gave.

    Attributes:
        logits: [B, N, V] in the model's dtype; of prompts, those of the last token only.
        features: [B, N, F], or None when no layers were asked for.
        last: [B, N, D], the hidden states after the final norm; None where nothing reads them.
    """

    logits: Tensor
    features: Tensor | None = None
    last: Tensor | None = None


class Backbone:
    """Runs a model.

    Args:
        causal_lm: the transformers model inside `model`.
        num_layers: n.
        device: of the outputs.
        dtype: of the model.
    """

    def __init__(
        self, model: nn.Module, causal_lm: Any, *, num_layers: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.causal_lm = causal_lm
        self.num_layers = num_layers
        self.device = device
        self.dtype = dtype
        self._names = ForwardNames(causal_lm)
        self._decoder_names = ForwardNames(causal_lm.base_model)
        self._text_config = causal_lm.config.get_text_config()
        self.has_attention_interface = has_attention_interface(causal_lm)

    def read(
        self,
        token_ids: Tensor,
        positions: Tensor | None,
        masks: Any = None,
        cache: Cache | None = None,
        *,
        feature_layers: Sequence[int] = (),
        with_logits: bool = False,
        media: Mapping[str, Any] | None = None,
    ) -> PassOutput:
        """Hidden states of [B, T] tokens.

        Args:
            masks: as the model takes them; None = causal.
            cache: None = the tokens are the whole text.
            feature_layers: hidden states to hand over, in this order.
            with_logits: also the model's own logits of all tokens.
            media: more arguments of the model's forward. It then counts positions itself, where `positions` is None.
        """
        end = self.num_layers
        if with_logits:
            output = self.run(self.causal_lm, token_ids, positions, masks, cache, [*feature_layers, end])
            last = self._take(output.hidden_states[end])
        else:  # the last state is `last_hidden_state`: asking for it by number would keep it twice
            layers = list(feature_layers)
            while end in layers:
                layers.remove(end)
            output = self.run(self.causal_lm.base_model, token_ids, positions, masks, cache, layers, media)
            last = self._take(output.last_hidden_state)
        states = []
        for layer in feature_layers:
            states.append(last if layer == end else self._take(output.hidden_states[layer]))
        features = torch.cat(states, dim=-1) if states else None
        return PassOutput(last, features, output.logits.to(self.device) if with_logits else None)

    def _take(self, states: Tensor) -> Tensor:
        return narrow(states.to(self.device), self.dtype)

    def run(
        self,
        module: nn.Module,
        token_ids: Tensor,
        positions: Tensor | None,
        masks: Any,
        cache: Cache | None,
        layers: Sequence[int] = (),
        media: Mapping[str, Any] | None = None,
    ) -> Any:
        """The output of `module` (the model or a part of it), with hidden_states[layers]."""
        if self.model.training:
            refuse_training(self.model)
        names = self._names if module is self.causal_lm else self._decoder_names
        seen = {"attention_mask": masks, "position_ids": positions} if names.has_positions else {}
        with self.attention():
            return module(
                input_ids=token_ids,
                **{**seen, names.cache: cache},
                **(media or {}),
                use_cache=cache is not None,
                output_hidden_states=request_states(layers) if layers else False,
                return_dict=True,
            )

    def attention(self) -> AbstractContextManager[Any]:
        """Active while the model runs: grouped attention in the place of transformers' sdpa."""
        return grouped_attention(self._text_config) if self.has_attention_interface else nullcontext()

    def hold_attention(self) -> AbstractContextManager[None]:
        """`attention` for many passes."""
        return hold_grouped_attention(self._text_config) if self.has_attention_interface else nullcontext()


def narrow(states: Tensor, dtype: torch.dtype) -> Tensor:
    """States in the model's dtype, also of models (Mamba, Zaya) that add up residuals in float32: its LM head reads
    them so."""
    return states.to(dtype) if states.dtype.itemsize > dtype.itemsize else states
