"""The format of Hydra's authors (github.com/zankner/Hydra), Hydra++ with its prefix layer included.

    hydra_mlp.{i}.{p}.linear.{weight, bias}            block p of head i; p counts dropouts too, where there is a prefix
    hydra_mlp.{i}.{first p}.res_connection.{weight, bias}
    hydra_lm_head.{i}.{weight, bias}                   hydra_lm_head.{i}.1 where there is a prefix
    prefix_embeding_layer.{layers.0, norm}.*           Hydra++'s decoder layer over the target's states

Their blocks after the first share their weights, which a file holds once for each. Their prefix layer has the target's
shape, and RoPE of theta 10000 whatever the target's is.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.config import DEFAULT_ROPE, decoder_settings
from draftsmith.heads.formats.eagle.llama_keys import refuse_unwritable, target_rope
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.published import OWN_KEY, Published, refuse
from draftsmith.heads.formats.tensors import is_same, refuse_other_layer, rename
from draftsmith.inference.targets.target import Target

_WHOLE = "hydra_head."  # before the heads' names in a whole model's state dict
_PREFIX = "prefix_embeding_layer."  # as they spell it
# Of the model that their prefix layer is a part of. It gets states, so it reads no embedding.
_UNREAD = (f"{_PREFIX}embed_tokens.weight", f"{_PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
_LAYER = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
# hydra_head_arch -> whether there is a prefix layer
_STRUCTURES = {"mlp": False, "prefix-mlp": True}
_OWN = ("dropout", "rms_norm_eps")
_OWN_OF_PREFIX = (*_OWN, "max_position_embeddings")
_SHAPE = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps")


def _names(num_heads: int, num_layers: int, *, has_prefix: bool) -> dict[str, str]:
    """Our name -> theirs, for heads with biases."""
    names = {}
    for i in range(num_heads):
        for block in range(num_layers):
            ours, place = f"mlps.{i}.{2 * block + 1}", 2 * block + 1 if has_prefix else block
            for part in ("weight", "bias"):
                names[f"{ours}.linear.{part}"] = f"hydra_mlp.{i}.{place}.linear.{part}"
                if block == 0:
                    names[f"{ours}.residual.{part}"] = f"hydra_mlp.{i}.{place}.res_connection.{part}"
        for part in ("weight", "bias"):
            names[f"lm_head.{i}.{part}"] = f"hydra_lm_head.{i}.{'1.' if has_prefix else ''}{part}"
    if has_prefix:
        names |= {f"prefix.{part}.weight": f"{_PREFIX}layers.0.{part}.weight" for part in _LAYER}
        names["prefix.norm.weight"] = f"{_PREFIX}norm.weight"
    return names


class Hydra(Format):
    name = "hydra"
    title = "heads in the published Hydra format"
    kinds = ("hydra",)

    def matches(self, published: Published) -> bool:
        if "hydra_num_heads" in published.config or published.file.startswith("hydra"):
            return True
        return any(re.match(r"(hydra_head\.)?hydra_mlp\.", name) for name in published)

    def read(self, published: Published, target: Target) -> Imported:
        tensors = {name.removeprefix(_WHOLE): x for name, x in published.items()}
        tensors = {name: x for name, x in tensors.items() if name not in _UNREAD}
        has_prefix = any(name.startswith(_PREFIX) for name in tensors)
        _refuse_foreign_settings(published, has_prefix=has_prefix)
        places = [m for name in tensors if (m := re.match(r"hydra_mlp\.(\d+)\.(\d+)\.", name))]
        num_heads = 1 + max((int(m[1]) for m in places), default=0)
        last = max((int(m[2]) for m in places), default=0)
        num_layers = 1 + (last // 2 if has_prefix else last)
        names = _names(num_heads, num_layers, has_prefix=has_prefix)
        found = rename(tensors, names)
        optional = [name for name in names if re.fullmatch(r"(mlps\..*\.residual|lm_head\.\d+)\.bias", name)]
        use_biases = not all(name in found and _is_zero_bias(found, name) for name in optional)
        settings: dict[str, Any] = {
            "num_heads": num_heads,
            "num_layers": num_layers,
            "use_prefix_attention": has_prefix,
            "use_prefix_norm": has_prefix,
            "use_embedding_norm": False,
            "use_biases": use_biases,
        }
        own = _OWN_OF_PREFIX if has_prefix else _OWN
        settings |= {name: value for name in own if (value := published.own_setting(name)) is not None}
        if has_prefix:
            settings["rope_parameters"] = _prefix_rope(target)
        if not use_biases:
            found = {name: x for name, x in found.items() if name not in optional}
        return Imported("hydra", settings, found, names)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        has_prefix = config.use_prefix_attention
        refuse_other_layer(config)
        _refuse_foreign_structure(config, target)
        names = _names(config.num_heads, config.num_layers, has_prefix=has_prefix)
        _refuse_unlike_blocks(tensors, names)
        written = {}
        for ours, theirs in names.items():
            # Their loader leaves what is missing at random values.
            written[theirs] = tensors[ours] if ours in tensors else _zero_bias(tensors, ours)
        settings = {
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers,
            "hydra_head_arch": "prefix-mlp" if has_prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": config.target_name_or_path,
            OWN_KEY: {name: getattr(config, name) for name in (_OWN_OF_PREFIX if has_prefix else _OWN)},
        }
        note = "No engine serves Hydra; the authors' code does."
        return Exported(settings, written, "hydra_lm_head.pt", notes=(note,))


def _zero_bias(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    weight = tensors[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[:1])


def _is_zero_bias(tensors: Mapping[str, Tensor], name: str) -> bool:
    return name.removesuffix("bias") + "weight" in tensors and is_same(tensors[name], _zero_bias(tensors, name))


def _refuse_unlike_blocks(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    for ours, theirs in names.items():
        match = re.fullmatch(r"(mlps\.\d+)\.(?!1\.)\d+\.(linear\.\w+)", ours)
        if match is not None and not torch.equal(tensors[ours], tensors[f"{match[1]}.3.{match[2]}"]):
            raise ValueError(
                f"the authors' blocks after the first share their weights, and these heads' do not ({theirs}): train "
                "heads with num_layers 1 or 2 for this format"
            )


def _refuse_foreign_settings(published: Published, *, has_prefix: bool) -> None:
    path, structure = published.path, published.setting("hydra_head_arch")
    if structure not in _STRUCTURES:
        refuse(path, f"hydra_head_arch is {structure!r} in config.json; heads here are {' or '.join(_STRUCTURES)}")
    if _STRUCTURES[structure] != has_prefix:
        refuse(path, f"hydra_head_arch is {structure!r}, and the tensors {_PREFIX}* say the opposite")
    if not published.setting("grounded_heads", False):
        refuse(path, "grounded_heads is not true in config.json: such heads read no tokens, which is Medusa")
    if offset := published.setting("hidden_state_offset", 0):
        refuse(path, f"hidden_state_offset is {offset}; heads here read the target's last states (0)")


def _prefix_rope(target: Target) -> dict[str, Any]:
    """RoPE of the authors' prefix layer: they hand on the target's scaling, and not its theta."""
    rope = target_rope(target)
    if rope["rope_type"] == "linear":
        return {**DEFAULT_ROPE, "rope_type": "linear", "factor": rope["factor"]}
    return dict(DEFAULT_ROPE)


def _refuse_foreign_structure(config: Any, target: Target) -> None:
    wanted: dict[str, Any] = {"use_embedding_norm": False}
    if config.use_prefix_attention:
        inherited = decoder_settings(target.text_config)
        wanted |= {"use_prefix_norm": True, "rope_parameters": _prefix_rope(target)}
        wanted |= {name: inherited[name] for name in _SHAPE}
    refuse_unwritable(
        "the authors' Hydra",
        *(
            (getattr(config, name) != value, f"{name} is {getattr(config, name)!r}, and there {value!r}")
            for name, value in wanted.items()
        ),
    )
