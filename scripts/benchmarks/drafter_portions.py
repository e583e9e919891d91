"""What of the table of drafters is measured already: a file of reports grows portion by portion.

A report holds one file of prompts at one temperature, with some of the drafters. Reports of one file were measured
under the same conditions; what was measured with other heads or prompts of the same name is out of date.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

Report = dict[str, Any]
RECORD = "training_record.json"


@dataclass(frozen=True)
class DrafterInfo:
    """What is known of a drafter before it is loaded.

    Attributes:
        kind: the heads' `head_type`, or what else it is.
        path: "" for a drafter without weights.
        fingerprint: of configuration and weights.
        num_parameters: of its own; what it borrows from the target is not counted.
        training: as the training record tells it (seconds, threads, steps, tokens, epochs); {} without one.
    """

    kind: str
    path: str
    fingerprint: str
    num_parameters: int
    training: dict[str, Any]


def describe_drafter(path: str, kind: str | None = None) -> DrafterInfo:
    """Of a folder of heads, or (with a `kind`) of a model.

    Raises:
        ValueError: without a config.json or weights there.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(f"{path} has no config.json or no *.safetensors: give the folder of a trained drafter")
    kind = kind or json.loads((folder / "config.json").read_text(encoding="utf-8")).get("head_type", "unknown")
    record = folder / RECORD
    training = json.loads(record.read_text(encoding="utf-8")).get("training", {}) if record.is_file() else {}
    return DrafterInfo(kind, path, fingerprint_model(path), _count_parameters(folder), training)


def _count_parameters(folder: Path) -> int:
    """Numbers in floating point; tables of token ids are no parameters."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            slices = [tensors.get_slice(name) for name in tensors.keys()]  # noqa: SIM118 (no mapping)
            total += sum(math.prod(one.get_shape()) for one in slices if "F" in one.get_dtype())
    return total


def fingerprint_model(name: str) -> str:
    """Of a folder's configuration and weights; a hub id stands for itself."""
    folder = Path(name)
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    return fingerprint_files(files) if files else name


def fingerprint_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


class Portions:
    """The reports of a file, and what is to be measured besides.

    Args:
        reports: those there are.
        conditions: what all reports of one file have in common.
        drafters: those wanted, by name.
        prompts: the files wanted.

    Attributes:
        reports: those that are up to date; drafters that are not wanted now are kept.
        dropped: what was out of date, for people.

    Raises:
        ValueError: for reports measured under other conditions.
    """

    def __init__(
        self,
        reports: Sequence[Report],
        *,
        conditions: Mapping[str, Any],
        drafters: Mapping[str, DrafterInfo],
        prompts: Sequence[str],
    ) -> None:
        self.conditions = dict(conditions)
        self.drafters = dict(drafters)
        self.prompts = {path: fingerprint_files([Path(path)]) for path in prompts}
        self.dropped: list[str] = []
        for report in reports:
            self._check(report)
        current = [kept for report in reports if (kept := self._without_outdated(report)) is not None]
        self.reports: list[Report] = current

    def missing(self, path: str, temperature: float) -> list[str]:
        """Names of the wanted drafters that were not measured on these prompts at this temperature."""
        measured = {
            name
            for report in self.reports
            if (report["environment"]["prompts_fingerprint"], report["environment"]["temperature"])
            == (self.prompts[path], temperature)
            for name in report["environment"]["drafters"]
        }
        return [name for name in self.drafters if name not in measured]

    def describe(self, path: str, names: Sequence[str]) -> dict[str, Any]:
        """What a new report's environment says besides: `missing` reads it."""
        return {
            "conditions": self.conditions,
            "prompts_fingerprint": self.prompts[path],
            "drafters": {name: asdict(self.drafters[name]) for name in names},
        }

    def _check(self, report: Report) -> None:
        theirs = report["environment"].get("conditions")
        if theirs is None:
            raise ValueError("--json holds reports of another program: give another file")
        different = [
            f"{key} {theirs.get(key)!r} there, {value!r} now"
            for key, value in self.conditions.items()
            if theirs.get(key) != value
        ]
        if different:
            raise ValueError(
                f"--json holds reports measured under other conditions ({'; '.join(different)}): give another file, or "
                "--overwrite to begin anew"
            )

    def _without_outdated(self, report: Report) -> Report | None:
        """The report without drafters that are others now; None if its prompts are, or nothing is left."""
        environment = report["environment"]
        path, drafters = environment["prompts"], environment["drafters"]
        if path in self.prompts and environment["prompts_fingerprint"] != self.prompts[path]:
            self.dropped.append(f"T = {environment['temperature']:g} on {path}: these prompts have changed")
            return None
        outdated = [
            name
            for name, info in drafters.items()
            if name in self.drafters and info["fingerprint"] != self.drafters[name].fingerprint
        ]
        for name in outdated:
            self.dropped.append(f"{name}, T = {environment['temperature']:g} on {path}: these heads have changed")
        # A training record may have come, or a folder moved, since.
        known = {name: asdict(info) for name, info in self.drafters.items()}
        kept = {name: known.get(name, info) for name, info in drafters.items() if name not in outdated}
        if not kept:
            return None
        gone = [row for row in report["rows"] if base_name(row["name"]) in outdated]
        labels = {f"{row['name']}, {row['tree']}" for row in gone}
        return {
            "environment": {**environment, "drafters": kept},
            "rows": [row for row in report["rows"] if row not in gone],
            "runs": {label: runs for label, runs in report["runs"].items() if label not in labels},
        }


def base_name(name: str) -> str:
    """A contender's name without its mode."""
    return name.removesuffix(", compiled")


def read_reports(path: Path) -> list[Report]:
    """Those of a JSON file; none if it is not there."""
    if not path.is_file():
        return []
    reports: list[Report] = json.loads(path.read_text(encoding="utf-8"))["reports"]
    return reports
