"""Writes files that are never half-written."""

from __future__ import annotations

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes a file under another name, then renames it: after a kill there is the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
