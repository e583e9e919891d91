"""Format: what another project's checkpoints look like, and how heads of ours become one and back.

A format knows names, shapes and settings only. It never builds heads, so it imports no kind of heads.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.heads.formats.gguf_file import write_gguf
from draftsmith.heads.formats.published import Published, refuse
from draftsmith.inference.targets.target import Target


@dataclass(frozen=True)
class Imported:
    """Heads read from another format.

    Attributes:
        kind: of `draftsmith.HEAD_TYPES`.
        settings: keys of the kind's config, in place of those that the target suggests.
        tensors: by their names in our heads.
        names: our name -> the checkpoint's, for messages; names that are alike may be left out.
        notes: what the checkpoint leaves open, and how it was read, one sentence each.
    """

    kind: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, heads: nn.Module, path: str) -> None:
        """Refuses tensors that are not exactly those of `heads`, which may be on the meta device.

        Raises:
            ValueError: one message with all tensors that are unknown, missing, mis-shaped or not finite, by the
                checkpoint's names.
        """
        wanted, given = heads.state_dict(), self.tensors

        def name(ours: str) -> str:
            return self.names.get(ours, ours)

        found = [f"tensor {name(key)} is missing" for key in sorted(wanted.keys() - given.keys())]
        found += [
            f"tensor {name(key)} has no place in {self.kind} heads" for key in sorted(given.keys() - wanted.keys())
        ]
        for key in sorted(wanted.keys() & given.keys()):
            if wanted[key].shape != given[key].shape:
                found.append(f"tensor {name(key)} is {list(given[key].shape)} and should be {list(wanted[key].shape)}")
            elif given[key].element_size() == 1 and wanted[key].is_floating_point():
                found.append(f"tensor {name(key)} is quantized ({given[key].dtype}): take a checkpoint in bfloat16")
            elif given[key].is_floating_point() != wanted[key].is_floating_point():
                found.append(f"tensor {name(key)} is {given[key].dtype} and should be {wanted[key].dtype}")
            elif given[key].is_floating_point() and not torch.isfinite(given[key]).all():
                found.append(f"tensor {name(key)} holds NaN or infinite values")
        if found:
            refuse(path, *found)


@dataclass(frozen=True)
class Exported:
    """Heads in another format, ready to be written.

    Attributes:
        config: of the file config.json. Settings of ours that the format has no key for stand under `OWN_KEY`.
        tensors: of the weights file.
        file: its name.
        commands: how to serve them, one command for each engine; `{heads}` and `{target}` stand for the paths.
        python: how to decode with them where no command does; `{heads}` and `{target}` stand for the quoted paths.
        notes: what a user of the files should know, one sentence each.
        files: further text files; `{heads}` in them stands for the quoted hub id of the heads, or for None.
        not_uploaded: why a folder of these files is not uploaded, and what to do; "" = it may be.
    """

    not_uploaded: ClassVar[str] = ""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    commands: tuple[str, ...] = ()
    python: str = ""
    notes: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)

    def save(self, folder: Path, at: str | None = None) -> None:
        """Writes config.json and the weights into a folder; of a GGUF file `config` is the metadata.

        Args:
            at: the hub id under which users will find the heads, if there is one.
        """
        for name, text in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text.replace("{heads}", json.dumps(at) if at else "None"), encoding="utf-8")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        if self.file.endswith(".gguf"):
            write_gguf(folder / self.file, self.config, tensors)
            return
        if self.config:
            (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        if self.file.endswith(".safetensors"):
            save_file(tensors, folder / self.file, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / self.file)


def vllm_command(method: str, num_tokens: int, **more: Any) -> str:
    """How vLLM serves the target with the heads, as `Exported.commands` has it."""
    speculation = {"method": method, "model": "{heads}", "num_speculative_tokens": num_tokens, **more}
    return f"vllm serve {{target}} --speculative-config '{json.dumps(speculation)}'"


class Format(ABC):
    """One format of other projects.

    Attributes:
        name: as `--format` has it.
        title: as in "this folder holds TITLE".
        kinds: of heads that can be written in it.
        settings: that new heads need where the kind's defaults are others, so that they can be written.
        needs_this_library: whether who decodes with such heads needs this library, so that no other choice of format
            names it.
        cure: what to do with a checkpoint of a format that is named, but not read; None = it is read.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[dict[str, Any]] = {}
    needs_this_library: ClassVar[bool] = False
    cure: str | None = None

    @abstractmethod
    def matches(self, published: Published) -> bool:
        """Whether a checkpoint is in this format. Its tensors may be on the meta device."""

    def read(self, published: Published, target: Target) -> Imported:
        """Every tensor of the checkpoint under our name for it; those that have none keep their own name.

        Raises:
            ValueError: the config says something that heads here cannot be, or that does not fit the target; or
                checkpoints of this format are only named.
        """
        raise ValueError(f"{published.path} holds {self.title}, which is not read. {self.cure}")

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        """The inverse of `read`.

        Args:
            config: of heads whose kind is one of `kinds`; tensors: their state dict.

        Raises:
            ValueError: settings that the format, or the engines that read it, cannot express.
        """
        raise ValueError(f"heads are not written as {self.title}")

    def with_target_file(self, path: str) -> Format:
        """This format, with what it copies from the target's own file (`--target_gguf`).

        Raises:
            ValueError: it copies nothing.
        """
        raise ValueError(f"{self.title} takes nothing from the target's file {path}: leave --target_gguf out")
