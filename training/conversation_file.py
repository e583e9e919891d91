"""Files of conversations that a program writes line by line, and that survive its being killed."""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class ConversationFile:
    """JSON lines to append to, gzipped if the name ends in .gz.

    A kill leaves at most one torn line, at the end; opening the file again cuts it off, and ends a whole one that only
    lacks its line break. `rows` is what was there then.

    Raises:
        ValueError: a line in the middle is not JSON, or a .gz is no gzip file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_gzip = path.suffix == ".gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = self._recover() if path.exists() else []

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines; when it returns, they are on the disk."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        if not data:
            return
        with self.path.open("ab") as file:
            # Any number of gzip members in a row is a gzip file.
            file.write(gzip.compress(data) if self.is_gzip else data)
            file.flush()
            os.fsync(file.fileno())

    def compact(self) -> None:
        """Makes a .gz one member, which is smaller than one per `append`."""
        if self.is_gzip and self.path.exists():
            self._replace(gzip.decompress(self.path.read_bytes()))

    def _recover(self) -> list[dict[str, Any]]:
        raw = self.path.read_bytes()
        data, is_torn = self._decompress(raw) if self.is_gzip else (raw, False)
        *lines, tail = data.split(b"\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"{self.path}, line {number} is not JSON ({error}): mend it, or choose another output"
                ) from error
        whole = data[: len(data) - len(tail)]
        if tail:
            try:
                rows.append(json.loads(tail))  # no beginning of an object is an object
                whole = data + b"\n"
            except ValueError:
                logger.warning(
                    "%s: cut off the last line (%d bytes), which breaks off in the middle", self.path, len(tail)
                )
        if is_torn or whole != data:
            self._replace(whole)
        return rows

    def _decompress(self, raw: bytes) -> tuple[bytes, bool]:
        """What can be read, and whether the last member is torn."""
        data, is_torn = b"", False
        while raw:
            member = zlib.decompressobj(wbits=31)
            try:
                data += member.decompress(raw)
            except zlib.error as error:
                raise ValueError(f"{self.path} is no gzip file ({error}): choose another output") from error
            raw, is_torn = member.unused_data, not member.eof
        return data, is_torn

    def _replace(self, data: bytes) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_bytes(gzip.compress(data) if self.is_gzip else data)
        temporary.replace(self.path)
