"""The output of `draftsmith data`: one journal per process; the last process to finish merges them.

Until then, OUT.shard-00000-of-00002 and so on hold finished conversations, good and bad, in the order of completion.
Finished conversations are known by their ids, so a run may continue with another number of shards. When nothing is
missing, the journals become

    OUT                 the good ones, in the order of the prompts
    OUT.dropped.jsonl   ids of the others, each with the reason
    OUT.stats.json      counts, shares, settings, versions and speed

and are removed. Each file is written at once. A larger plan (more conversations) continues from there.
"""

import glob
import gzip
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftsmith.training.synthesis.prompts import Conversation
from draftsmith.training.whole_files import replacing


class SynthesisOutput:
    """One process's part of the output, and a view of all of it.

    Args:
        settings: the settings that determine the text; existing lines must have the same ones.
        shard: (this part, number of parts).

    Raises:
        ValueError: there is an output that this run cannot continue.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, shard: tuple[int, int]) -> None:
        self.path, self.settings = path, settings
        self.dropped_path = path.with_name(f"{path.name}.dropped.jsonl")
        self.stats_path = path.with_name(f"{path.name}.stats.json")
        index, count = shard
        own_path = path.with_name(f"{path.name}.shard-{index:05}-of-{count:05}")
        if path.exists() and self.stats_path.exists():
            self._check_settings(json.loads(self.stats_path.read_text(encoding="utf-8"))["settings"], self.stats_path)
        self.done = {name for found in self._collect(self.shard_paths()) for name in found}
        with _naming_file(own_path):
            self._shard = JsonLinesJournal(own_path)
            if not own_path.stat().st_size:
                self._shard.append([{"settings": settings}])

    def shard_paths(self) -> list[Path]:
        """The journals of all processes, also of interrupted runs."""
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.shard-*-of-*"))

    def append(self, finished: Iterable[Conversation]) -> None:
        """Writes finished conversations; when it returns, they are on the disk."""
        lines: list[dict[str, Any]] = []
        for conversation in finished:
            if conversation.is_of_use:
                lines.append({"row": conversation.to_row()})
            else:
                dropped = {"id": conversation.id, "source": conversation.source, "dropped": conversation.problem}
                lines.append({"dropped": dropped})
        if lines:
            with _naming_file(self._shard.path):
                self._shard.append(lines)

    def close(self) -> None:
        self._shard.close()

    def merge(self, plan: Sequence[str]) -> dict[str, Any] | None:
        """Merges and removes the journals if they hold every id of the plan; returns the statistics, else None.

        Several processes may do so at once.
        """
        shards = self.shard_paths()
        rows, dropped = self._collect(shards)
        if not all(name in rows or name in dropped for name in plan):
            return None
        order = [name for name in plan if name in rows] + sorted(rows.keys() - set(plan))
        stats = self._describe([rows[name] for name in order], dropped)
        for path, lines in (
            (self.path, map(_dump, (rows[name] for name in order))),
            (self.dropped_path, map(_dump, (dropped[name] for name in sorted(dropped)))),
            (self.stats_path, iter([json.dumps(stats, indent=2, ensure_ascii=False).encode() + b"\n"])),
        ):
            with _naming_file(path):
                write_lines(path, lines)
        for shard in shards:
            shard.unlink(missing_ok=True)
        return stats

    def _collect(self, shards: Iterable[Path]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Returns good conversations and records of dropped ones, by id."""
        rows: dict[str, dict[str, Any]] = {}
        dropped: dict[str, dict[str, Any]] = {}
        for shard in shards:  # before the merged files: a merge removes the journals last
            try:
                entries = read_journal(shard)
            except FileNotFoundError:
                continue
            for entry in entries:
                if "settings" in entry:
                    self._check_settings(entry["settings"], shard)
                elif "row" in entry:
                    rows[entry["row"]["id"]] = entry["row"]
                else:
                    dropped[entry["dropped"]["id"]] = entry["dropped"]
        for path, found in ((self.path, rows), (self.dropped_path, dropped)):
            if path.exists():
                found.update((str(row.get("id")), row) for row in read_lines(path))
        return rows, dropped

    def _check_settings(self, written: dict[str, Any], path: Path) -> None:
        if written.get("generation_config") is None:  # not known: a server wrote the output
            written = {**written, "generation_config": self.settings.get("generation_config")}
        different = [
            f"{name} was {written.get(name)!r} and is {self.settings.get(name)!r}"
            for name in sorted({*written, *self.settings})
            if written.get(name) != self.settings.get(name)
        ]
        if different:
            raise ValueError(
                f"{path} was written with other settings ({'; '.join(different)}): use those, or name another --output"
            )

    def _describe(self, rows: Sequence[dict[str, Any]], dropped: dict[str, dict[str, Any]]) -> dict[str, Any]:
        total = len(rows) + len(dropped)
        reasons = Counter(record["dropped"] for record in dropped.values())
        shortened = Counter(row["ended_by"] for row in rows if "ended_by" in row)
        turn_tokens = [tokens for row in rows for tokens in row.get("turn_tokens", [])]
        return {
            "conversations": len(rows),
            "turns": len(turn_tokens),
            "tokens": sum(turn_tokens),
            "dropped": {reason: _share(count, total) for reason, count in reasons.most_common()},
            "shortened": {reason: _share(count, total) for reason, count in shortened.most_common()},
            "settings": self.settings,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "command": shlex.join(["draftsmith", "data", *sys.argv[1:]]),
        }


def _dump(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _share(count: int, total: int) -> dict[str, float]:
    return {"count": count, "share": round(count / total, 5)}


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Adds to a write error the file, and the lines that are safe."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}). Finished conversations are safe: solve the problem "
            "and run the same command again"
        ) from error


class JsonLinesJournal:
    """JSON lines to append to; one process writes each journal.

    A kill or a full disk leaves at most one torn line, at the end; the next start cuts it off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes whole lines; when it returns, they are on the disk."""
        view = memoryview(b"".join(map(_dump, rows)))
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, which another process may be writing.

    Raises:
        ValueError: a line is not JSON.
    """
    return list(_parse_lines(path.read_bytes().split(b"\n")[:-1], path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that `write_lines` wrote, gzipped if its name ends in .gz.

    Raises:
        ValueError: a line is not JSON, or the file is not gzipped.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            yield from _parse_lines(lines, path)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} cannot be read ({error}): choose another output") from error


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Writes a file whole or not at all; gzipped if the name ends in .gz."""
    with replacing(path) as scratch, scratch.open("wb") as file:
        # Without name and time, so that equal lines give equal bytes.
        packed: Any = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else nullcontext(file)
        with packed as opened:
            opened.writelines(lines)


def _parse_lines(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): choose another output") from error
        yield row
