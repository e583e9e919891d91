"""Checkpoints of draft heads on disk: written completely or not at all, and read strictly."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.heads.formats.published import Published, is_gguf_file, open_published
from draftsmith.heads.formats.registry import recognize
from draftsmith.heads.registration import known_kinds
from draftsmith.inference.targets.files import is_missing, naming_place

SCRATCH = ".incomplete"  # the folder, inside that of a checkpoint, into which files are written first
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|token_counts\.safetensors")


@contextmanager
def replace_checkpoint(directory: Path) -> Iterator[Path]:
    """Yields a folder to write a checkpoint into; afterwards its files take the place of those in `directory`.

    A full disk or a kill during writing leaves the previous checkpoint as it was, and the next save removes the
    leftovers. Weights are renamed into place before the JSON files. Files of an earlier save that this one does not
    have (another number of shards, counts of tokens) are removed last. A rename is atomic, so one weights file is
    always whole. A kill between two renames mixes two saves where several weights files are replaced: shards, or heads
    with an adapter.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, and heads are saved into a folder: give another name")
    with no_empty_folder(directory):
        # Inside the directory: its parent could be another file system (a mounted volume), or not ours to write.
        scratch = directory / SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            files = sorted(
                (file for file in scratch.rglob("*") if file.is_file()), key=lambda file: (file.suffix == ".json", file)
            )
            for file in files:
                place = directory / file.relative_to(scratch)
                place.parent.mkdir(exist_ok=True)
                file.replace(place)
            written = {file.name for file in files if _WEIGHTS.fullmatch(file.name)}
            for file in directory.iterdir() if written else ():
                if _WEIGHTS.fullmatch(file.name) and file.name not in written:
                    file.unlink()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def no_empty_folder(folder: Path) -> Iterator[None]:
    """After an error, `folder` and its parents go if they were not there before and have no files."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for place in missing:
                place.rmdir()
        raise


def read_head_type(path: str, **hub: Any) -> str | None:
    """The kind of the heads in a folder or hub repository; None = a checkpoint that is not ours, or a GGUF file.

    Raises:
        ValueError: there is no such folder or hub id, another file, or an unknown kind.
    """
    _check_place(path)
    if is_gguf_file(path) or _lacks_config(path, **hub):
        return None
    kind = _read_config(path, **hub).get("head_type")
    if kind is not None and kind not in known_kinds():
        raise ValueError(
            f"{path}: config.json has head_type {kind!r}; this release knows {', '.join(known_kinds())}. Is this a "
            "directory written by DraftHeads.save_pretrained? A kind from outside is known once its package is "
            "installed, or its module is imported"
        )
    return kind


def refuse_published(path: str, **hub: Any) -> NoReturn:
    """Says what a checkpoint holds whose `read_head_type` is None, and how to use it."""
    folder, lacks_config = Path(path) / hub.get("subfolder", ""), _lacks_config(path, **hub)
    if lacks_config and (folder / "model.safetensors").is_file():
        found = None  # ours have the names of published formats, without a config
    elif os.path.exists(path):
        found = recognize(open_published(path, on_meta=True, **hub))
    else:
        found = recognize(Published(path, _read_config(path, **hub), "", {}))  # no files of the hub for a message
    if found is not None:
        cure = found.cure or (
            "Pass target=model to DraftHeads.from_pretrained, which then imports them, or write them as heads of this "
            f"library: draftsmith import --checkpoint {shlex.quote(path)}"
        )
        raise ValueError(f"{path} holds {found.title}. {cure}")
    if is_gguf_file(path):
        raise ValueError(f"{path} holds no draft heads: give the GGUF file of the heads themselves")
    lack = "no config.json" if lacks_config else "a config.json without head_type"
    raise ValueError(f"{folder} has {lack}: give the folder that draftsmith train or save_pretrained wrote")


def _check_place(path: str) -> None:
    """Refuses a place that is no folder, no hub id and no GGUF file."""
    if os.path.isfile(path) and not is_gguf_file(path):
        raise ValueError(f"{path} is a file: give its folder")
    if is_missing(path):
        hint, parent = "", os.path.dirname(path)
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            hint = f"; {parent} is a folder here, so this is no hub id: give the folder of the downloaded heads"
        raise ValueError(f"the folder {path or repr(path)} does not exist{hint}")


def _lacks_config(path: str, **hub: Any) -> bool:
    return os.path.isdir(path) and not (Path(path) / hub.get("subfolder", "") / "config.json").is_file()


def _read_config(path: str, **hub: Any) -> dict[str, Any]:
    with naming_place(path):
        config, _ = PreTrainedConfig.get_config_dict(path, **hub)
    return dict(config)


def load_strictly(kind: type[Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.from_pretrained` of a kind of heads, in eval mode.

    Raises:
        ValueError: tensors are missing, unexpected, mis-shaped, truncated or not finite, each named.
    """
    kwargs["ignore_mismatched_sizes"] = True  # transformers' own error names no tensor
    try:
        load: Any = PreTrainedModel.from_pretrained
        heads, info = load.__func__(kind, path, *args, output_loading_info=True, **kwargs)  # not the kind's own method
    except SafetensorError as error:
        raise ValueError(
            f"{path}: the weights file is damaged or truncated ({error}); copy or train it again"
        ) from error
    differences = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": [
            f"{name} is {list(stored)} and should be {list(wanted)}"
            for name, stored, wanted in sorted(info["mismatched_keys"])
        ],
    }
    if found := "; ".join(f"{what}: {', '.join(names)}" for what, names in differences.items() if names):
        raise ValueError(f"{path}: the tensors do not fit config.json ({found})")
    for name, tensor in heads.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: tensor {name} holds NaN or infinite values; the checkpoint is not usable")
    return heads.eval()


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that `from_pretrained` was asked for; None = the file's."""
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"got dtype {dtype!r}; allowed are auto, float32, bfloat16 and float16, as strings or as torch's dtypes"
        )
    return found
