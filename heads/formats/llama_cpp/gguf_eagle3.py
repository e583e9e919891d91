"""EAGLE-3 as llama.cpp has it, in GGUF.

llama.cpp's RoPE turns neighbouring channels, so the rows of q and k come in another order; d2t holds target ids, not
offsets; layer ids are ours (the input of layer i is transformers' hidden_states[i]). A file needs a tokenizer, which is
copied from the target's own GGUF.
"""

import shlex
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.heads.config import DecoderConfig, public_name
from draftsmith.heads.formats.eagle.llama_keys import (
    Reading,
    read_draft_vocabulary,
    read_embedding,
    refuse_unwritable,
    target_rope,
)
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.gguf_file import read_metadata
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import as_wide_as, rename
from draftsmith.inference.targets.target import Target

OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    **{f"self_attn.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}
_NAMES = {
    "input_norm.weight": "enc.output_norm.weight",
    "fc.weight": "fc.weight",
    **{f"midlayer.{ours}": f"blk.0.{theirs}" for ours, theirs in OF_LAYER.items()},
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "d2t": "d2t",
}
_Q, _K = "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight"
_ROPE_FACTORS = "rope_freqs.weight"
# Key -> the config's. Releases differ in the name of the layers, so both are written.
LAYER_SIZES = {
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_FLAGS = ("norm_before_residual", "norm_before_fc")
_LAYERS = ("target_layers", "extract_layers")
# What llama.cpp's graph has no place for, with the value that it computes.
_FIXED = {
    "fc_norm": False,
    "norm_output": False,
    "qkv_bias": False,
    "o_bias": False,
    "hidden_act": "silu",
    "num_layers": 1,
    "sliding_window": None,
}


class Gguf(Format):
    """What the architectures of draft heads have in common.

    Args:
        target_gguf: the target's file, for its tokenizer. Without it the heads' file has none, but the vocabulary's
            size.

    Attributes:
        architecture: llama.cpp's name of it, which begins its keys.
        label: of the heads, in the file's own title.
        lack: the note for a file without a tokenizer.
    """

    name = "gguf"
    architecture: ClassVar[str]
    label: ClassVar[str]
    lack: ClassVar[str]

    def __init__(self, target_gguf: str | None = None) -> None:
        self.target_gguf = target_gguf

    def with_target_file(self, path: str) -> Self:
        return type(self)(path)

    def matches(self, published: Published) -> bool:
        return published.config.get("general.architecture") == self.architecture

    def export(
        self, config: Any, values: dict[str, Any], tensors: dict[str, Tensor], most: int, **others: Any
    ) -> Exported:
        """A file of these tensors.

        Args:
            values: further keys of this architecture.
            most: tokens that llama.cpp drafts in a step.
            **others: keys of other parts of the metadata.
        """
        rope, factors = write_rope(config)
        own = {
            "block_count": config.num_layers,
            "embedding_length": config.hidden_size,
            "vocab_size": config.target_vocab_size,
            **{theirs: getattr(config, ours) for theirs, ours in LAYER_SIZES.items()},
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            **rope,
            **values,
        }
        metadata = {
            "general.architecture": self.architecture,
            "general.name": f"{self.label} for {public_name(config.target_name_or_path) or config.target_model_type}",
            **{f"{self.architecture}.{key}": value for key, value in own.items()},
            **read_tokenizer(self.target_gguf),
            **others,
        }
        if factors is not None:
            tensors[_ROPE_FACTORS] = factors
        file, model = f"{self.architecture}.gguf", shlex.quote(self.target_gguf or "TARGET.gguf")
        drafting = f"--spec-type draft-{self.architecture} --spec-draft-n-max {most}"
        command = f"llama-server -m {model} -md {{heads}}/{file} {drafting}"
        return Exported(metadata, tensors, file, (command,), notes=() if self.target_gguf else (self.lack,))


class GgufEagle3(Gguf):
    title = "EAGLE-3 heads in GGUF"
    settings = _FIXED
    kinds = ("eagle3",)
    architecture, label = "eagle3", "EAGLE-3"
    lack = "The file has no tokenizer; --target_gguf copies the target's."

    def read(self, published: Published, target: Target) -> Imported:
        reading = Reading(published, target)
        settings = read_shape(reading, "eagle3.") | _FIXED
        settings["feature_layers"] = read_layers(reading, *(f"eagle3.{name}" for name in _LAYERS))
        settings |= {flag: reading.flag(f"eagle3.{flag}") for flag in _FLAGS}
        reading.expect("eagle3.block_count", 1)
        reading.expect("eagle3.target_hidden_size", target.hidden_size)
        reading.expect("eagle3.attention.causal", True, may_lack=True)
        tensors, head_dim = dict(published), settings["head_dim"]
        settings["rope_parameters"] = read_rope(reading, "eagle3.", tensors, head_dim)
        reading.names, reading.tensors = _NAMES, (found := rename(tensors, _NAMES))
        if (ids := found.get("d2t")) is not None and ids.dim() == 1:
            found["d2t"] = ids - torch.arange(len(ids))
        settings |= {**read_draft_vocabulary(reading), "own_embedding": read_embedding(reading)}
        if published.setting(f"{OWN_KEY}.ttt_steps") is not None:
            settings["ttt_steps"] = reading.integer(f"{OWN_KEY}.ttt_steps")
        refuse_unread(reading, "eagle3.")
        # Vectors are stored in float32, whatever the heads have.
        wide = found.get("fc.weight")
        found = {name: as_wide_as(x, wide) if "norm" in name else x for name, x in found.items()}
        for name in (_Q, _K):
            if name in found and found[name].dim() == 2 and head_dim % 2 == 0 and len(found[name]) % head_dim == 0:
                found[name] = _to_halves(found[name], head_dim)
        return Imported("eagle3", settings, found, _NAMES)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        flags = [f"{name} {getattr(config, name)}" for name, fine in _FIXED.items() if getattr(config, name) != fine]
        layers, total = config.feature_layers, config.target_num_layers
        refuse_unwritable(
            self.title,
            (bool(flags), f"llama.cpp does not know {', '.join(flags)}; choose vllm"),
            (len(layers) != 3, f"llama.cpp taps three layers, these heads {layers}; choose speculators"),
            (total in layers, f"llama.cpp taps inputs of layers, not the last norm's output ({total} of {layers})"),
        )
        values = {
            "target_hidden_size": config.hidden_size,
            **{key: list(config.feature_layers) for key in _LAYERS},
            **{flag: getattr(config, flag) for flag in _FLAGS},
        }
        written = {_NAMES[name]: x for name, x in tensors.items() if name != "t2d"}
        for name in (_Q, _K):
            written[_NAMES[name]] = to_pairs(tensors[name], config.head_dim)
        if "d2t" in written:
            written["d2t"] = written["d2t"] + torch.arange(len(written["d2t"]), device=written["d2t"].device)
        return self.export(config, values, written, most=4, **{f"{OWN_KEY}.ttt_steps": config.ttt_steps})


def read_shape(reading: Reading, prefix: str) -> dict[str, Any]:
    """The shape of draft layers, whose sizes must be the target's."""
    settings: dict[str, Any] = {
        ours: reading.number(prefix + theirs) if ours == "rms_norm_eps" else reading.integer(prefix + theirs)
        for theirs, ours in LAYER_SIZES.items()
    }
    reading.expect(f"{prefix}embedding_length", reading.target.hidden_size)
    reading.expect(f"{prefix}vocab_size", reading.target.vocab_size, may_lack=True)
    for key in ("attention.value_length", "rope.dimension_count"):
        reading.expect(prefix + key, settings["head_dim"], may_lack=True)
    return settings


def read_layers(reading: Reading, *names: str) -> list[int]:
    """The layers under the first of these names that there is; the others may not contradict it."""
    name = next((name for name in names if name in reading.published.config), names[0])
    layers = reading.layers(name, 0, reading.target.num_layers - 1)
    for other in names:
        reading.expect(other, layers, may_lack=True)
    return layers


def refuse_unread(reading: Reading, prefix: str) -> None:
    """Every other key of the architecture may change what its graph computes."""
    published = reading.published
    if unread := sorted(name for name in published.config.keys() - published.asked if name.startswith(prefix)):
        reading.refuse(
            "the metadata has keys that heads here do not know, and that may change what they compute: "
            f"{', '.join(unread)}"
        )


def read_tokenizer(target_gguf: str | None) -> dict[str, Any]:
    """The tokenizer's keys of the target's file; without a file, those of none."""
    if target_gguf is None:
        return {"tokenizer.ggml.model": "none"}
    metadata = read_metadata(Path(target_gguf))
    if "tokenizer.ggml.model" not in metadata:
        raise ValueError(f"{target_gguf} has no tokenizer: give the GGUF file that llama.cpp runs the target with")
    return {name: value for name, value in metadata.items() if name.startswith("tokenizer.")}


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads: channel i of the first half and of the second become neighbours.

    >>> to_pairs(torch.arange(4)[:, None], head_dim=4).flatten().tolist()
    [0, 2, 1, 3]
    """
    paired: Tensor = weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return paired


def _to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_pairs`."""
    halved: Tensor = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return halved


# RoPE: llama.cpp has scaling by Llama 3's rule as a tensor of divisors.


def _find_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] float32, by which llama.cpp divides the frequencies of the default RoPE."""
    config = DecoderConfig(head_dim=head_dim, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    plain: Tensor = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return plain / scaled


def write_rope(config: Any) -> tuple[dict[str, Any], Tensor | None]:
    """RoPE's metadata, and divisors."""
    rope = config.rope_parameters
    kind, keys = rope["rope_type"], {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default":
        return keys, None
    if kind == "linear":
        return {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}, None
    if kind == "llama3":
        return keys, _find_factors(rope, config.head_dim)
    raise ValueError(f"rope_type is {kind!r}; heads are written to GGUF with default, linear and llama3")


def read_rope(reading: Reading, prefix: str, tensors: dict[str, Tensor], head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": reading.number(f"{prefix}rope.freq_base")}
    kind = reading.published.setting(f"{prefix}rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": reading.number(f"{prefix}rope.scaling.factor")}
    elif kind != "none":
        reading.refuse(f"{prefix}rope.scaling.type is {kind!r}; none and linear are read here")
    if (factors := tensors.pop(_ROPE_FACTORS, None)) is None:
        return rope
    own = target_rope(reading.target)
    rope = {**own, "rope_theta": rope["rope_theta"]}
    expected = _find_factors(rope, head_dim) if own["rope_type"] == "llama3" and head_dim % 2 == 0 else None
    if expected is None or expected.shape != factors.shape or not torch.allclose(expected, factors.float(), rtol=1e-4):
        reading.refuse(f"tensor {_ROPE_FACTORS} is not the scaling of the target's RoPE ({own['rope_type']})")
    return rope
