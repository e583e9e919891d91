"""Block drafters as published: DFlash (github.com/z-lab/dflash), DSpark (DeepSpec), and both in the speculators format.

Tensor names are ours, but for DSpark's two small heads and the mask. There the mask is a token of the vocabulary, whose
embedding the target has, unless the checkpoint brings its own `embed_tokens.weight` or vLLM's `mask_embedding.pt`.
Heads that were trained here have a mask of their own. It is written as the row of some token in a copy of the target's
embeddings, which vLLM and speculators read.

`target_layer_ids` of the authors count layers from 0, so that id i is our feature i + 1; speculators' ids are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.heads.formats.eagle.llama_keys import (
    Reading,
    name_dtype,
    read_decoder,
    refuse_unwritable,
    write_decoder,
)
from draftsmith.heads.formats.eagle.speculators_format import speculators_keys
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import as_wide_as, count_rows, is_targets_table, rename, take_copies
from draftsmith.heads.modules.vocabulary import seldom_token
from draftsmith.inference.targets.target import Target

_NAMES = {
    "markov.embedding.weight": "markov_head.markov_w1.weight",
    "markov.lm_head.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
_EMBEDDING = "embed_tokens.weight"
_MASK_FILE = "mask_embedding.pt"
# Keys of ours that published configs have no place for.
_OWN = ("num_anchors", "loss_decay", "confidence_threshold")


class DFlash(Format):
    """The authors' folders. Their code and SGLang embed the mask with the target's own table."""

    name: ClassVar[str] = "dflash"
    title: ClassVar[str] = "a block drafter in the published DFlash or DSpark format"
    kinds = ("block",)
    layer_offset: ClassVar[int] = 1

    def matches(self, published: Published) -> bool:
        return re.search("DFlash|DSpark", published.architectures, re.IGNORECASE) is not None

    def read(self, published: Published, target: Target) -> Imported:
        reading = Reading(published, target)
        numbers = [int(match[1]) for name in published if (match := re.match(r"layers\.(\d+)\.", name))]
        num_layers = 1 + max(numbers, default=0)
        settings = read_decoder(reading, num_layers) | self._read_block(reading) | {"num_layers": num_layers}
        if settings.get("sliding_window") is not None:
            settings["sliding_is_causal"] = self._read_sliding_causal(reading)
        _check_shape(reading)
        if layers := self._read_layers(reading):
            settings["feature_layers"] = layers
        settings |= {name: value for name in _OWN if (value := published.own_setting(name)) is not None}
        tensors = dict(published)
        mask = _take_mask(reading, tensors)
        settings["mask_token_id"] = _find_fixed_mask(reading, mask)
        own = {name: target.lm_head_weight() for name in ("lm_head.weight", "verifier_lm_head.weight")}
        reading.problems += take_copies(tensors, own)
        _take_vocabulary(tensors, target, reading.problems)
        reading.tensors = rename(tensors, {**{name: name for name in tensors}, **_NAMES}) | mask
        reading.names = {**_NAMES, "mask_embedding": _EMBEDDING}
        return reading.finish("block", settings)

    def _read_block(self, reading: Reading) -> dict[str, Any]:
        published = reading.published
        names = f"{published.architectures} {published.config.get('speculators_model_type', '')}"
        is_spark = "dspark" in names.lower()
        rank = reading.integer("markov_rank") if is_spark and published.setting("markov_rank", 0) != 0 else 0
        has_confidence = is_spark and reading.flag("enable_confidence_head")
        if rank and (structure := published.setting("markov_head_type", "vanilla")) not in ("vanilla", "classical"):
            reading.problems.append(
                f"markov_head_type is {structure!r}; heads here have the bias of one token (vanilla)"
            )
        if has_confidence and reading.flag("confidence_head_with_markov") != bool(rank):
            reading.problems.append("confidence_head_with_markov differs from markov_rank > 0, which decides it here")
        return {
            "block_size": reading.integer("block_size"),
            "predicts_at_anchor": bool(published.setting("sample_from_anchor", is_spark)),
            "markov_rank": rank,
            "has_confidence": has_confidence,
            "is_causal": bool(published.setting("is_causal", published.setting("causal", False))),
        }

    def _read_sliding_causal(self, reading: Reading) -> bool:
        """Whether rows of a layer with a window see only the rows before them: as in vLLM, unless something is said."""
        return all(reading.published.setting(key) is None for key in ("is_causal", "causal"))

    def _read_layers(self, reading: Reading) -> list[int]:
        key = "target_layer_ids" if self.layer_offset else "aux_hidden_state_layer_ids"
        ids = reading.published.setting(key)
        if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
            found = "config.json has no" if ids is None else "config.json has no list of layers as"
            reading.problems.append(f"{found} {key}")
            return []
        layers, last = [i + self.layer_offset for i in ids], reading.target.num_layers - 1
        if wrong := [i for i, layer in zip(ids, layers, strict=True) if not 1 <= layer <= last]:
            allowed = f"{1 - self.layer_offset} to {last - self.layer_offset}"
            reading.problems.append(f"{key} {wrong} are no layers of this target; allowed are {allowed}")
            return []
        return layers

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        is_spark = _is_spark(config)
        mask_id, written = _write_tensors(tensors, target)
        has_own_mask = _EMBEDDING in written
        self.refuse(config, has_own_mask=has_own_mask)
        own: dict[str, Any] = {
            "target_layer_ids": [layer - self.layer_offset for layer in config.feature_layers],
            "mask_token_id": mask_id,
        }
        settings = {
            "architectures": ["Qwen3DSparkModel" if is_spark else "DFlashDraftModel"],
            **_write_shape(config, tensors),
            "block_size": config.block_size,
            "num_target_layers": target.num_layers,
            OWN_KEY: {name: getattr(config, name) for name in _OWN},
        }
        states_causal = config.is_causal or (config.sliding_window is not None and not config.sliding_is_causal)
        if is_spark:
            settings |= {**own, **_spark_settings(config), "num_anchors": config.num_anchors}
            settings |= {"is_causal": config.is_causal} if states_causal else {}
        else:
            settings["dflash_config"] = own | ({"causal": config.is_causal} if states_causal else {})
        return Exported(settings, written, commands=self.commands(config))

    def refuse(self, config: Any, *, has_own_mask: bool) -> None:
        """Raises ValueError for heads that the readers of this format would run otherwise."""
        refuse_unwritable(
            self.title,
            _last_state(config),
            (
                _is_odd(config),
                f"predicts_at_anchor is {config.predicts_at_anchor}, markov_rank {config.markov_rank} and "
                f"has_confidence {config.has_confidence}, and these are read: DFlash (false, 0, false) and DSpark "
                "(true, above 0, either); choose speculators",
            ),
            *self.limits(config, has_own_mask),
        )

    def limits(self, config: Any, has_own_mask: bool) -> tuple[tuple[bool, str], ...]:
        """What these readers lack, and vLLM has: whether it is so, and the reason."""
        return (
            (
                has_own_mask,
                "the mask was trained, and these readers take it from the target's own embeddings; choose vllm or "
                "speculators",
            ),
            (config.is_causal, "is_causal is true, which these readers do not know; choose vllm"),
        )

    def commands(self, config: Any) -> tuple[str, ...]:
        return ()


class SGLangBlock(DFlash):
    name = "sglang"
    title = "a block drafter for SGLang"

    def commands(self, config: Any) -> tuple[str, ...]:
        return (
            "python -m sglang.launch_server --model-path {target} --speculative-draft-model-path {heads} "
            f"--speculative-algorithm {_method(config).upper()}",
        )


class VLLMBlock(DFlash):
    name = "vllm"
    title = "a block drafter for vLLM"

    def limits(self, config: Any, has_own_mask: bool) -> tuple[tuple[bool, str], ...]:
        return ()

    def commands(self, config: Any) -> tuple[str, ...]:
        depths = config.num_depths
        speculation = {"method": _method(config), "model": "{heads}", "num_speculative_tokens": depths}
        return (f"vllm serve {{target}} --speculative-config '{json.dumps(speculation)}'",)


class BlockSpeculators(DFlash):
    """The speculators format, whose folders hold copies of the target's embedding and LM head."""

    name = "speculators"
    title = "a block drafter in the speculators format"
    layer_offset = 0

    def matches(self, published: Published) -> bool:
        return published.config.get("speculators_model_type") in ("dflash", "dspark")

    def _read_sliding_causal(self, reading: Reading) -> bool:
        return not reading.flag("sliding_window_non_causal")

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        refuse_unwritable(
            self.title,
            _last_state(config),
            (config.is_causal, "is_causal is true, and speculators' blocks see all of themselves; choose vllm"),
        )
        mask_id, written = _write_tensors(tensors, target)
        dtype = written["fc.weight"].dtype
        written.setdefault(_EMBEDDING, _embedding_of(target).to(dtype))
        written["lm_head.weight"] = target.lm_head_weight().to(dtype).clone()  # tied to the embeddings in some targets
        settings = {
            **speculators_keys(config, target, _method(config), config.num_depths),
            "architectures": ["DSparkDraftModel" if _is_spark(config) else "DFlashDraftModel"],
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": config.feature_layers,
            "mask_token_id": mask_id,
            "draft_vocab_size": target.vocab_size,
            "sample_from_anchor": config.predicts_at_anchor,
            "sliding_window_non_causal": not config.sliding_is_causal,
            "transformer_layer_config": _write_shape(config, tensors),
            OWN_KEY: {name: getattr(config, name) for name in _OWN},
        }
        if _is_spark(config):
            settings |= _spark_settings(config)
        if _is_odd(config):
            note = "vLLM does not run this mixture of DFlash and DSpark, and does not say so; speculators does."
            return Exported(settings, written, notes=(note,))
        return Exported(settings, written, commands=("vllm serve {heads}",))


def _is_spark(config: Any) -> bool:
    return bool(config.markov_rank or config.has_confidence)


def _is_odd(config: Any) -> bool:
    """Whether a block is neither DFlash nor DSpark as vLLM runs them."""
    is_spark = _is_spark(config)
    return bool(config.predicts_at_anchor != is_spark or (is_spark and not config.markov_rank))


def _method(config: Any) -> str:
    return "dspark" if _is_spark(config) else "dflash"


def _spark_settings(config: Any) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.has_confidence and config.markov_rank > 0,
    }


def _last_state(config: Any) -> tuple[bool, str]:
    last = config.target_num_layers - 1
    wrong = [layer for layer in config.feature_layers if not 1 <= layer <= last]
    return bool(wrong), f"feature_layers {wrong} are not what engines tap; allowed are the layers 1 to {last}"


def _write_shape(config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    written = write_decoder(config, config.num_layers)
    return {
        **written,
        "model_type": "qwen3",
        "attention_bias": False,
        "layer_types": written.get("layer_types", ["full_attention"] * config.num_layers),
        "torch_dtype": name_dtype(tensors),
    }


def _check_shape(reading: Reading) -> None:
    """What must stand in a config, since readers differ in their defaults, and what draft layers here do not have."""
    published, total = reading.published, reading.target.vocab_size
    rope = published.setting("rope_parameters") or {}
    if "rope_theta" not in rope and published.setting("rope_theta") is None:
        reading.problems.append("config.json has no rope_theta")
    if (count := published.setting("num_target_layers", reading.target.num_layers)) != reading.target.num_layers:
        reading.problems.append(f"num_target_layers is {count}, and the target has {reading.target.num_layers}")
    if published.setting("use_swa", False):
        reading.problems.append("use_swa is not read: windows are read from sliding_window and layer_types")
    if (size := published.setting("draft_vocab_size", total)) != total:
        reading.problems.append(f"draft_vocab_size is {size}; block drafters here score the target's {total} tokens")


# The mask, and copies of the target's tensors.


def _embedding_of(target: Target) -> Tensor:
    """[V, D], which a row of the target's embedding is read from.

    Raises:
        ValueError: a target that scales its embeddings.
    """
    embedding: Any = target.embed_tokens
    table: Tensor = embedding.weight.detach()
    first = torch.arange(min(8, len(table)), device=table.device)
    with torch.no_grad():
        is_plain = torch.equal(embedding(first), table[first])
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
    mask = tensors["mask_embedding"].detach()
    table = _embedding_of(target).to(mask)
    if (same := (table == mask).all(dim=1).nonzero()).numel():
        return int(same[0, 0]), written
    token = seldom_token(target)
    table = table.clone()
    table[token] = mask
    return token, {**written, _EMBEDDING: table}


def _take_mask(reading: Reading, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Takes the embeddings out of `tensors`, which must be the target's but for the mask's row; returns that row."""
    published, target, problems = reading.published, reading.target, reading.problems
    mask_id, table = published.setting("mask_token_id"), tensors.pop(_EMBEDDING, None)
    if not isinstance(mask_id, int):
        problems.append(
            "config.json has no mask_token_id" if mask_id is None else f"mask_token_id is {mask_id!r}, and no token"
        )
        return {}
    if not 0 <= mask_id < (target.num_embeddings if table is None else count_rows(table)):
        problems.append(f"mask_token_id is {mask_id}, which has no embedding")
        return {}
    if (mask := _read_mask_file(published, mask_id, problems)) is None and table is None:
        with torch.no_grad():
            mask = target.embed_tokens(torch.tensor([mask_id], device=target.device))[0].cpu()
    elif mask is None:
        assert table is not None
        mask = table[mask_id]
    if table is not None:
        shape = _embedding_of(target).shape
        table = table[: shape[0]]  # there may be more rows, for the mask
        if table.shape != shape:
            problems.append(f"tensor {_EMBEDDING} is {list(table.shape)}, and the target's own is {list(shape)}")
        elif not is_targets_table(table, target, but=mask_id):
            problems.append(
                f"tensor {_EMBEDDING} differs from the target's own in more than the mask's row: give the target that "
                "the heads were trained for"
            )
    return {"mask_embedding": as_wide_as(mask, tensors.get("fc.weight"))}


def _find_fixed_mask(reading: Reading, mask: dict[str, Tensor]) -> int | None:
    """The mask's token, unless the mask has an embedding of its own."""
    if not mask:
        return None
    token: int = reading.published.setting("mask_token_id")
    own = mask["mask_embedding"]
    if token >= reading.target.num_embeddings:
        return None
    with torch.no_grad():
        row = reading.target.embed_tokens(torch.tensor([token], device=reading.target.device))[0]
    return token if torch.equal(row.to(own), own) else None


def _read_mask_file(published: Published, mask_id: int, problems: list[str]) -> Tensor | None:
    """vLLM reads the mask's embedding from this file where there is one."""
    if (file := published.find(_MASK_FILE)) is None:
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        problems.append(f"{_MASK_FILE} is damaged, or holds more than tensors ({error})")
        return None
    if isinstance(content, dict):
        if content.get("mask_token_id", mask_id) != mask_id:
            problems.append(f"{_MASK_FILE} is of token {content['mask_token_id']}, and mask_token_id is {mask_id}")
        content = content.get("embedding")
    if not isinstance(content, Tensor):
        problems.append(f"{_MASK_FILE} has no tensor 'embedding'")
        return None
    return content.reshape(-1)


def _take_vocabulary(tensors: dict[str, Tensor], target: Target, problems: list[str]) -> None:
    """Takes out the maps of a draft vocabulary that is the target's own, and speculators' copy of the target's norm."""
    whole = {"d2t": torch.zeros(target.vocab_size), "t2d": torch.ones(target.vocab_size)}
    for name, expected in whole.items():
        if (given := tensors.pop(name, None)) is not None and not torch.equal(given.to(expected), expected):
            problems.append(f"tensor {name} maps a reduced vocabulary, and block drafters here score the target's own")
    if (gain := target.final_norm_gain()) is not None:
        problems += take_copies(tensors, {"verifier_norm.weight": gain})
