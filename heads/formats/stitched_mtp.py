"""MTP heads in the target's own checkpoint, the only place where vLLM and SGLang serve such heads.

The folder has links to the target's files, a file with the heads' tensors under the family's names, and an index.
Engines read every tensor of a file, whatever the index says. So files that hold older MTP modules are written again
without them.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads.formats.eagle.llama_keys import refuse_unwritable
from draftsmith.heads.formats.format import Exported, Format, Imported
from draftsmith.heads.formats.native_mtp import (
    DEEPSEEK,
    MIMO,
    OUTER_NORM,
    QWEN,
    Naming,
    find_tensors,
    read_native_modules,
)
from draftsmith.heads.formats.published import OWN_KEY, Published
from draftsmith.heads.formats.tensors import as_wide_as
from draftsmith.heads.modules.stock_layer import find_family
from draftsmith.inference.targets.target import Target

# model_type -> the names of its MTP tensors
FAMILIES: dict[str, Naming] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "mimo": MIMO,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
}
_FILE = "model-mtp.safetensors"
_INDEX = "model.safetensors.index.json"
_NOT_LINKED = ("config.json", "README.md", _INDEX, _FILE)
_PYTHON = (
    "from transformers import AutoModelForCausalLM, AutoTokenizer  # 5.24 or later\n\n"
    "model, tokenizer = AutoModelForCausalLM.from_pretrained({heads}), AutoTokenizer.from_pretrained({heads})\n"
    'inputs = tokenizer("Hello", return_tensors="pt")\n'
    "print(tokenizer.decode(model.generate(**inputs, use_mtp=True, max_new_tokens=64)[0]))"
)
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Stitched(Exported):
    """A target's checkpoint with other MTP modules.

    Attributes:
        checkpoint: the target's folder.
        replaced: the names of its own modules' tensors.
    """

    not_uploaded: ClassVar[str] = (
        "the folder is the target's whole checkpoint, and its links would upload the target's files: share the heads "
        "by themselves (upload the folder given as --heads), and export them where they are served"
    )
    checkpoint: Path = Path()
    replaced: frozenset[str] = frozenset()

    def save(self, folder: Path, at: str | None = None) -> None:
        super().save(folder, at)
        files = find_tensors(str(self.checkpoint))
        places = dict.fromkeys(self.tensors, self.file)
        for name in sorted(set(files.values())):
            kept = [one for one, file in files.items() if file == name and one not in self.replaced]
            # With a file of this name, readers would not look at the index.
            new_name = "model-target.safetensors" if name == "model.safetensors" else name
            places |= dict.fromkeys(kept, new_name)
            source, place = self.checkpoint / name, folder / new_name
            if len(kept) == sum(file == name for file in files.values()):
                place.symlink_to(source.resolve())
            elif kept:
                with safe_open(source, framework="pt") as opened:
                    save_file({one: opened.get_tensor(one) for one in kept}, place, metadata={"format": "pt"})
        for source in self.checkpoint.iterdir():
            if source.is_file() and source.suffix != ".safetensors" and source.name not in _NOT_LINKED:
                (folder / source.name).symlink_to(source.resolve())
        index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class VLLMMTP(Format):
    name: ClassVar[str] = "vllm"
    title: ClassVar[str] = "MTP modules in the target's own checkpoint"
    kinds = ("mtp",)
    # Here vLLM (0.32) passes the state before the module's final norm on to the next depth, SGLang the one after it.
    passed_before_norm: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    free: ClassVar[frozenset[str]] = frozenset()  # settings of a family that heads may have otherwise

    def matches(self, published: Published) -> bool:
        is_model = re.search("ForCausalLM|ForConditionalGeneration", published.architectures) is not None
        return is_model and published.has(
            r"(.*\.)?layers\.\d+\.eh_proj\.weight|mtp\.fc\.weight|model\.mtp_layers\.\d+\.input_proj\.weight"
        )

    def read(self, published: Published, target: Target) -> Imported:
        native = read_native_modules(published.path, target, **published.hub)
        settings = dict(native.settings)
        if settings["share_block"] and (steps := published.own_setting("num_steps")) is not None:
            settings["num_steps"] = steps
        if (norm_output := published.own_setting("norm_output")) is not None:
            settings["norm_output"] = norm_output
        # The heads get the dtype of the file, also where norms come in float32.
        wide, tensors = native.tensors.get("blocks.0.eh_proj.weight"), native.tensors
        outer = [name for name in tensors if OUTER_NORM.fullmatch(name) or name == "state_gain"]
        narrowed = {name: as_wide_as(tensors[name], wide) for name in outer}
        return replace(native, settings=settings, tensors=native.tensors | narrowed)

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        naming = self._find_naming(config, target)
        checkpoint = Path(str(target.model.config._name_or_path))
        if not (checkpoint / "config.json").is_file():
            raise ValueError(
                f"the target came from {str(checkpoint)!r}, which is no folder here, and MTP heads are served in the "
                "target's own checkpoint: download it, and load the target from its folder"
            )
        offset = find_family(config.stock_layer).norm_offset
        written: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name == "state_gain":
                continue
            _, index, ours = name.split(".", 2)
            theirs = naming.name(int(index), ours, target.num_layers)
            is_outer = ours in ("enorm.weight", "hnorm.weight", "norm.weight")
            written |= dict(_split_experts(theirs, tensor - offset if is_outer and offset else tensor))
        num_blocks = 1 if config.share_block else config.num_steps
        if naming is DEEPSEEK:  # published checkpoints have copies, which some releases of the engines read
            written |= dict(_find_copies(target, num_blocks))
        settings = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        own = {"num_steps": config.num_steps, "norm_output": config.norm_output}
        settings |= {"num_nextn_predict_layers": num_blocks, OWN_KEY: own}
        replaced = {one for one in find_tensors(str(checkpoint)) if naming.place(one, target.num_layers) is not None}
        return Stitched(
            settings,
            written,
            _FILE,
            (self.command(config),),
            notes=self.notes(config, target),
            checkpoint=checkpoint,
            replaced=frozenset(replaced),
        )

    def _find_naming(self, config: Any, target: Target) -> Naming:
        family = target.text_config.model_type
        known = ", ".join(FAMILIES)
        if family not in FAMILIES:
            raise ValueError(
                f"engines serve MTP only in checkpoints of families that have it ({known}), and this target is of "
                f"{family}: train eagle3 heads for it, or choose custom_generate"
            )
        if config.stock_layer is None:
            raise ValueError(
                f"these heads have a layer as Llama's, and engines run {family}'s own in its MTP modules: train on "
                "from the target's modules (MTPHeads.from_target_checkpoint in draftsmith.heads.kinds.mtp), or choose "
                "custom_generate"
            )
        naming = FAMILIES[family]
        free = self.free | ({"norm_output"} if family in self.passed_before_norm else set())
        wrong = {
            name: value
            for name, value in naming.settings.items()
            if name not in free and getattr(config, name) != value
        }
        if wrong:
            raise ValueError(
                f"engines run {family}'s MTP modules with "
                + ", ".join(f"{name} {value} (these heads: {getattr(config, name)})" for name, value in wrong.items())
                + ": train heads so, or choose custom_generate"
            )
        return naming

    def notes(self, config: Any, target: Target) -> tuple[str, ...]:
        family = target.text_config.model_type
        if family not in self.passed_before_norm or config.num_steps == 1 or not config.norm_output:
            return ()
        return (
            f"vLLM passes {family}'s state before the module's final norm on to the second draft and later ones, and "
            "these heads were trained with the state after it (norm_output): fewer of these drafts are accepted. For "
            "vLLM, train with norm_output false.",
        )

    def command(self, config: Any) -> str:
        speculation = {"method": "mtp", "num_speculative_tokens": config.num_steps}
        return f"vllm serve {{heads}} --speculative-config '{json.dumps(speculation)}'"


class SGLangMTP(VLLMMTP):
    name = "sglang"
    passed_before_norm = ()

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        num_blocks = 1 if config.share_block else config.num_steps
        refuse_unwritable(
            "MTP modules for SGLang",
            (num_blocks > 1, f"SGLang reads one module, and these heads have {num_blocks}; choose vllm"),
        )
        return super().write(config, tensors, target)

    def command(self, config: Any) -> str:
        steps = config.num_steps
        return (
            "python -m sglang.launch_server --model-path {heads} --speculative-algorithm NEXTN "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
        )


class TransformersMTP(VLLMMTP):
    """transformers reads modules only at the layers that their model's class names, whatever the target's depth."""

    name = "transformers"
    passed_before_norm = ()
    free = frozenset({"zero_first_embedding"})  # not zero there: a difference of one slot

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        exported = super().write(config, tensors, target)
        family, patterns = target.text_config.model_type, target.model._keys_to_ignore_on_load_unexpected or []
        unseen = [name for name in exported.tensors if not any(re.search(pattern, name) for pattern in patterns)]
        refuse_unwritable(
            "MTP modules for transformers",
            (
                not hasattr(target.text_config, "num_mtp_layers"),
                f"this release of transformers ({transformers.__version__}) has no MTP for {family}; choose vllm",
            ),
            (
                bool(unseen),
                f"its class for {family} reads {' and '.join(patterns) or 'none'}, and the modules of this target of "
                f"{target.num_layers} layers would be elsewhere ({', '.join(unseen[:1])}); choose vllm",
            ),
        )
        return replace(exported, commands=(), python=_PYTHON)

    def notes(self, config: Any, target: Target) -> tuple[str, ...]:
        one = "transformers applies each module once, so one module drafts one token a step."
        return (one,) if config.share_block and config.num_steps > 1 else ()


def _split_experts(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """transformers' stacks of experts as the matrices of single experts, which checkpoints have."""
    match = _STACK.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    for number, matrix in enumerate(tensor):
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{match[1]}.{number}.{part}.weight", half


def _find_copies(target: Target, num_blocks: int) -> Iterable[tuple[str, Tensor]]:
    embedding: Any = target.embed_tokens
    table: Tensor = embedding.weight.detach()
    lm_head = target.lm_head_weight()
    for index in range(target.num_layers, target.num_layers + num_blocks):
        yield f"model.layers.{index}.embed_tokens.weight", table.clone()
        yield f"model.layers.{index}.shared_head.head.weight", torch.clone(lm_head)
