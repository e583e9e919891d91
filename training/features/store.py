"""The target's states on disk: safetensors shards whose rows are found by their tokens.

A store is a folder. `index.json` holds its `StoreSettings`. A shard gets its name when it is complete. A row is one
tokenized conversation. Its states depend only on its tokens, so the tokens are the key. Runs of any order, batches,
packing or loss mask find them.

Legend: R rows of a shard, N tokens of all of them (no padding), T tokens of a row, D hidden size.

    lengths [R] int64, keys [R] int64      tokens of each row, and the hash of their ids
    input_ids [N] int32
    hidden.I [N, D]                        the input of layer I: the residual stream, before any norm
    last [N, D]                            the last state, after the final norm
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.training.data.collation import hash_tokens
from draftsmith.training.data.set_statistics import describe_size
from draftsmith.training.whole_files import replacing, write_text

FORMAT = 3


@dataclass(frozen=True)
class TargetIdentity:
    """The target of stored states.

    Attributes:
        name: folder or hub id, for messages only.
        config_hash: of its configuration's non-default values.
        weights_hash: of its token embedding and its LM head, in `dtype`.
        adapter_hash: of the adapter that heads brought along (Medusa-2); None = no adapter.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: str
    config_hash: str
    weights_hash: str
    adapter_hash: str | None = None


@dataclass(frozen=True)
class StoreSettings:
    """The contents of `index.json`.

    Attributes:
        tensors: names of the stored tensors, in the target's dtype.
        num_shards, data_hash: of the extraction's plan.
    """

    target: TargetIdentity
    tensors: list[str]
    num_shards: int = 0
    data_hash: str = ""
    format: int = FORMAT

    @property
    def bytes_per_token(self) -> int:
        """Exact, for the tensors [N, ...] of a shard."""
        size: int = getattr(torch, self.target.dtype).itemsize
        return 4 + len(self.tensors) * self.target.hidden_size * size


@dataclass(frozen=True)
class StoredRow:
    """input_ids: [T]. tensors: by the names of `StoreSettings.tensors`, each [T, ...]."""

    input_ids: Tensor
    tensors: Mapping[str, Tensor]


def tensor_name(layer: int, num_layers: int) -> str:
    """The name of hidden_states[layer] in a store."""
    return "last" if layer == num_layers else f"hidden.{layer}"


def name_tensors(feature_layers: Iterable[int], num_layers: int) -> list[str]:
    """The tensors that heads need: the states that they tap, and the last one for the teacher."""
    return sorted({"last", *(tensor_name(layer, num_layers) for layer in feature_layers)})


def hash_text(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


class DiskFullError(OSError):
    """There is no room for a shard; the shards before it are complete."""


def write_shard(folder: Path, name: str, rows: Sequence[StoredRow]) -> None:
    """Writes rows as one complete shard, or leaves none.

    Raises:
        DiskFullError: says how to go on.
    """
    tensors = {key: torch.cat([row.tensors[key].cpu() for row in rows]).contiguous() for key in rows[0].tensors}
    tensors["input_ids"] = torch.cat([row.input_ids.int().cpu() for row in rows])
    tensors["lengths"] = torch.tensor([len(row.input_ids) for row in rows])
    tensors["keys"] = torch.tensor([hash_tokens(row.input_ids) for row in rows])
    try:
        with replacing(folder / f"{name}.safetensors") as scratch:
            save_file(tensors, scratch)
            shutil.copymode(folder / "index.json", scratch)  # safetensors gives only the owner access
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        size = sum(value.nbytes for value in tensors.values())
        raise DiskFullError(
            f"cannot write {name} ({describe_size(size)}) to {folder}: {error}. The shards before it are complete: "
            "free some space and run the same command again, which continues after them"
        ) from error


class FeatureStore:
    """The rows of a store, memory-mapped.

    Attributes:
        num_finished: complete shards.

    Raises:
        ValueError: no store there, or a shard that is cut off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = read_settings(folder)
        names = sorted(finished_shards(folder))
        self.num_finished = len(names)
        self._places: dict[int, tuple[Any, int, int]] = {}  # key -> (open shard, first token, end)
        for name in names:
            shard = _open_shard(folder / f"{name}.safetensors")
            lengths = shard.get_tensor("lengths")
            ends = lengths.cumsum(0)
            keys, starts = shard.get_tensor("keys"), ends - lengths
            for key, start, end in zip(keys.tolist(), starts.tolist(), ends.tolist(), strict=True):
                self._places.setdefault(key, (shard, start, end))

    def __len__(self) -> int:
        return len(self._places)

    def has(self, input_ids: Tensor) -> bool:
        """Whether the row of these tokens ([T]) is stored."""
        return hash_tokens(input_ids) in self._places

    def read(self, input_ids: Tensor, names: Iterable[str]) -> dict[str, Tensor] | None:
        """Returns the named tensors, each [T, ...], of the row of these tokens ([T]); None if it is not stored.

        The tensors are mapped from the file: do not change them.
        """
        place = self._places.get(hash_tokens(input_ids))
        if place is None:
            return None
        shard, start, end = place
        found = {name: shard.get_slice(name)[start:end] for name in ["input_ids", *names]}
        if not torch.equal(found.pop("input_ids").long(), input_ids.cpu().long()):
            return None  # another row with the same hash
        return found


def read_settings(folder: Path) -> StoreSettings:
    """Reads `index.json`; raises ValueError if it is missing or of another format."""
    try:
        values = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no features ({error}): write them with draftsmith features --output_dir {folder}"
        ) from error
    if values.get("format") != FORMAT:
        raise ValueError(
            f"{folder}/index.json has format {values.get('format')!r}, this release reads {FORMAT}: extract again"
        )
    return StoreSettings(**{**values, "target": TargetIdentity(**values["target"])})


def write_settings(folder: Path, settings: StoreSettings) -> None:
    """Writes `index.json` completely or not at all; several processes may do so at once."""
    write_text(folder / "index.json", json.dumps(dataclasses.asdict(settings), indent=2) + "\n")


def finished_shards(folder: Path) -> set[str]:
    """The names of the complete shards."""
    return {path.stem for path in folder.glob("*.safetensors")}


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")  # checks its size
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it and extract again, which writes only what is missing"
        ) from error
