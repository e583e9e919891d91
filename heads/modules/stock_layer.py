"""A target family's own decoder layer (dense, mixture of experts, latent attention) over the drafter's KV cache.

transformers' decoder layers take what they attend over as arguments: a 4-D mask, the rotary embedding's tables, and an
object whose `update(keys, values, layer_index)` returns everything in view. So the layer of a native MTP module is the
very class the target consists of, and nothing of it is written here again.

Legend: B batch, Q rows of a pass, T sequence length, S cache columns in view, D hidden size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from heads.modules.layers import DraftCache
from inference.targets.model_config import find_layer_windows


class RowsInView(Protocol):
    """What `heads.modules.mtp_block.Rows` is to a layer."""

    @property
    def mask(self) -> Tensor: ...

    def update(self, keys: Tensor, values: Tensor, *rest: object) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Family:
    """config: with an attention implementation that takes masks. The classes of its decoder layers, their norms and its
    rotary embedding."""

    config: Any
    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]

    @property
    def norm_offset(self) -> float:
        """What a norm adds to its weight before it multiplies: 1 where weights are stored around zero (Qwen3-Next)."""
        norm = self.norm_class(2, eps=1e-6)
        with torch.no_grad():
            norm.weight.fill_(1.0)  # type: ignore[operator]
            return round(float(norm(torch.ones(2))[0]) - 1.0)


def find_family(settings: dict[str, Any]) -> Family:
    """The classes behind a text config's `to_dict()`.

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
        raise ValueError(f"{type(model).__name__} does not keep its layers and its rotary embedding where others do")
    if any(window is not None for window in find_layer_windows(config).values()):
        raise ValueError(f"MTP layers of {model_type} attend to a sliding window; the draft cache has none")
    layer = model.layers[-1]
    norms = [type(module) for name, module in layer.named_modules() if "norm" in name]
    return Family(config, type(layer), norms[0], type(model.rotary_emb))


class StockLayer(nn.Module):
    """A decoder layer built from a text config; the same calls as `heads.modules.mtp_block.MTPLayer`.

    Args:
        settings: `to_dict()` of the config, whose lists per layer describe the MTP layers.
        index: which of them this is.
    """

    def __init__(self, settings: dict[str, Any], index: int) -> None:
        super().__init__()
        self.family = find_family(settings)
        self.layer = self.family.layer_class(self.family.config, index)
        # Some families keep several sets of tables, one per type of layer.
        has_types = "layer_type" in inspect.signature(self.family.rotary_class.forward).parameters
        self._table = {"layer_type": self.family.config.layer_types[index]} if has_types else {}
        # Not a registered module: its buffers are no part of a checkpoint, and come back from one as garbage.
        self._rotary: dict[torch.device, nn.Module] = {}

    def new_cache(self, batch_size: int, **sizes: int) -> DraftCache:
        """Keys and values may differ in width (latent attention): one row through the layer tells."""
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

    def decode(self, x: Tensor, positions: Tensor, rows: RowsInView) -> Tensor:
        """x [B, Q, D] at positions [B, Q] -> [B, Q, D]."""
        return self._run(x, positions, rows.mask, rows)

    def unroll(self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Whole sequences x [B, T, D] -> [B, T, D]; a slot sees the earlier ones of depth 0, its own of later depths.

        The mask is a dense [T, depths x T]: for fine-tuning on moderate lengths.

        Args:
            past: keys and values of the depths before this one, whose own are added.
        """
        length = x.shape[1]
        own = torch.eye(length, dtype=torch.bool, device=x.device)
        mask = torch.cat([own.new_ones(length, length).tril(), *([own] * len(past))], dim=1)
        return self._run(x, positions, mask[None, None], _Past(past))

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor, memory: Any) -> Tensor:
        rotary = self._rotary_on(x.device)
        # Eager attention would add a boolean.
        added = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        output = self.layer(
            x,
            attention_mask=added.expand(x.shape[0], -1, -1, -1),
            position_ids=positions,
            past_key_values=memory,
            use_cache=True,
            position_embeddings=rotary(x, positions, **self._table),
        )
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def _rotary_on(self, device: torch.device) -> nn.Module:
        if device not in self._rotary:
            with torch.inference_mode(False), torch.device(device):  # its tables may enter a graph later
                self._rotary[device] = self.family.rotary_class(self.family.config)
        return self._rotary[device]


class _Past:
    """The cache of an unroll: keys and values of all depths so far, depth 0 first."""

    def __init__(self, past: list[tuple[Tensor, Tensor]]) -> None:
        self.past = past

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        self.past.append((keys, values))
        return torch.cat([k for k, _ in self.past], dim=2), torch.cat([v for _, v in self.past], dim=2)
