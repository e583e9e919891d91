"""A target family's own decoder layer (dense, mixture of experts, latent attention) over the drafter's KV cache.

transformers' decoder layers get their context as arguments: a 4-D mask, the rotary embedding's tables, and an object
whose `update(keys, values, layer_index)` returns everything in view. So a native MTP module can use the target's own
layer class.

Legend: B batch, Q rows of a pass, T sequence length, S cache columns in view, D hidden size.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from draftsmith.heads.modules.layers import DraftCache, Rows, last_slot
from draftsmith.inference.targets.forward_names import find_cache_name
from draftsmith.inference.targets.model_config import find_layer_windows


@dataclass(frozen=True)
class Family:
    """A family's config, with an attention implementation that takes masks, and its classes."""

    config: Any
    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]

    @property
    def norm_offset(self) -> float:
        """The number a norm adds to its weight: 1 where weights are stored around zero (Qwen3-Next), else 0."""
        norm = self.norm_class(2, eps=1e-6)
        with torch.no_grad():
            norm.weight.fill_(1.0)  # type: ignore[operator]
            return round(float(norm(torch.ones(2))[0]) - 1.0)


def find_family(settings: dict[str, Any]) -> Family:
    """The family of a text config, given as its `to_dict()`.

    Raises:
        ValueError: for a family that transformers does not know, or whose layers cannot run on the drafter's cache.
    """
    settings = {key: value for key, value in settings.items() if key != "architectures"}
    model_type = settings.pop("model_type")
    try:
        with torch.device("meta"):
            model: Any = AutoModel.from_config(AutoConfig.for_model(model_type, **settings))
    except (KeyError, ValueError) as error:
        raise ValueError(f"transformers cannot build decoder layers of model_type {model_type!r}: {error}") from error
    config = model.config
    config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    if not hasattr(model, "layers") or not hasattr(model, "rotary_emb"):
        raise ValueError(f"{type(model).__name__} has no `layers` and `rotary_emb`, so its layers cannot be reused")
    if any(window is not None for window in find_layer_windows(config).values()):
        raise ValueError(f"MTP layers of {model_type} attend to a sliding window; the draft cache has none")
    layer = model.layers[-1]
    norms = [type(module) for name, module in layer.named_modules() if "norm" in name]
    return Family(config, type(layer), norms[0], type(model.rotary_emb))


class StockLayer(nn.Module):
    """A decoder layer built from a text config, with the methods of `DecoderLayer` that MTP blocks call.

    Args:
        settings: the config's `to_dict()`; its lists per layer describe the MTP layers.
        index: the number of this MTP layer.
    """

    def __init__(self, settings: dict[str, Any], index: int) -> None:
        super().__init__()
        self.family = find_family(settings)
        self.layer = self.family.layer_class(self.family.config, index)
        self._cache_name = find_cache_name(self.layer)
        # Some families keep several sets of tables, one per type of layer.
        has_types = "layer_type" in inspect.signature(self.family.rotary_class.forward).parameters
        self._table = {"layer_type": self.family.config.layer_types[index]} if has_types else {}
        # Not registered: its buffers are not in checkpoints, and from_pretrained would leave garbage in them.
        self._rotary: dict[torch.device, nn.Module] = {}

    def new_cache(self, batch_size: int, **sizes: int) -> DraftCache:
        """An empty cache. One row through the layer shows the widths of keys and values, which may differ (latent
        attention)."""
        past: list[tuple[Tensor, Tensor]] = []
        weight = next(self.layer.parameters())
        device, dtype = weight.device, weight.dtype
        with torch.no_grad():
            row = torch.zeros(1, 1, self.family.config.hidden_size, device=device, dtype=dtype)
            self.unroll(row, torch.zeros(1, 1, dtype=torch.long, device=device), past)
        (keys, values) = past[0]
        return DraftCache(
            (batch_size, keys.shape[1], keys.shape[3]),
            value_shape=(values.shape[1], values.shape[3]),
            device=device,
            dtype=dtype,
            **sizes,
        )

    def decode(self, x: Tensor, positions: Tensor, rows: Rows) -> Tensor:
        """x [B, Q, D] at positions [B, Q] -> [B, Q, D], with counts of the rows [B, 1, D]."""
        hidden = self._run(x, positions, rows.mask, rows)
        return hidden if rows.counts is None else last_slot(hidden, rows.counts)

    def unroll(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Whole sequences x [B, T, D] -> [B, T, D]. A slot sees depth 0 of earlier slots, and all depths of its own.

        The mask is a dense [T, depths x T]: for fine-tuning on moderate lengths.

        Args:
            past: keys and values of the depths before this one; this depth's are appended.
        """
        length = x.shape[1]
        own = torch.eye(length, dtype=torch.bool, device=x.device)
        mask = torch.cat([own.new_ones(length, length).tril(), *([own] * len(past))], dim=1)
        return self._run(x, positions, mask[None, None], _Past(past))

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor, memory: Any) -> Tensor:
        rotary = self._rotary_on(x.device)
        # Eager attention adds the mask, so it cannot be boolean.
        added = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        output = self.layer(
            x,
            attention_mask=added.expand(x.shape[0], -1, -1, -1),
            position_ids=positions,
            **{self._cache_name: memory},
            use_cache=True,
            position_embeddings=rotary(x, positions, **self._table),
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _rotary_on(self, device: torch.device) -> nn.Module:
        if device not in self._rotary:
            with torch.inference_mode(False), torch.device(device):  # training may use the tables later
                self._rotary[device] = self.family.rotary_class(self.family.config)
        return self._rotary[device]


class _Past:
    """The cache of an unroll: keys and values of all depths so far, depth 0 first."""

    def __init__(self, past: list[tuple[Tensor, Tensor]]) -> None:
        self.past = past

    def update(self, keys: Tensor, values: Tensor, *_: object, **more: object) -> tuple[Tensor, Tensor]:
        self.past.append((keys, values))
        return torch.cat([k for k, _ in self.past], dim=2), torch.cat([v for _, v in self.past], dim=2)
