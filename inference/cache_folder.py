"""The folder in which measured costs and compiled kernels are kept from process to process."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """`draftsmith` in $DRAFTSMITH_CACHE, else in the user's cache folder."""
    root = os.environ.get("DRAFTSMITH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "draftsmith"


def keep_compiled_kernels() -> None:
    """Lets inductor keep its kernels in the cache folder, not in a temporary one. Compiling them is nearly half of the
    work of compiling. Nothing happens where the folder cannot be made, or where $TORCHINDUCTOR_CACHE_DIR names another
    folder than torch's temporary `torchinductor_NAME`. (Importing torch's compiler sets the variable to that.)"""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    usual = Path(tempfile.gettempdir(), "torchinductor_")  # with the user's name behind
    if os.access(folder, os.W_OK) and os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(usual)).startswith(str(usual)):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
