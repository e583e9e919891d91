"""EAGLE-3 and P-EAGLE as vLLM and SGLang serve them: what they read, under which keys, and what they cannot do."""

import re
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.heads.formats.eagle.eagle3 import FLAGS, IDS, LAYER, Eagle3, authors_layers
from draftsmith.heads.formats.eagle.llama_keys import SILU, refuse_unwritable
from draftsmith.heads.formats.format import Exported, vllm_command
from draftsmith.heads.formats.published import OWN_KEY
from draftsmith.heads.formats.tensors import target_table
from draftsmith.inference.targets.target import Target


def write_masks(config: Any, tensors: dict[str, Tensor], target: Target) -> tuple[int | None, dict[str, Tensor]]:
    """The mask token, and the tensors under ModelOpt's names, which speculators and vLLM have too.

    Heads with `mask_hidden` (P-EAGLE) get a table of embeddings with the mask's in it: in the last token's row, where
    the heads have no table of their own.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (match := LAYER.fullmatch(name)) is not None:
            number = 0 if match[1] is None else int(match[1]) + 1
            name = f"layers.{number}.{match[2]}"
        named[name] = tensor
    if "mask_hidden" not in named:
        return None, named
    named["mask_hidden"] = named["mask_hidden"][None, None]
    if (mask := named.pop("mask_embedding", None)) is None:
        return config.mask_token_id, named
    table = target_table(target).to(mask.dtype)
    token = config.target_vocab_size - 1
    table[token] = mask
    named["embed_tokens.weight"] = table
    return token, named


class VLLMEagle3(Eagle3):
    name = "vllm"
    title = "EAGLE-3 for vLLM"
    settings = SILU
    kinds: ClassVar[tuple[str, ...]] = ("eagle3", "parallel")
    file = "model.safetensors"
    python = ""

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        token, named = write_masks(config, tensors, target)
        exported = super().write(config, named, target)
        ids = config.feature_layers
        keys = {
            **exported.config,
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": config.target_hidden_size,
            "attention_bias": config.qkv_bias,
            **{flag: getattr(config, flag, False) for flag in FLAGS},
        }
        if ids != authors_layers(config.target_num_layers):
            # At both levels: readers look at one or the other.
            keys |= {IDS: ids, "eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
        if token is None:
            return replace(exported, config=keys, commands=(vllm_command("eagle3", 3),))
        command = vllm_command("eagle3", config.num_depths, parallel_drafting=True)
        return replace(exported, config={**keys, "pard_token": token}, commands=(command,))

    def refuse(self, config: Any) -> None:
        refuse_unwritable(self.title, *engine_limits(config, "vLLM"))


UNREAD = "norm_before_residual"  # the one flag that SGLang does not know


class SGLangEagle3(Eagle3):
    name = "sglang"
    title = "EAGLE-3 for SGLang"
    settings = SILU
    file = "model.safetensors"
    python = ""
    commands: tuple[str, ...] = (
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {heads} --speculative-num-steps 5 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 8",
    )

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        named = tensors if config.num_layers == 1 else write_masks(config, tensors, target)[1]
        exported = super().write(config, named, target)
        flags = {flag: getattr(config, flag) for flag in FLAGS if flag != UNREAD}
        keys = {**exported.config, "architectures": ["LlamaForCausalLMEagle3"], **flags}
        if config.feature_layers != authors_layers(config.target_num_layers):
            ids = [layer - 1 for layer in config.feature_layers]  # SGLang taps the layer after the id
            keys["eagle_config"] = {IDS: ids, "use_aux_hidden_state": True}
            keys[OWN_KEY] = {**keys[OWN_KEY], "feature_layers": config.feature_layers}
        # SGLang reads the windows of all layers from its command, and layers above the first have another norm's name.
        commands = self.commands
        if config.sliding_window is not None:
            commands = tuple(f"{line} --speculative-draft-window-size {config.sliding_window}" for line in commands)
        norm = re.compile(r"(layers\.[1-9]\d*)\.input_layernorm\.")
        renamed = {norm.sub(r"\1.hidden_norm.", name): tensor for name, tensor in exported.tensors.items()}
        return replace(exported, config=keys, tensors=renamed, commands=commands)

    def refuse(self, config: Any) -> None:
        refuse_unwritable(
            self.title,
            (getattr(config, UNREAD), f"SGLang does not read {UNREAD}; choose vllm or speculators"),
            (config.qkv_bias or config.o_bias, "its attention has no biases there; choose vllm"),
            (config.own_embedding, "SGLang takes the target's embeddings; choose vllm"),
            (0 in config.feature_layers, "SGLang cannot tap the embeddings (layer 0)"),
            (bool(config.layer_types), "SGLang has one window for all layers; choose vllm or speculators"),
            *engine_limits(config, "SGLang"),
        )


def engine_limits(config: Any, engine: str) -> tuple[tuple[bool, str], ...]:
    """What both engines cannot do: (whether the heads have it, the reason)."""
    ids = config.feature_layers
    return (
        (config.hidden_act != "silu", f"{engine} knows silu only, not {config.hidden_act}"),
        (ids != sorted(ids), f"{engine} sorts the layer ids {ids}, and fc reads them in their own order"),
        (config.target_num_layers in ids, f"{engine} taps the inputs of layers, not the last norm's output"),
        (len(ids) != 3, f"{engine} taps three layers, these heads {len(ids)}"),
        (config.qkv_bias != config.o_bias, "attention_bias there means all four projections or none"),
    )
