"""Medusa's published formats (github.com/FasterDecoding/Medusa), and vLLM's.

    first version     {i}.{j}.linear.{weight, bias}, {i}.{L}.weight for head i, block j and L blocks
    second version    the blocks only: the target's LM head scores
    whole models      the first version's names after `medusa_head.`, beside the target's own tensors
    vLLM              blocks.{i}.layers.{j}.{weight, bias}, lm_heads.{i}.weight

The number of heads and the version are seen from the tensors: published configs are wrong about them. vLLM served
Medusa up to 0.32; no engine does now.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from draftsmith.heads.formats.format import Exported, Format, Imported, vllm_command
from draftsmith.heads.formats.published import Published, refuse
from draftsmith.heads.formats.tensors import refuse_other_layer, rename, take_copies
from draftsmith.inference.targets.target import Target

_WHOLE = "medusa_head."  # before the heads' names in the checkpoint of a whole model
_VLLM = "medusa_heads."  # vLLM strips it
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def _name_parts(num_heads: int, num_layers: int, *, is_vllm: bool = False) -> dict[str, str]:
    """Our name -> theirs."""
    names = {}
    for i in range(num_heads):
        names[f"heads.{i}.lm_head.weight"] = f"lm_heads.{i}.weight" if is_vllm else f"{i}.{num_layers}.weight"
        for j in range(num_layers):
            for part in ("weight", "bias"):
                theirs = f"blocks.{i}.layers.{j}.{part}" if is_vllm else f"{i}.{j}.linear.{part}"
                names[f"heads.{i}.blocks.{j}.linear.{part}"] = theirs
    return names


def _count(tensors: Iterable[str], own_head: str) -> tuple[int, int]:
    """(number of heads, of blocks in each), by the largest numbers in the tensors' names.

    Args:
        own_head: matches a head's projection, whose first group is the head's number.
    """
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    heads = [int(match[1] or match[4]) for match in blocks]
    heads += [int(match[1]) for name in tensors if (match := re.fullmatch(own_head, name))]
    return 1 + max(heads, default=-1), 1 + max((int(match[2] or match[5]) for match in blocks), default=-1)


def _settings(num_heads: int, num_layers: int, shares_lm_head: bool) -> dict[str, Any]:
    return {"num_heads": max(1, num_heads), "num_layers": num_layers, "shares_lm_head": shares_lm_head}


class Medusa(Format):
    """The authors' names, by themselves or in the checkpoint of a whole model."""

    name = "medusa"
    title = "heads in the published Medusa format"
    kinds = ("medusa",)

    def matches(self, published: Published) -> bool:
        if "medusa_num_heads" in published.config or published.file.startswith("medusa_lm_head"):
            return True
        return published.has(r"(medusa_head\.)?\d+\.\d+\.linear\.weight")

    def read(self, published: Published, target: Target) -> Imported:
        tensors = dict(published)
        if any(name.startswith(_WHOLE) for name in tensors):
            own: dict[str, Tensor] = target.model.state_dict()
            take_copies(published.path, tensors, own)
            tensors = {name.removeprefix(_WHOLE): x for name, x in tensors.items()}
        sizes = _count(tensors, r"(\d+)\.\d+\.weight")
        names = _name_parts(*sizes)
        shares = not any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in tensors)
        notes = []
        if shares and str(published.setting("version")) != "2":
            notes.append("no head has a projection of its own, so all are scored by the target's LM head (version 2)")
        return Imported("medusa", _settings(*sizes, shares), rename(tensors, names), names, notes)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        refuse_other_layer(config)
        names = _name_parts(config.num_heads, config.num_layers)
        settings = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": config.target_name_or_path,
        }
        if config.shares_lm_head:
            settings["version"] = "2"
        file = "medusa_lm_head.safetensors" if config.shares_lm_head else "medusa_lm_head.pt"
        note = "No engine of today serves Medusa; the authors' code does."
        return Exported(settings, {names[name]: x for name, x in tensors.items()}, file, notes=(note,))


class VLLMMedusa(Format):
    """vLLM's names. Its loader drops biases without a word unless the config has `medusa_fc_bias`."""

    name = "vllm"
    title = "heads in vLLM's Medusa format"
    kinds = ("medusa",)

    def matches(self, published: Published) -> bool:
        return "MedusaModel" in published.architectures or published.has(
            r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight"
        )

    def read(self, published: Published, target: Target) -> Imported:
        tensors = {name.removeprefix(_VLLM): x for name, x in published.items()}
        sizes = _count(tensors, r"lm_heads\.(\d+)\.weight")
        take_copies(published.path, tensors, {"lm_head.weight": target.lm_head_weight()})
        names = _name_parts(*sizes, is_vllm=True)
        found = rename(tensors, names)
        if not published.setting("medusa_fc_bias", False):
            biases = [name for name in names if name.endswith("bias")]
            if any(name in found for name in biases):
                refuse(
                    published.path,
                    "config.json has no medusa_fc_bias, but there are biases: set it to true, or delete them",
                )
            for name in biases:
                if (weight := found.get(name.removesuffix("bias") + "weight")) is not None:
                    found.setdefault(name, weight.new_zeros(weight.shape[0]))
        shares = bool(published.setting("original_lm_head", False))
        return Imported("medusa", _settings(*sizes, shares), found, names)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        refuse_other_layer(config)
        names = _name_parts(config.num_heads, config.num_layers, is_vllm=True)
        settings = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.target_hidden_size,
            "vocab_size": config.target_vocab_size,
            "truncated_vocab_size": config.target_vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "num_lookahead_tokens": config.num_heads,
            "medusa_fc_bias": True,
        }
        written = {names[name]: x for name, x in tensors.items()}
        if config.shares_lm_head:
            settings["original_lm_head"] = True
            written["lm_head.weight"] = target.lm_head_weight()
        commands = (vllm_command("medusa", config.num_heads),)
        return Exported(settings, written, commands=commands, notes=("vLLM up to 0.32 serves Medusa, as chains.",))
