"""Published: a checkpoint of another project, opened: its config and all of its tensors."""

import json
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from draftsmith.heads.formats.gguf_file import read_gguf

OWN_KEY = "draftsmith"
# Keywords that say where on the hub a checkpoint is, and how it is fetched.
HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# Tables of a config whose keys are of something else.
_NO_SETTINGS = (OWN_KEY, "quantization_config", "auto_map", "id2label", "label2id")
# The first that a checkpoint has is read. Safetensors come first: a pickle is read only where there is nothing else.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
)
# What torch raises for files that are not whole.
_DAMAGE = (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError, struct.error)


@dataclass(frozen=True)
class Published(Mapping[str, Tensor]):
    """A checkpoint: a mapping from the names of its tensors to the tensors, on the CPU and in their stored dtype.

    Attributes:
        path: the folder or hub id that the user gave.
        config: its config.json; {} without one.
        file: the name of the file that holds its weights, or their index; "" when no weights were found.
        tensors: by name.
        hub: the keywords of `HUB_KEYS` that it was opened with.
        asked: the keys of the config that `setting` was asked for so far.
    """

    path: str
    config: dict[str, Any]
    file: str
    tensors: dict[str, Tensor]
    hub: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def architectures(self) -> str:
        """All `architectures` of the config, joined by blanks."""
        names = self.config.get("architectures")
        return " ".join(map(str, names)) if isinstance(names, list) else ""

    @property
    def is_gguf(self) -> bool:
        """Whether the config is the metadata of a GGUF file."""
        return "general.architecture" in self.config

    def setting(self, name: str, default: Any = None) -> Any:
        """A key of the config, also where it stands one level down (`eagle_config`, `transformer_layer_config`)."""
        self.asked.add(name)
        return next(iter(self._find_values(name).values()), default)

    def _find_values(self, name: str) -> dict[str, Any]:
        """Where a key stands -> its value there."""
        nested = {where: x for where, x in self.config.items() if isinstance(x, dict) and where not in _NO_SETTINGS}
        levels = {"config.json": self.config, **nested}
        return {where: level[name] for where, level in levels.items() if level.get(name) is not None}

    def find_contradictions(self) -> list[str]:
        """A problem for each key that was asked for and has different values at two places."""
        found = {name: self._find_values(name) for name in sorted(self.asked)}
        return [
            f"{name} is " + ", and ".join(f"{value!r} in {where}" for where, value in places.items())
            for name, places in found.items()
            if any(value != next(iter(places.values())) for value in places.values())
        ]

    def own_setting(self, name: str, default: Any = None) -> Any:
        """A key of ours that an export has left in the config for the way back (see `Exported`)."""
        own = self.config.get(OWN_KEY)
        return own.get(name, default) if isinstance(own, dict) else default

    def find(self, name: str) -> str | None:
        """The local path of another file of the checkpoint; None = it has no such file."""
        return find_file(self.path, name, **self.hub)

    def has(self, pattern: str) -> bool:
        """Whether some tensor's whole name matches."""
        return any(re.fullmatch(pattern, name) for name in self.tensors)


def refuse(path: str, *problems: str) -> NoReturn:
    """Raises ValueError with what is wrong with a checkpoint, one sentence each."""
    raise ValueError(f"{path} cannot be imported:\n" + "\n".join(f"  - {problem}" for problem in problems))


def is_gguf_file(path: str) -> bool:
    """Whether this is one GGUF file, which is a checkpoint by itself, and not a folder."""
    return path.endswith(".gguf") and Path(path).is_file()


def open_published(path: str, *, on_meta: bool = False, **hub: Any) -> Published:
    """Opens a checkpoint in a folder or hub repository, sharded or not, or a GGUF file.

    Args:
        on_meta: read the names and shapes only, where the file allows it.
        **hub: keywords of a download (`HUB_KEYS`).

    Raises:
        ValueError: a weights file that is damaged, truncated, missing from its index, or a pickle that holds more than
            tensors.
    """
    if (gguf_file := _find_gguf(Path(path) / hub.get("subfolder", ""))) is not None:
        metadata, tensors = read_gguf(gguf_file)
        return Published(path, metadata, gguf_file.name, tensors, hub)
    config_file = find_file(path, "config.json", **hub)
    config = {} if config_file is None else _read_json(path, config_file)
    for name in WEIGHT_FILES:
        if (file := find_file(path, name, **hub)) is not None:
            return Published(path, config, name, _read(path, name, file, hub, on_meta=on_meta), hub)
    return Published(path, config, "", {}, hub)


def find_file(path: str, name: str, **hub: Any) -> str | None:
    """The local path of a file of a folder or hub repository; None = there is no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    return found


def read_index(path: str, file: str) -> dict[str, str]:
    """Each tensor's name and the file that holds it, by an index file.

    Raises:
        ValueError: the index is damaged, or it names files outside the checkpoint.
    """
    name, places = Path(file).name, _read_json(path, file).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise ValueError(f"{path}: {name} has no weight_map of tensors and their files: copy the checkpoint again")
    if outside := sorted({shard for shard in places.values() if _leads_out(shard)}):
        raise ValueError(
            f"{path}: {name} names {', '.join(map(repr, outside))}, and may only name files of the checkpoint itself: "
            "do not use this checkpoint"
        )
    return places


def _leads_out(shard: str) -> bool:
    parts = PurePosixPath(shard.replace("\\", "/"))
    return not shard or parts.is_absolute() or ".." in parts.parts or ":" in shard


def _read_json(path: str, file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {Path(file).name} is not JSON ({error}): copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {Path(file).name} holds a {type(content).__name__}, and should hold a table")
    return content


def _find_gguf(path: Path) -> Path | None:
    """A GGUF file that was given itself, or the only one of a folder without other weights."""
    if is_gguf_file(str(path)):
        return path
    if not path.is_dir() or any((path / name).is_file() for name in WEIGHT_FILES):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} GGUF files: give one of them, such as {files[0]}")
    return files[0] if files else None


def _read(path: str, name: str, file: str, hub: dict[str, Any], *, on_meta: bool) -> dict[str, Tensor]:
    if not name.endswith(".index.json"):
        return _read_file(path, name, file, on_meta=on_meta)
    places = read_index(path, file)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if (found := find_file(path, shard, **hub)) is None:
            raise ValueError(f"{path}: {name} names the file {shard}, which is not there: copy the checkpoint again")
        tensors |= _read_file(path, shard, found, on_meta=on_meta)
    if lost := sorted(places.keys() - tensors.keys()):
        raise ValueError(f"{path}: {name} names tensors that its files do not hold: {', '.join(lost)}")
    return tensors


@contextmanager
def open_safetensors(path: str, file: str) -> Iterator[Any]:
    """Opens a safetensors file of a checkpoint.

    Raises:
        ValueError: the file is damaged, also while it is open.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {Path(file).name} is damaged or truncated ({error}): copy it again") from error


def _read_file(path: str, name: str, file: str, *, on_meta: bool) -> dict[str, Tensor]:
    if not name.endswith(".safetensors"):
        return _read_pickle(path, name, file, on_meta=on_meta)
    with open_safetensors(path, file) as opened:
        names = list(opened.keys())
        if on_meta:
            return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key in names}
        return {key: opened.get_tensor(key) for key in names}


def _read_pickle(path: str, name: str, file: str, *, on_meta: bool) -> dict[str, Tensor]:
    try:
        # Only files of torch 1.6 and later are archives, which can be mapped into memory.
        can_map = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="meta" if on_meta else "cpu", mmap=can_map, weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path}: {name} holds more than tensors, and unpickling such a file can run code: convert it to "
            "safetensors where you trust it"
        ) from error
    except _DAMAGE as error:
        raise ValueError(f"{path}: {name} is damaged or truncated ({error}): copy it again") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: {name} holds a {type(content).__name__} that is no table of tensors")
    return content
