"""The adapter of the target that heads were trained with (Medusa-2): stores it, and applies it to a target.

Heads that were trained together with an adapter of the target draft for the adapted target. The adapter is stored
beside the heads' weights, in PEFT's format:

    config.json, model.safetensors                               the heads
    adapter/adapter_config.json, adapter/adapter_model.safetensors   the target's adapter
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

FOLDER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_MERGED = "_draftsmith_adapter"  # attribute of a model: the adapter merged into its weights
_HASH = "_draftsmith_adapter_hash"  # attribute of a model: `hash_adapter` of the adapter that `load_adapter` gave it
# The keys of an adapter's configuration that change the target's outputs.
_OF_THE_MODEL = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
_INSTALL_HINT = "these heads have an adapter of the target, which needs peft: pip install 'draftsmith[peft]'"


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter beside heads that were loaded.

    Attributes:
        heads: the heads' folder or hub id.
        folder: the adapter's folder in it.
        hub: keywords of a download, such as `revision` and `token`.
    """

    heads: str
    folder: str
    hub: dict[str, Any] = field(default_factory=dict)

    def find(self) -> Path:
        """The adapter's local folder; from the hub it is downloaded."""
        hub = {**self.hub}
        subfolder = "/".join(part for part in (hub.pop("subfolder", ""), self.folder) if part)
        try:
            files = [Path(str(cached_file(self.heads, name, subfolder=subfolder, **hub))) for name in _FILES]
        except OSError as error:
            raise ValueError(
                f"the heads of {self.heads} were trained with an adapter of the target, but their folder {subfolder!r} "
                f"does not have it ({error}): copy or download that folder too"
            ) from error
        return files[0].parent


def find_adapter_of(heads: str) -> Path | None:
    """The local folder of the adapter that stored heads were trained with; None = without an adapter.

    Args:
        heads: their folder or hub id.
    """
    folder = PreTrainedConfig.get_config_dict(heads)[0].get("target_adapter")
    return StoredAdapter(heads, folder).find() if folder else None


def hash_adapter(folder: Path) -> str:
    """A short name of a stored adapter that depends only on its weights and settings."""
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    kept = json.dumps({name: settings.get(name) for name in _OF_THE_MODEL}, sort_keys=True)
    return hashlib.sha256(kept.encode() + (folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16]


def find_adapter_hash(model: nn.Module) -> str | None:
    """`hash_adapter` of the adapter that `load_adapter` gave to a model; None = no adapter."""
    found: str | None = getattr(model, _HASH, None)
    return found


def write_adapter(adapter: StoredAdapter | nn.Module, folder: Path) -> None:
    """Writes an adapter into a new folder: a stored one, or the adapter of a PEFT model."""
    if isinstance(adapter, StoredAdapter):
        source = adapter.find()
        folder.mkdir()
        for name in _FILES:
            shutil.copyfile(source / name, folder / name)
    else:
        model: Any = adapter
        # "auto" would ask the hub whether the vocabulary has grown.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink()  # an empty model card


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has an adapter of PEFT, or one that `load_adapter` merged into its weights."""
    return bool(getattr(model, "peft_config", None)) or hasattr(model, _MERGED)


def load_adapter(model: nn.Module, folder: Path, *, merge: bool) -> nn.Module:
    """A frozen PEFT model around `model`, whose layers are changed in place.

    With `merge`: `model` itself, with the adapter added to its weights; a second call adds nothing.

    Raises:
        ValueError: the model already has an adapter, the adapter does not fit the model, or peft is not installed.
    """
    place = str(folder.resolve())
    if merge and getattr(model, _MERGED, None) == place:
        return model
    if is_adapted(model):
        raise ValueError(
            "the target already has an adapter, and these heads have their own: give the target without adapters "
            "(model.unload() removes them)"
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(_INSTALL_HINT) from error
    try:
        # In the target's dtype, like its other weights; PEFT would store half precision in float32.
        adapted: Any = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"the adapter in {folder} does not fit the target, or is damaged: {error}") from error
    adapted.eval()
    if merge:
        adapted = adapted.merge_and_unload()
        setattr(adapted, _MERGED, place)
    setattr(adapted, _HASH, hash_adapter(folder))
    return cast(nn.Module, adapted)
