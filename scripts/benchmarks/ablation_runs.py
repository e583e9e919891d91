"""The runs of the ablation: what there is to compare, and how one is trained, measured and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.report import write_text
from training.options.command_line import parse_arguments, resolve_arguments

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "ablation"
REFERENCE = "eagle3"
# The name of a run is that of its file in configs/ablation; what it is called in the tables. The most telling first.
LABELS = {
    "eagle3": "EAGLE-3",
    "eagle3-human": "EAGLE-3 on what people replied",
    "eagle3.1": "EAGLE-3.1",
    "eagle3-one-layer": "EAGLE-3 without fusion (last state alone)",
    "eagle": "EAGLE-1 (EAGLE-2 with its tree)",
    "hass": "HASS",
    "loss-lk-alpha": "`lk_alpha`",
    "loss-lk-lambda": "`lk_lambda`",
    "loss-total-variation": "`total_variation`",
    "loss-reverse-kl": "`reverse_kl`",
    "loss-cross-entropy": "`cross_entropy`, the data's tokens",
    "weights-d-pace": "`distillation`, `depth_weights: d_pace`",
    "loss-topk": "`distillation+topk_distillation` (HASS)",
    "loss-dspark": "`1.8*total_variation+0.1*cross_entropy` (DSpark)",
}
# The tables: a run may stand in several, and be called otherwise there.
TABLES = {
    "Who wrote the replies": {"eagle3-human": "people", "eagle3": "the target"},
    "The papers' order": {name: LABELS[name] for name in ("eagle", "hass", "eagle3-one-layer", "eagle3", "eagle3.1")},
    "Losses of EAGLE-3": {
        "eagle3": "`distillation` (EAGLE-3's own)",
        **{name: label for name, label in LABELS.items() if name.startswith(("loss-", "weights-"))},
    },
}


@dataclass(frozen=True)
class Run:
    """One training run, and where its heads, log and result are."""

    name: str
    output: Path

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.name}.yaml"

    @property
    def folder(self) -> Path:
        return self.output / self.name

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def dataset(self) -> Path:
        """The data set that the configuration names, in this ablation's folder."""
        (path,) = self.settings()["dataset"]
        return self.output / Path(path).name

    @property
    def features(self) -> Path:
        """Where its data set's features are stored, in this ablation's folder."""
        return self.output / Path(self.settings()["features"]).name

    def settings(self) -> dict[str, Any]:
        """Every option as its configuration resolves it, without its place."""
        settings = resolve_arguments(*parse_arguments(["--config", str(self.config), "--use_cpu", "true"]))
        return {key: value for key, value in settings.items() if key not in ("output_dir", "use_cpu", "logging_dir")}

    def read_result(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """What was kept of a finished run; None before that.

        Args:
            options: of measuring (`ablation_measure.OPTIONS`).

        Raises:
            ValueError: it was made with another configuration, or measured with other options.
        """
        if not self.result.exists():
            return None
        result: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        if result["settings"] != self.settings():
            raise ValueError(
                f"{self.folder} was made with other settings than {self.config.name} now has: remove the folder to run "
                "it again, or give another --output"
            )
        if changed := [name for name in options if result["options"][name] != options[name]]:
            had, wanted = ({name: each[name] for name in changed} for each in (result["options"], options))
            raise ValueError(
                f"{self.folder} was measured with {had}, and {wanted} is asked for: give the same; or remove "
                f"{self.result.name} there, and in the folders of the other runs, to measure their heads again"
            )
        return result


class Programs:
    """Programs that run at the same time, each on its own threads, and end with this one."""

    def __init__(self, num_threads: int) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, program: str, *words: str, log: Path) -> None:
        """Raises:
        RuntimeError: the program failed; its log says why.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            with self._lock:
                if self._is_stopped:
                    raise RuntimeError("stopped")
                process = subprocess.Popen(
                    [sys.executable, str(ROOT / program), *words],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    cwd=ROOT,
                )
                self._running.add(process)
            code = process.wait()
        with self._lock:
            self._running.discard(process)
        if code:
            raise RuntimeError(f"{Path(program).name} ended with {code}: see {log}")

    def stop(self) -> None:
        """Ends what runs; nothing starts any more."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                process.terminate()


def store_features(runs: Iterable[Run], programs: Programs) -> None:
    """The states of each data set, once: all kinds of heads read some of those that EAGLE-3 taps, or the last one."""
    config = str(CONFIGS / f"{REFERENCE}.yaml")
    for folder, dataset in sorted({(run.features, run.dataset) for run in runs}):
        print(f"storing the target's features of {dataset}", flush=True)
        words = ["--config", config, "--dataset", str(dataset), "--output_dir", str(folder)]
        programs.run("scripts/extract_features.py", *words, log=folder.with_name(f"{folder.name}.log"))


def finish(run: Run, programs: Programs, measure: list[str]) -> dict[str, Any]:
    """Trains from where it was interrupted, measures the heads and keeps the result.

    Args:
        measure: options of `ablation_measure.py`, the same for all runs.
    """
    train = ["--config", str(run.config), "--dataset", str(run.dataset), "--features", str(run.features)]
    train += ["--output_dir", str(run.folder)]
    if not (run.folder / "training_record.json").exists():
        words = [*train, "--resume_from_checkpoint", "true", "--disable_tqdm", "true"]
        words += ["--use_cpu", "true"] if not torch.accelerator.is_available() else []
        programs.run("training/train_heads.py", *words, log=run.folder / "training.log")
    measured = run.folder / "acceptance.json"
    programs.run(
        "scripts/benchmarks/ablation_measure.py",
        *("--heads", str(run.folder), "--json", str(measured), *measure),
        log=run.folder / "measuring.log",
    )
    record = json.loads((run.folder / "training_record.json").read_text(encoding="utf-8"))
    result = {
        "name": run.name,
        "settings": run.settings(),
        "training": record["training"],
        "curve": read_curve(run.folder),
        **json.loads(measured.read_text(encoding="utf-8")),
    }
    write_text(run.result, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def read_curve(folder: Path) -> list[dict[str, float]]:
    """What was logged in training: tokens seen, loss, and how often the best first draft was the target's own."""
    newest = max(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
    history = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
    names = {"num_input_tokens_seen": "tokens", "loss": "loss", "top1_depth1": "top1_depth1"}
    return [{new: entry[old] for old, new in names.items()} for entry in history if names.keys() <= entry.keys()]
