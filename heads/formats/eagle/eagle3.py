"""EAGLE-3 and 3.1 as their authors, SpecForge, ModelOpt, vLLM and SGLang have them, and P-EAGLE as vLLM reads it.

    fc.weight [D, 3D] (low, middle, high), midlayer.* or layers.0.*, norm.weight, lm_head.weight [Vd, D];
    d2t [Vd] (distances), t2d [V] where Vd < V; input_norm.weight (norm_before_fc), fc_norm.{i}.weight (fc_norm);
    P-EAGLE: layers.{1...}.*, mask_hidden [1, 1, 3D], and embed_tokens.weight, whose row `pard_token` masks have.

Layer ids mean hidden_states[i]; SGLang's and SpecForge's mean hidden_states[i + 1]. Without ids all of them read layers
2, n // 2 and n - 3.
"""

import re
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.heads.formats.eagle.llama_keys import (
    Reading,
    authors_code,
    authors_limits,
    drop_rope_tables,
    name_dtype,
    read_biases,
    read_decoder,
    read_draft_vocabulary,
    read_embedding,
    read_own_settings,
    refuse_unwritable,
    write_decoder,
)
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import as_wide_as, is_targets_table, target_table
from draftsmith.inference.targets.target import Target

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Settings of ours that no key of the format has: of training, and the depths of P-EAGLE.
_OWN = ("ttt_steps", "num_depths", "keep_ratio", "min_keep_ratio")
IDS = "eagle_aux_hidden_state_layer_ids"
# What ModelOpt's configs can say, and the only value that is read.
_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
# Keys of `eagle_config` that only ModelOpt writes.
_MODELOPT_MARKS = ("next_layer_regular", *(key for key in _MODELOPT if key != "use_aux_hidden_state"))
PARTS = (
    *(f"self_attn.{name}_proj.{end}" for name in "qkvo" for end in ("weight", "bias")),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)
LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.+)")


def authors_layers(num_layers: int) -> list[int]:
    """The layers that every reader taps where a checkpoint names none."""
    return [2, num_layers // 2, num_layers - 3]


class Eagle3(Format):
    name = "eagle"
    title = "heads in the published EAGLE-3 format (also written by SpecForge)"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3",)
    file = "pytorch_model.bin"
    commands: tuple[str, ...] = ()
    python: str = authors_code(is_eagle3=True)

    def matches(self, published: Published) -> bool:
        return (
            "Eagle3" in published.architectures
            or published.has(r"midlayer\..*|layers\.0\.hidden_norm\.weight")
            or {"fc.weight", "lm_head.weight", "norm.weight", "d2t"} <= published.keys()
        )

    # Reading.

    def read(self, published: Published, target: Target) -> Imported:
        reading = Reading(published, target)
        layers = {0}
        for name in published:
            ours = name
            if (match := LAYER.fullmatch(name)) is not None:
                number = int(match[1] or 0)
                layers.add(number)
                ours = f"midlayer.{match[2]}" if number == 0 else f"layers.{number - 1}.{match[2]}"
                if number and f"layers.{number}.input_layernorm.weight" not in published:  # SGLang's name for it
                    ours = ours.replace("hidden_norm", "input_layernorm")
            if ours in reading.tensors:
                reading.refuse(f"tensors {reading.names.get(ours, ours)} and {name} are the same part")
            reading.tensors[ours] = published[name]
            if ours != name:
                reading.names[ours] = name
        if published.has(r"layers\.0\..*"):  # then what is missing is so named, too
            reading.names = {f"midlayer.{part}": f"layers.0.{part}" for part in PARTS} | reading.names
        settings = read_decoder(reading, len(layers))
        drop_rope_tables(reading, settings)
        for key, usual in _MODELOPT.items():
            reading.expect(key, usual, may_lack=True)
        settings |= {
            **read_biases(reading, "midlayer."),
            **{flag: reading.flag(flag) for flag in FLAGS},
            **read_draft_vocabulary(reading),
            **read_own_settings(reading, _OWN),
            "feature_layers": read_layer_ids(reading),
            "num_layers": len(layers),
        }
        further = {f"layers.{n - 1}.{part}": f"layers.{n}.{part}" for n in layers - {0} for part in PARTS}
        reading.names = further | reading.names
        if is_parallel(published):
            return self._read_masks(reading, settings)
        settings["own_embedding"] = read_embedding(reading)
        return reading.finish("eagle3", settings)

    def _read_masks(self, reading: Reading, settings: dict[str, Any]) -> Imported:
        """What P-EAGLE has beside EAGLE-3: depths, and the embedding and the hidden state of mask rows."""
        published, tensors = reading.published, reading.tensors
        if (depths := read_depths(published)) is not None:
            settings.setdefault("num_depths", depths)
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
        table = tensors.pop("embed_tokens.weight", None)
        given = {key: value for key in MASK_KEYS if (value := published.setting(key)) is not None}
        name, token = next(iter(given.items()), ("", None))
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < reading.target.vocab_size:
            reading.refuse(
                f"config.json names no mask token ({' or '.join(MASK_KEYS)})"
                if token is None
                else f"{name} is {token!r}, and the target has tokens 0 to {reading.target.vocab_size - 1}"
            )
        if table is None:
            reading.notes.append(f"the checkpoint has no embed_tokens.weight: masks have the target's token {token}")
            table = as_wide_as(target_table(reading.target), tensors.get("mask_hidden"))
        if is_targets_table(table, reading.target, but=token):
            tensors["mask_embedding"] = table[token]
            reading.names["mask_embedding"] = "embed_tokens.weight"
        else:
            tensors["embed_tokens.weight"] = table
            settings |= {"own_embedding": True, "mask_token_id": token}
        return reading.finish("parallel", settings)

    # Writing.

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        self.refuse(config)
        keys = {
            "architectures": ["LlamaForCausalLM"],
            **write_decoder(config, config.num_layers),
            "draft_vocab_size": config.vocab_size,
            "torch_dtype": name_dtype(tensors),
            OWN_KEY: own_settings(config),
        }
        return Exported(keys, dict(tensors), self.file, self.commands, self.python)

    def refuse(self, config: Any) -> None:
        """Raises ValueError for settings that the readers of this format do not know."""
        usual = authors_layers(config.target_num_layers)
        flags = [flag for flag in FLAGS if getattr(config, flag)]
        refuse_unwritable(
            "the authors' EAGLE-3",
            (bool(flags), f"their code does not know {', '.join(flags)}; choose vllm or speculators"),
            (config.feature_layers != usual, f"their code reads layers {usual}, these heads {config.feature_layers}"),
            (config.qkv_bias or config.o_bias, "their code has no biases in its attention"),
            (config.num_layers > 1, f"their code has one layer, these heads {config.num_layers}; choose vllm"),
            *authors_limits(config),
        )


MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")


def is_parallel(published: Published) -> bool:
    """Whether a checkpoint is P-EAGLE's."""
    has_token = any(published.config.get(key) is not None for key in ("pard_token", "ptd_token_id"))
    return has_token or "mask_hidden" in published or published.config.get("speculators_model_type") == "peagle"


def is_eagle4(published: Published) -> bool:
    """Whether a checkpoint is EAGLE-4's."""
    return "Eagle4" in published.architectures or "efficient_lm_head_config" in published.config


def read_depths(published: Published) -> int | None:
    """The number of tokens that a speculators config proposes."""
    for method in published.setting("proposal_methods", ()):
        depths = method.get("speculative_tokens") if isinstance(method, dict) else None
        if isinstance(depths, int) and depths > 1:
            return depths
    return None


def read_layer_ids(reading: Reading) -> list[int]:
    """The tapped layers: as stated, or those that every reader takes."""
    num_layers, published = reading.target.num_layers, reading.published
    stated, own = published.setting(IDS), published.own_setting("feature_layers")
    usual = authors_layers(num_layers)
    if own is not None:
        if not isinstance(own, list):
            reading.refuse(f"{OWN_KEY}.feature_layers is {own!r}, and should be a list of layers")
        return own
    if stated is None:
        if not 0 < usual[0] < usual[1] < usual[2]:
            reading.refuse(
                f"config.json has no {IDS}, and the usual {usual} of a target of {num_layers} layers are not distinct"
            )
        return usual
    ids = _read_counting(reading, reading.layers(IDS, -1, num_layers), usual)
    if num_layers in ids:
        reading.refuse(
            f"layer ids {ids} tap the state after the last layer. Here hidden_states[{num_layers}] comes after the "
            "final norm, and other projects mean the state before it"
        )
    return ids


def _read_counting(reading: Reading, ids: list[int], usual: list[int]) -> list[int]:
    """Stated ids as indices of hidden_states. ModelOpt, SpecForge, SGLang and EAGLE-4 count from the layer after, and
    write them into `eagle_config` only; ids at the top level are vLLM's."""
    table = reading.published.config.get("eagle_config")
    is_nested = isinstance(table, dict) and reading.published.config.get(IDS) is None
    after = [one + 1 for one in ids]
    is_usual = after == usual
    by_modelopt = isinstance(table, dict) and is_nested and any(mark in table for mark in _MODELOPT_MARKS)
    by_eagle4 = is_nested and is_eagle4(reading.published)
    if by_modelopt or by_eagle4 or (is_nested and is_usual):
        writer = "ModelOpt counts" if by_modelopt else "EAGLE-4 counts" if by_eagle4 else "SpecForge and SGLang count"
        reading.notes.append(
            f"layer ids {ids} were read as hidden_states {after}: {writer} the outputs of layers from 0"
        )
        return after
    if is_usual or is_nested:
        why = "are the usual ones less one" if is_usual else "stand in eagle_config only"
        reading.notes.append(
            f"layer ids {ids} {why}: SpecForge and SGLang would mean {after}; they were read as hidden_states[id], as "
            "vLLM reads them. --check true tells which fits"
        )
    return ids


def own_settings(config: Any) -> dict[str, Any]:
    """What is left in the config for the way back."""
    return {key: getattr(config, key) for key in _OWN if hasattr(config, key)}
