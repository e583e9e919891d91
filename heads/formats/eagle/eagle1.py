"""EAGLE-1 as its authors, vLLM and SGLang read it. EAGLE-2 and HASS have the same files.

fc.weight [D, 2D] (embedding, hidden), fc.bias if `bias` is true OR ABSENT, layers.0.* without an input norm;
embed_tokens.weight may be there. No final norm, no LM head: both are the target's.
"""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.formats.eagle.llama_keys import (
    SILU,
    Reading,
    authors_code,
    authors_limits,
    drop_rope_tables,
    name_dtype,
    read_biases,
    read_decoder,
    read_embedding,
    read_own_settings,
    refuse_unwritable,
    write_decoder,
)
from draftsmith.heads.formats.format import Exported, Format, Imported, vllm_command
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.inference.targets.target import Target

# Settings of ours that no key of the format has.
_OWN = ("ttt_steps", "feature_noise", "embedding_scale")
_SGLANG = "LlamaForCausalLMEagle"


class Eagle1(Format):
    name = "eagle"
    title = "heads in the published EAGLE-1 or EAGLE-2 format"
    kinds = ("eagle",)
    file = "pytorch_model.bin"
    architecture = "LlamaForCausalLM"
    commands: tuple[str, ...] = ()
    python: str = authors_code(is_eagle3=False)

    def matches(self, published: Published) -> bool:
        if "ForCausalLMEagle" in published.architectures or "EagleLlama" in published.architectures:
            return True
        is_one_layer = published.config.get("num_hidden_layers") == 1
        if len(published):
            has_layer = published.has(r"layers\.0\.self_attn\..*") and ("fc.weight" in published or is_one_layer)
            return has_layer and "lm_head.weight" not in published
        # The authors' config is a Llama's of one layer.
        return is_one_layer and published.architectures == "LlamaForCausalLM"

    def read(self, published: Published, target: Target) -> Imported:
        reading = Reading(published, target, dict(published))
        layers = {match[1] for name in published if (match := re.match(r"layers\.(\d+)\.", name))}
        settings = read_decoder(reading, len(layers))
        drop_rope_tables(reading, settings)
        settings |= {
            **read_biases(reading, "layers.0."),
            "fc_bias": self._read_fc_bias(reading),
            "own_embedding": read_embedding(reading),
            "embedding_scale": 1.0,
            **read_own_settings(reading, _OWN),
        }
        fc = reading.tensors.get("fc.weight")
        if fc is not None and fc.dim() == 2:
            reading.tensors["fc.weight"] = scale_embeddings(fc, 1 / settings["embedding_scale"])
        return reading.finish("eagle", settings)

    def _read_fc_bias(self, reading: Reading) -> bool:
        """Whether fc has a bias. SGLang always has one, so a bias of zeros there stands for none."""
        published, bias = reading.published, reading.tensors.get("fc.bias")
        is_sglang = _SGLANG in published.architectures.split()
        stated = published.own_setting("fc_bias", published.setting("bias", True))
        if bias is None:
            if stated and published.setting("bias") is None and not is_sglang:
                reading.refuse('config.json has no "bias", which means true: where fc has none, set "bias" to false')
            return bool(stated)
        if stated or (is_sglang and bias.any()):
            return True
        if bias.any():
            reading.refuse('config.json has "bias": false, and tensor fc.bias is not zero')
        del reading.tensors["fc.bias"]
        return False

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        self.refuse(config)
        keys = {
            "architectures": [self.architecture],
            **write_decoder(config),
            "bias": config.fc_bias,
            "qkv_bias": config.qkv_bias,
            "torch_dtype": name_dtype(tensors),
            OWN_KEY: {key: getattr(config, key) for key in _OWN},
        }
        fc = scale_embeddings(tensors["fc.weight"], config.embedding_scale)
        return Exported(keys, {**tensors, "fc.weight": fc}, self.file, self.commands, self.python)

    def refuse(self, config: Any) -> None:
        """Raises ValueError for settings that the readers of this format do not know."""
        refuse_unwritable(
            "the authors' EAGLE-1",
            (config.o_bias, "their code has no bias in the attention's output projection"),
            *authors_limits(config),
        )


def scale_embeddings(fc: Tensor, factor: float) -> Tensor:
    """fc's weight [D, 2D], its columns for embeddings multiplied. Published heads have no factor elsewhere."""
    size = fc.shape[1] // 2
    return torch.cat([(fc[:, :size] * factor).to(fc.dtype), fc[:, size:]], dim=1)


class VLLMEagle1(Eagle1):
    name = "vllm"
    title = "EAGLE-1 for vLLM"
    settings = SILU
    file = "model.safetensors"
    architecture = "EagleLlamaForCausalLM"
    python = ""
    commands = (vllm_command("eagle", 3),)

    def refuse(self, config: Any) -> None:
        refuse_unwritable(
            self.title,
            (config.fc_bias, "vLLM drops fc.bias silently; choose sglang or eagle, or train with fc_bias=false"),
            (config.own_embedding, "vLLM takes the target's embeddings for EAGLE-1; choose eagle"),
            (config.o_bias, "vLLM reads qkv_bias, and no bias of the output projection beside it"),
            (config.hidden_act != "silu", f"vLLM knows silu only, not {config.hidden_act}"),
            (config.sliding_window is not None, "EAGLE-1 of vLLM knows no sliding_window"),
        )


class SGLangEagle1(Eagle1):
    name = "sglang"
    title = "EAGLE-1 for SGLang"
    settings = SILU
    file = "model.safetensors"
    architecture = _SGLANG
    python = ""
    commands = (
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE "
        "--speculative-draft-model-path {heads} --speculative-num-steps 5 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 8",
    )

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        """SGLang's fc has a bias whatever `bias` says, and its attention would get biases from a true."""
        exported = super().write(config, tensors, target)
        own = {**exported.config[OWN_KEY], "fc_bias": config.fc_bias}
        weight = exported.tensors["fc.weight"]
        bias = tensors.get("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
        return replace(
            exported,
            config={**exported.config, "bias": False, OWN_KEY: own},
            tensors={**exported.tensors, "fc.bias": bias},
        )

    def refuse(self, config: Any) -> None:
        refuse_unwritable(
            self.title,
            (config.qkv_bias or config.o_bias, "its attention has no biases there; choose vllm or eagle"),
            (config.own_embedding, "SGLang takes the target's embeddings; choose eagle"),
            (config.hidden_act != "silu", f"SGLang knows silu only, not {config.hidden_act}"),
            (config.sliding_window is not None, "EAGLE-1 of SGLang knows no sliding_window"),
        )
