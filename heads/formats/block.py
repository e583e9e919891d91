"""Block drafters as published: DFlash (github.com/z-lab/dflash), DSpark (DeepSpec), and both in the speculators format.

Tensor names are ours, but for DSpark's two small heads and the mask. There the mask is a token of the vocabulary, whose
embedding the target has, unless the checkpoint brings its own `embed_tokens.weight` or vLLM's `mask_embedding.pt`.
Heads that were trained here have a mask of their own. It is written as the row of some token in a copy of the target's
embeddings, which vLLM and speculators read.

`target_layer_ids` of the authors count layers from 0, so that id i is our feature i + 1; speculators' ids are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.hub import cached_file

from heads.formats.format import Exported, Format, Imported
from heads.formats.published import Published
from heads.formats.tensors import rename, take_copies
from inference.targets.target import Target

_NAMES = {
    "markov.embedding.weight": "markov_head.markov_w1.weight",
    "markov.lm_head.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
_EMBEDDING = "embed_tokens.weight"
_MASK_FILE = "mask_embedding.pt"
_SHAPE = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "rms_norm_eps")


class DFlash(Format):
    """The authors' folders, which vLLM and SGLang read."""

    name = "dflash"
    title = "a block drafter in the published DFlash or DSpark format"
    kinds = ("block",)
    layer_offset = 1

    def matches(self, published: Published) -> bool:
        return re.search("DFlash|DSpark", published.architectures, re.IGNORECASE) is not None

    def read(self, published: Published, target: Target) -> Imported:
        problems: list[str] = []
        settings = _read_shape(published, target, problems) | self._read_block(published, problems)
        if layers := self._read_layers(published, target, problems):
            settings["feature_layers"] = layers
        tensors = dict(published)
        mask = _take_mask(published, tensors, target, problems)
        own = {name: target.lm_head_weight() for name in ("lm_head.weight", "verifier_lm_head.weight")}
        problems += take_copies(tensors, own)
        _take_vocabulary(tensors, target, problems)
        found = rename(tensors, {**{name: name for name in tensors}, **_NAMES})
        return Imported("block", settings, found | mask, {**_NAMES, "mask_embedding": _EMBEDDING}, problems)

    def _read_block(self, published: Published, problems: list[str]) -> dict[str, Any]:
        is_spark = "dspark" in published.architectures.lower()
        rank = int(published.setting("markov_rank", 0)) if is_spark else 0
        has_confidence = is_spark and bool(published.setting("enable_confidence_head", False))
        if rank and (structure := published.setting("markov_head_type", "vanilla")) not in ("vanilla", "classical"):
            problems.append(f"markov_head_type is {structure!r}; heads here have the bias of one token (vanilla)")
        if has_confidence and bool(published.setting("confidence_head_with_markov", False)) != bool(rank):
            problems.append("confidence_head_with_markov differs from markov_rank > 0, which decides it here")
        return {
            "block_size": _need(published, "block_size", 8, problems),
            "num_layers": _need(published, "num_hidden_layers", 1, problems),
            "predicts_at_anchor": bool(published.setting("sample_from_anchor", is_spark)),
            "markov_rank": rank,
            "has_confidence": has_confidence,
            "is_causal": bool(published.setting("is_causal", published.setting("causal", False))),
        }

    def _read_layers(self, published: Published, target: Target, problems: list[str]) -> list[int]:
        key = "target_layer_ids" if self.layer_offset else "aux_hidden_state_layer_ids"
        ids = _need(published, key, [], problems)
        layers = [i + self.layer_offset for i in ids]
        if wrong := [i for i, layer in zip(ids, layers, strict=True) if not 1 <= layer < target.num_layers]:
            first, last = 1 - self.layer_offset, target.num_layers - 1 - self.layer_offset
            problems.append(f"{key} {wrong} are no layers of this target; allowed are {first} to {last}")
            return []
        return layers

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        _refuse_last_state(config)
        is_spark = bool(config.markov_rank or config.has_confidence)
        if config.predicts_at_anchor != is_spark or (is_spark and not config.markov_rank):
            raise ValueError(
                f"predicts_at_anchor is {config.predicts_at_anchor}, markov_rank {config.markov_rank} and "
                f"has_confidence {config.has_confidence}: engines read DFlash (false, 0, false) and DSpark (true, above 0, either) in "
                "this format. Choose speculators, or train heads of one of the two"
            )
        mask_id, written = _write_tensors(tensors, target)
        layer_ids = [layer - self.layer_offset for layer in config.feature_layers]
        settings = {
            "architectures": ["Qwen3DSparkModel" if is_spark else "DFlashDraftModel"],
            **_write_shape(config, target),
            "block_size": config.block_size,
            "num_target_layers": target.num_layers,
        }
        own: dict[str, Any] = {"target_layer_ids": layer_ids, "mask_token_id": mask_id}
        if is_spark:
            settings |= {**own, **_spark_settings(config), "num_anchors": config.num_anchors}
            settings |= {"is_causal": True} if config.is_causal else {}
        else:
            settings["dflash_config"] = own | ({"causal": True} if config.is_causal else {})
        method = "dspark" if is_spark else "dflash"
        commands = [_vllm_command(method, config)]
        if _EMBEDDING not in written:  # SGLang embeds the mask with the target's own table
            commands.append(
                "python -m sglang.launch_server --model-path {target} --speculative-draft-model-path {heads} "
                f"--speculative-algorithm {method.upper()}"
            )
        return Exported(settings, written, commands=tuple(commands))


class BlockSpeculators(DFlash):
    """The speculators format, whose folders hold copies of the target's embedding and LM head."""

    name = "speculators"
    title = "a block drafter in the speculators format"
    layer_offset = 0

    def matches(self, published: Published) -> bool:
        return published.config.get("speculators_model_type") in ("dflash", "dspark")

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        _refuse_last_state(config)
        mask_id, written = _write_tensors(tensors, target)
        written.setdefault(_EMBEDDING, _embedding_of(target))
        written["lm_head.weight"] = target.lm_head_weight()
        method = "dspark" if config.markov_rank or config.has_confidence else "dflash"
        settings = {
            "architectures": ["DSparkDraftModel" if method == "dspark" else "DFlashDraftModel"],
            "speculators_model_type": method,
            "speculators_version": "0.9.0",
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": list(config.feature_layers),
            "mask_token_id": mask_id,
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "sample_from_anchor": config.predicts_at_anchor,
            "tie_word_embeddings": False,
            "transformer_layer_config": _write_shape(config, target),
            "speculators_config": {
                "algorithm": method,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_depths}],
                "verifier": {
                    "name_or_path": config.target_name_or_path,
                    "architectures": list(target.text_config.architectures or []),
                },
            },
        }
        if method == "dspark":
            settings |= _spark_settings(config)
        if config.is_causal:
            settings["is_causal"] = True
        return Exported(settings, written, commands=(_vllm_command(method, config),))


def _vllm_command(method: str, config: Any) -> str:
    speculation = f'{{"method": "{method}", "model": "{{heads}}", "num_speculative_tokens": {config.num_depths}}}'
    return f"vllm serve {{target}} --speculative-config '{speculation}'"


def _spark_settings(config: Any) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.has_confidence and config.markov_rank > 0,
    }


def _refuse_last_state(config: Any) -> None:
    if wrong := [layer for layer in config.feature_layers if not 1 <= layer < config.target_num_layers]:
        raise ValueError(
            f"feature_layers {wrong} are not the output of a layer that engines tap; allowed are 1 to "
            f"{config.target_num_layers - 1}: train heads on these"
        )


# The shape of the draft layers.


def _need(published: Published, key: str, otherwise: Any, problems: list[str]) -> Any:
    value = published.setting(key)
    if value is None:
        problems.append(f"config.json has no {key}")
        return otherwise
    return value


def _read_shape(published: Published, target: Target, problems: list[str]) -> dict[str, Any]:
    settings = {key: _need(published, key, None, problems) for key in _SHAPE}
    settings["max_position_embeddings"] = published.setting("max_position_embeddings")
    settings["rope_parameters"] = _read_rope(published, problems)
    for key, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (given := published.setting(key)) != own:
            problems.append(f"{key} is {given} in config.json, and the target's is {own}")
    if (size := published.setting("draft_vocab_size", target.vocab_size)) != target.vocab_size:
        problems.append(
            f"draft_vocab_size is {size}; block drafters here score the target's {target.vocab_size} tokens"
        )
    layer_types = published.setting("layer_types", [])
    if "sliding_attention" in layer_types or published.setting("use_swa", False):
        problems.append("the layers attend to a sliding window, and draft layers here see the whole text")
    return {key: value for key, value in settings.items() if value is not None}


def _read_rope(published: Published, problems: list[str]) -> dict[str, Any] | None:
    rope = dict(published.setting("rope_parameters") or published.setting("rope_scaling") or {})
    theta = rope.get("rope_theta", published.setting("rope_theta"))
    if theta is None:
        problems.append("config.json has no rope_theta")
        return None
    kind = rope.pop("type", None) or rope.get("rope_type") or "default"
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def _write_shape(config: Any, target: Target) -> dict[str, Any]:
    rope = config.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": config.num_layers,
        **{key: getattr(config, key) for key in _SHAPE},
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        # Readers of older releases.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "attention_bias": False,
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
    }


# The mask, and copies of the target's tensors.


def _embedding_of(target: Target) -> Tensor:
    """[V, D], which a row of the target's embedding is read from.

    Raises:
        ValueError: a target that scales its embeddings.
    """
    table: Tensor = target.embed_tokens.weight.detach()
    first = torch.arange(min(8, len(table)), device=table.device)
    with torch.no_grad():
        is_plain = torch.equal(target.embed_tokens(first), table[first])
    if not is_plain:
        raise ValueError(
            f"{type(target.model).__name__} scales its embeddings, and engines read the mask from the table: heads for "
            "this target are not written in this format"
        )
    return table


def _write_tensors(tensors: Mapping[str, Tensor], target: Target) -> tuple[int, dict[str, Tensor]]:
    """The mask's token, and tensors by their published names. The target's embeddings are among them where none is the
    mask's: then the mask is in the place of a token that texts have seldom."""
    written = {_NAMES.get(name, name): x for name, x in tensors.items() if name != "mask_embedding"}
    table, mask = _embedding_of(target), tensors["mask_embedding"].detach()
    dtype = torch.promote_types(table.dtype, mask.dtype)
    table, mask = table.to(dtype), mask.to(table.device, dtype)
    if (same := (table == mask).all(dim=1).nonzero()).numel():
        return int(same[0, 0]), written
    token = _find_seldom_token(target)
    table = table.clone()
    table[token] = mask
    return token, {**written, _EMBEDDING: table}


def _find_seldom_token(target: Target) -> int:
    """The padding token, or the last one where that has another use."""
    config = target.text_config
    pad, eos = config.pad_token_id, config.eos_token_id
    used = {config.bos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return pad if pad is not None and pad not in used and 0 <= pad < target.vocab_size else target.vocab_size - 1


def _take_mask(
    published: Published, tensors: dict[str, Tensor], target: Target, problems: list[str]
) -> dict[str, Tensor]:
    """Takes the embeddings out of `tensors`, which must be the target's but for the mask's row; returns that row."""
    mask_id = _need(published, "mask_token_id", None, problems)
    table = tensors.pop(_EMBEDDING, None)
    if mask_id is None:
        return {}
    if not 0 <= mask_id < (target.num_embeddings if table is None else len(table)):
        problems.append(f"mask_token_id is {mask_id}, which has no embedding")
        return {}
    if (stored := _read_mask_file(published, mask_id, problems)) is not None:
        return {"mask_embedding": stored}
    if table is None:
        with torch.no_grad():
            return {"mask_embedding": target.embed_tokens(torch.tensor([mask_id], device=target.device))[0]}
    own = _embedding_of(target)
    if table.dim() == 2 and table.shape[1] == own.shape[1]:
        compared = table[: len(own)].clone()
        compared[mask_id : mask_id + 1] = own[mask_id : mask_id + 1].to(table)
        problems += take_copies({_EMBEDDING: compared}, {_EMBEDDING: own})
        return {"mask_embedding": table[mask_id]}
    problems.append(f"tensor {_EMBEDDING} is {list(table.shape)}, and the target's own is {list(own.shape)}")
    return {}


def _read_mask_file(published: Published, mask_id: int, problems: list[str]) -> Tensor | None:
    """vLLM reads the mask's embedding from this file where there is one."""
    file = cached_file(published.path, _MASK_FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    content = torch.load(file, map_location="cpu", weights_only=True)
    if isinstance(content, dict):
        if content.get("mask_token_id", mask_id) != mask_id:
            problems.append(f"{_MASK_FILE} is of token {content['mask_token_id']}, and mask_token_id is {mask_id}")
        content = content["embedding"]
    mask: Tensor = content.reshape(-1)
    return mask


def _take_vocabulary(tensors: dict[str, Tensor], target: Target, problems: list[str]) -> None:
    """Takes out the maps of a draft vocabulary that is the target's own, and speculators' copy of the target's norm."""
    whole = {"d2t": torch.zeros(target.vocab_size), "t2d": torch.ones(target.vocab_size)}
    for name, expected in whole.items():
        if (given := tensors.pop(name, None)) is not None and not torch.equal(given.to(expected), expected):
            problems.append(f"tensor {name} maps a reduced vocabulary, and block drafters here score the target's own")
    if (gain := target.final_norm_gain()) is not None:
        problems += take_copies(tensors, {"verifier_norm.weight": gain})
