"""The output of `scripts/generate_data.py`: a journal for each process, which the last to finish merges.

While it is written, OUT.shard-00000-of-00002 and its like hold finished conversations, good and bad, in the order in
which they were finished. What is done is known by ids, so a run may go on with another number of shards. When nothing
is missing, they become

    OUT                 the good ones, in the order of the prompts
    OUT.dropped.jsonl   ids of the others, each with the reason
    OUT.stats.json      counts, shares, settings, versions and speed

each at once, and are removed. A larger plan (more prompts, more conversations) goes on from there.
"""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from training.synthesis.conversation_file import JsonLinesJournal, read_journal, read_lines, replacing
from training.synthesis.prompts import Conversation
from training.synthesis.reply_sources import describe_effort

logger = logging.getLogger(__name__)


class SynthesisOutput:
    """One process's part of the output, and the view on all of it.

    Args:
        path: OUT.
        settings: what decides on the text (`SynthesisArguments.settings_of_the_data`); lines that were written with
            others are refused.
        shard: which part, of how many.
        resume: go on with what is there.

    Raises:
        ValueError: there is something that cannot be gone on with.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, shard: tuple[int, int], resume: bool = True) -> None:
        self.path, self.settings = path, settings
        self.dropped_path = path.with_name(f"{path.name}.dropped.jsonl")
        self.stats_path = path.with_name(f"{path.name}.stats.json")
        there = [place for place in (path, *self.shard_paths()) if place.exists()]
        index, count = shard
        own_path = path.with_name(f"{path.name}.shard-{index:05}-of-{count:05}")
        others = {place.name for place in there if place.name.endswith(f"-of-{count:05}") and place != own_path}
        if not resume and len(others) < len(there):  # those of processes that were started with this one are no rest
            raise ValueError(f"--output {path} exists: leave --no_resume out to continue it, or name another")
        if path.exists() and self.stats_path.exists():
            self._check_settings(json.loads(self.stats_path.read_text(encoding="utf-8"))["settings"], self.stats_path)
        self.done = self._find_done()
        with _telling(own_path):
            self._shard = JsonLinesJournal(own_path)
            if not self._shard.rows:
                self._shard.append([{"settings": settings}])

    def shard_paths(self) -> list[Path]:
        """Journals of all processes, of this run and of interrupted ones."""
        return sorted(self.path.parent.glob(f"{_escape(self.path.name)}.shard-*-of-*"))

    def append(self, finished: Iterable[Conversation], effort: dict[str, float]) -> None:
        """Keeps finished conversations; when it returns, they are on the disk."""
        lines: list[dict[str, Any]] = []
        for conversation in finished:
            if conversation.is_of_use:
                lines.append({"row": conversation.to_row(self.settings["output_format"])})
            else:
                dropped = {"id": conversation.id, "source": conversation.source, "dropped": conversation.problem}
                lines.append({"dropped": dropped})
        if lines:
            with _telling(self._shard.path):
                self._shard.append([*lines, {"effort": effort}])

    def close(self) -> None:
        self._shard.close()

    def merge(self, plan: Sequence[str]) -> dict[str, Any] | None:
        """Puts the parts together if they hold every id of the plan, and removes them; returns what the statistics
        say. None when some are missing. Any process may do so at any time, also two at once."""
        shards = self.shard_paths()
        lines, dropped, efforts = self._collect(shards)
        if not all(name in lines or name in dropped for name in plan):
            return None
        order = [name for name in plan if name in lines] + sorted(lines.keys() - set(plan))
        stats = self._describe([json.loads(lines[name]) for name in order], dropped, efforts)
        records = (json.dumps(dropped[name], ensure_ascii=False).encode() + b"\n" for name in sorted(dropped))
        text = json.dumps(stats, indent=2, ensure_ascii=False).encode() + b"\n"
        for path, parts in (
            (self.path, (lines[name] for name in order)),
            (self.dropped_path, records),
            (self.stats_path, iter([text])),
        ):
            with _telling(path), replacing(path) as file:
                file.writelines(parts)
        for shard in shards:
            shard.unlink(missing_ok=True)
        return stats

    def _find_done(self) -> set[str]:
        lines, dropped, _ = self._collect(self.shard_paths())
        return lines.keys() | dropped.keys()

    def _collect(
        self, shards: Iterable[Path]
    ) -> tuple[dict[str, bytes], dict[str, dict[str, Any]], list[dict[str, float]]]:
        """Lines of good conversations and records of dropped ones by id, and what was spent on them."""
        lines: dict[str, bytes] = {}
        dropped: dict[str, dict[str, Any]] = {}
        efforts: list[dict[str, float]] = []
        for shard in shards:  # before what they are merged into: they are removed behind it
            try:
                entries = read_journal(shard)
            except FileNotFoundError:
                continue
            for entry in entries:
                if "settings" in entry:
                    self._check_settings(entry["settings"], shard)
                elif "row" in entry:
                    lines[entry["row"]["id"]] = json.dumps(entry["row"], ensure_ascii=False).encode() + b"\n"
                elif "dropped" in entry:
                    dropped[entry["dropped"]["id"]] = entry["dropped"]
                elif "effort" in entry:
                    efforts.append(entry["effort"])
        if self.path.exists():
            for row, line in read_lines(self.path):
                lines[str(row.get("id"))] = line
        if self.dropped_path.exists():
            dropped.update((str(row["id"]), row) for row, _ in read_lines(self.dropped_path))
        return lines, dropped, efforts

    def _check_settings(self, written: dict[str, Any], path: Path) -> None:
        different = [
            f"{name} was {written.get(name)!r} and is {self.settings.get(name)!r}"
            for name in sorted({*written, *self.settings})
            if written.get(name) != self.settings.get(name)
        ]
        if different:
            raise ValueError(
                f"{path} was written with other settings ({'; '.join(different)}), and one file should hold one kind "
                "of data: take those, or name another --output"
            )

    def _describe(
        self, rows: Sequence[dict[str, Any]], dropped: dict[str, dict[str, Any]], efforts: Sequence[dict[str, float]]
    ) -> dict[str, Any]:
        """The statistics: everything but the speed is counted anew from what is in the files."""
        if efforts or not self.stats_path.exists():
            last_run = describe_effort(efforts)
        else:
            last_run = json.loads(self.stats_path.read_text(encoding="utf-8"))["last_run"]
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
            "last_run": last_run,
            "settings": self.settings,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "platform": platform.platform(),
            "command": shlex.join(["generate_data.py", *sys.argv[1:]]),
        }


def _share(count: int, total: int) -> dict[str, float]:
    return {"count": count, "share": round(count / total, 5)}


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Says of a disk that is full, and the like, which file it was and what is safe."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}). Conversations written before are safe: set that "
            "right, and run the same command again"
        ) from error


def _escape(name: str) -> str:
    """For `glob`."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
