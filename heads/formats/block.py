"""Block drafters as published: DFlash (github.com/z-lab/dflash), DSpark (DeepSpec), and both in the speculators format.

Tensor names are ours, but for DSpark's two small heads and the mask. There the mask is a token of the vocabulary, whose
embedding the target has, unless the checkpoint brings its own `embed_tokens.weight` or vLLM's `mask_embedding.pt`.
Heads with `mask_token_id=None` have a mask of their own. It is written as the row of some token in a copy of the
target's embeddings, which vLLM reads.

`target_layer_ids` of the authors count layers from 0, so that id i is our feature i + 1; speculators' ids are ours.
"""

import re
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.heads.formats.block_mask import (
    EMBEDDING,
    embedding_of,
    find_fixed_mask,
    take_mask,
    take_vocabulary,
    write_tensors,
)
from draftsmith.heads.formats.eagle.llama_keys import (
    Reading,
    name_dtype,
    read_decoder,
    read_own_settings,
    refuse_unwritable,
    write_decoder,
)
from draftsmith.heads.formats.eagle.speculators_format import speculators_keys
from draftsmith.heads.formats.format import Exported, Format, Imported, vllm_command
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import rename, take_copies
from draftsmith.inference.targets.target import Target

_NAMES = {
    "markov.embedding.weight": "markov_head.markov_w1.weight",
    "markov.lm_head.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
# Keys of ours that published configs have no place for.
_OWN = ("num_anchors", "confidence_threshold")


class DFlash(Format):
    """The authors' folders. Their code and SGLang embed the mask with the target's own table."""

    name: ClassVar[str] = "dflash"
    title: ClassVar[str] = "a block drafter in the published DFlash or DSpark format"
    kinds = ("block",)
    layer_offset: ClassVar[int] = 1
    names: ClassVar[dict[str, str]] = _NAMES

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
        settings["feature_layers"] = self._read_layers(reading)
        settings |= read_own_settings(reading, _OWN)
        tensors = dict(published)
        mask = take_mask(reading, tensors)
        settings["mask_token_id"] = find_fixed_mask(reading, mask)
        own = {name: target.lm_head_weight() for name in ("lm_head.weight", "verifier_lm_head.weight")}
        take_copies(published.path, tensors, own)
        take_vocabulary(reading, tensors)
        reading.tensors = rename(tensors, self.names) | {"mask_embedding": mask}
        reading.names = {**self.names, "mask_embedding": EMBEDDING}
        return reading.finish(self.kinds[0], settings)

    def _read_block(self, reading: Reading) -> dict[str, Any]:
        published = reading.published
        names = f"{published.architectures} {published.config.get('speculators_model_type', '')}"
        is_spark = "dspark" in names.lower()
        rank = reading.integer("markov_rank") if is_spark and published.setting("markov_rank", 0) != 0 else 0
        has_confidence = is_spark and reading.flag("enable_confidence_head")
        if rank and (structure := published.setting("markov_head_type", "vanilla")) not in ("vanilla", "classical"):
            reading.refuse(f"markov_head_type is {structure!r}; heads here have the bias of one token (vanilla)")
        if has_confidence and reading.flag("confidence_head_with_markov") != bool(rank):
            reading.refuse("confidence_head_with_markov differs from markov_rank > 0, which decides it here")
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
        offset, last = self.layer_offset, reading.target.num_layers - 1
        return [one + offset for one in reading.layers(key, 1 - offset, last - offset)]

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        is_spark = _is_spark(config)
        mask_id, written = write_tensors(tensors, target, self.names)
        has_own_mask = EMBEDDING in written
        self.refuse(config, has_own_mask=has_own_mask)
        own: dict[str, Any] = {
            "target_layer_ids": [layer - self.layer_offset for layer in config.feature_layers],
            "mask_token_id": mask_id,
            **self.sizes(config),
        }
        settings = {
            "architectures": [self.architecture(config)],
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

    def architecture(self, config: Any) -> str:
        return "Qwen3DSparkModel" if _is_spark(config) else "DFlashDraftModel"

    def sizes(self, config: Any) -> dict[str, int]:
        """Keys of the kind beside DFlash's."""
        return {}

    def refuse(self, config: Any, *, has_own_mask: bool) -> None:
        """Raises ValueError for heads that the readers of this format would run otherwise."""
        refuse_unwritable(
            self.title,
            _last_state(config),
            (
                _is_odd(config),
                f"predicts_at_anchor is {config.predicts_at_anchor}, markov_rank {config.markov_rank} and "
                f"has_confidence {config.has_confidence}, and these are read: DFlash (false, 0, false) and DSpark "
                f"(true, above 0, either){'' if has_own_mask else '; choose speculators'}",
            ),
            *self.limits(config, has_own_mask),
        )

    def limits(self, config: Any, has_own_mask: bool) -> tuple[tuple[bool, str], ...]:
        """What these readers lack, and vLLM has: whether it is so, and the reason."""
        return (
            (
                has_own_mask,
                "the mask was trained, and these readers take it from the target's own embeddings; choose vllm",
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
        return (vllm_command(_method(config), config.num_depths),)


class BlockSpeculators(DFlash):
    """The speculators format, whose folders hold copies of the target's embedding and LM head."""

    name = "speculators"
    title = "a block drafter in the speculators format"
    layer_offset = 0

    def matches(self, published: Published) -> bool:
        return published.config.get("speculators_model_type") in ("dflash", "dspark")

    def architecture(self, config: Any) -> str:
        return "DSparkDraftModel" if _is_spark(config) else "DFlashDraftModel"

    def algorithm(self, config: Any) -> str:
        return _method(config)

    def _read_sliding_causal(self, reading: Reading) -> bool:
        return not reading.flag("sliding_window_non_causal")

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        mask_id, written = write_tensors(tensors, target, self.names)
        refuse_unwritable(
            self.title,
            _last_state(config),
            (
                EMBEDDING in written,
                "the mask was trained, and speculators loads the target's embeddings"
                f"{'' if _is_odd(config) else '; choose vllm'}",
            ),
            (config.is_causal, "is_causal is true, and speculators' blocks see all of themselves; choose vllm"),
        )
        dtype = written["fc.weight"].dtype
        written[EMBEDDING] = embedding_of(target).to(dtype)
        written["lm_head.weight"] = target.lm_head_weight().to(dtype).clone()  # tied to the embeddings in some targets
        settings = {
            **speculators_keys(config, target, self.algorithm(config), config.num_depths),
            "architectures": [self.architecture(config)],
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": config.feature_layers,
            "mask_token_id": mask_id,
            "draft_vocab_size": target.vocab_size,
            "sample_from_anchor": config.predicts_at_anchor,
            "sliding_window_non_causal": not config.sliding_is_causal,
            "transformer_layer_config": _write_shape(config, tensors),
            **self.sizes(config),
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
    """What must stand in a config, since readers differ in their defaults, and what must be the target's."""
    published = reading.published
    rope = published.setting("rope_parameters") or {}
    if "rope_theta" not in rope and published.setting("rope_theta") is None:
        reading.refuse("config.json has no rope_theta")
    reading.expect("num_target_layers", reading.target.num_layers, may_lack=True)
    reading.expect("draft_vocab_size", reading.target.vocab_size, may_lack=True)  # drafts are scored over all of it
