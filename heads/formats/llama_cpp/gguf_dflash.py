"""DFlash and DFlash 2 as llama.cpp has them, in GGUF: chains only, greedy ones.

The mask's token is one of the tokenizer's keys, so a file needs the target's tokenizer. Layer ids are ours.
"""

from typing import Any

from torch import Tensor

from draftsmith.heads.formats.block_mask import embed_token, find_token
from draftsmith.heads.formats.dflash2 import SIZES
from draftsmith.heads.formats.eagle.llama_keys import Reading, refuse_unwritable, window_limit
from draftsmith.heads.formats.format import Exported, Imported
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import (
    OF_LAYER,
    Gguf,
    read_layers,
    read_rope,
    read_shape,
    refuse_unread,
)
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import as_wide_as, rename
from draftsmith.inference.targets.target import Target

_MASK = "tokenizer.ggml.mask_token_id"
_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "selector.predecessor_embedding.weight": "selector_predecessor.weight",
    "selector.successor_embedding.weight": "selector_successor.weight",
    "selector.hidden_projection.weight": "selector_hidden.weight",
}
_OF_LAYER = {
    **OF_LAYER,
    **{f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"},
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
# Parts of the names of what llama.cpp computes with in float32.
_WIDE = ("norm", "base_kernel")


class GgufDFlash(Gguf):
    title = "a DFlash drafter in GGUF"
    kinds = ("block", "dflash2")
    architecture, label = "dflash", "DFlash"
    lack = "The file has no tokenizer, without which llama.cpp finds no mask; --target_gguf copies the target's."

    def read(self, published: Published, target: Target) -> Imported:
        reading = Reading(published, target)
        num_layers = reading.integer("dflash.block_count")
        settings = read_shape(reading, "dflash.") | {
            "num_layers": num_layers,
            "hidden_act": "silu",
            "block_size": reading.integer("dflash.block_size"),
            "feature_layers": read_layers(reading, "dflash.target_layers"),
            "is_causal": reading.flag("dflash.attention.causal"),
        }
        given = [name for name in SIZES if published.setting(f"dflash.{name}") is not None]
        sizes = {name: reading.integer(f"dflash.{name}") for name in given}
        tensors = dict(published)
        settings["rope_parameters"] = read_rope(reading, "dflash.", tensors, settings["head_dim"])
        names = _names(num_layers)
        found = rename(tensors, names)
        settings["mask_token_id"] = token = published.setting(_MASK)
        if not isinstance(token, int) or not 0 <= token < target.num_embeddings:
            reading.refuse(f"{_MASK} is {token!r}, and should be a token of the target")
        found["mask_embedding"] = embed_token(target, token)
        if published.setting(f"{OWN_KEY}.num_anchors") is not None:
            settings["num_anchors"] = reading.integer(f"{OWN_KEY}.num_anchors")
        refuse_unread(reading, "dflash.")
        wide = found.get("fc.weight")
        found = {
            name: as_wide_as(x, wide) if any(part in name for part in (*_WIDE, "mask")) else x
            for name, x in found.items()
        }
        return Imported("dflash2" if sizes else "block", settings | sizes, found, names)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        most, token = getattr(config, "selector_top_k", 0), find_token(tensors["mask_embedding"], target)
        lattice = most * (most + 1)
        refuse_unwritable(
            self.title,
            window_limit(config, "this format"),
            (config.hidden_act != "silu", f"hidden_act is {config.hidden_act}, and llama.cpp computes silu"),
            (token is None, "the mask was trained, and llama.cpp takes it from the target's embeddings; choose vllm"),
            (
                bool(config.predicts_at_anchor or config.markov_rank or config.has_confidence),
                "parts of DSpark (predicts_at_anchor, markov_rank, has_confidence) are not written; choose speculators",
            ),
            (
                lattice > config.hidden_size,
                f"selector_top_k is {most}, for which llama.cpp needs a hidden size of {lattice} or more; train with a "
                "smaller selector_top_k, or choose vllm",
            ),
        )
        values = {
            "attention.causal": config.is_causal,
            "block_size": config.block_size,
            "target_layers": list(config.feature_layers),
            **{name: getattr(config, name) for name in SIZES if most},
        }
        names = _names(config.num_layers)
        written = {
            names[name]: x.float() if any(part in name for part in _WIDE) else x
            for name, x in tensors.items()
            if name != "mask_embedding"
        }
        others = {f"{OWN_KEY}.num_anchors": config.num_anchors, _MASK: token}
        return self.export(config, values, written, most=config.num_depths, **others)


def _names(num_layers: int) -> dict[str, str]:
    layers = {
        f"layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(num_layers) for ours, theirs in _OF_LAYER.items()
    }
    return _NAMES | layers
