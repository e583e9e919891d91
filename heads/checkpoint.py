"""How the files of a checkpoint reach the disk: completely, or not at all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def replace_checkpoint(directory: Path) -> Iterator[Path]:
    """Yields a folder to write a checkpoint into; afterwards its files take the place of those in `directory`.

    A full disk or a kill while they are written leaves the previous checkpoint as it was; what such a save left behind
    is removed by the next. Weights are renamed into place before the JSON files, and weights of an earlier save under
    other names (another number of shards) are removed last. Renaming is atomic for one weights file; where shards of
    the same names are replaced, or weights and those of an adapter in a folder beside them, a kill between two of them
    mixes the two saves.

    Raises:
        ValueError: when `directory` is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: heads are saved into a directory, give another name")
    # Inside the directory: beside it could be another file system (a mounted volume), or not ours to write.
    scratch = directory / ".incomplete"
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
