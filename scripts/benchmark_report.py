"""What a benchmark's runs say: one row of numbers for each contender, the machine they were made on, and a JSON file.

Acceptance length is counted as in `inference.stats`: tokens that verify steps emit / verify steps, the bonus token
included, the prefill and its token excluded. transformers does not tell its steps: there it is tokens / forwards.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_measure import PLAIN, TRANSFORMERS, Contender, Prompt, Run, Settings

from inference import GenerationStats, Target

ROOT = Path(__file__).resolve().parents[1]
# Instruction sets that decide what a wide forward pass costs on a CPU.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "sve", "bf16")


@dataclass
class Difference:
    """Where one prompt's text leaves the reference, and (at T = 0) how close the target held the two tokens there.

    gap: the reference token's logit minus the other's, from one forward pass over the common text. resolution: the
    distance of neighbouring numbers of the target's dtype at that size.
    """

    prompt: str
    position: int
    gap: float | None = None
    resolution: float | None = None


@dataclass
class Row:
    """One contender's numbers; None where a number does not exist.

    Attributes:
        warm_up_seconds: spent before anything was measured, compiling included.
        tokens_per_second: new tokens / seconds of the whole calls, all prompts together; the median of the repeats.
        over_transformers, over_plain: ratio of tokens/s to the reference, taken for each prompt and repeat, then the
            median; with the quartiles.
        step_milliseconds: of a verify step, prefill excluded: draft (inside the drafter), grow (the tree and, when
            sampling, the noise), verify (the target's forward), accept, commit, other (the rest); `step` is their sum.
        overhead_share: the share of a step that is neither the target's forward nor the drafter's.
        num_identical: prompts whose text equals the reference's in every repeat.
        repeated_4grams: the share of 4-grams of the new text that stood there before: looping text flatters drafters.
    """

    name: str
    tree: str = ""
    problem: str = ""
    warm_up_seconds: float = 0.0
    num_new_tokens: int = 0
    tokens_per_second: float = 0.0
    tokens_per_second_range: tuple[float, float] = (0.0, 0.0)
    over_transformers: float | None = None
    over_transformers_quartiles: tuple[float, float] | None = None
    over_plain: float | None = None
    over_plain_quartiles: tuple[float, float] | None = None
    acceptance_length: float = 1.0
    acceptance_by_depth: list[float] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    nodes_per_step: float | None = None
    step_milliseconds: dict[str, float] | None = None
    overhead_share: float | None = None
    reference: str | None = None
    num_identical: int | None = None
    num_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    repeated_4grams: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tree}" if self.tree else self.name


def make_rows(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], settings: Settings, target: Target
) -> list[Row]:
    """Rows in the contenders' order."""
    by_name = {contender.name: contender for contender in contenders if contender.runs}
    return [_make_row(contender, by_name, prompts, settings, target) for contender in contenders]


def _make_row(
    contender: Contender,
    by_name: dict[str, Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
) -> Row:
    row = Row(contender.name, contender.tree, contender.problem, contender.warm_up_seconds)
    if contender.problem:
        return row
    speeds = [_speed(runs) for runs in contender.runs]
    row.num_new_tokens = sum(len(run.token_ids) for run in contender.runs[0])
    row.tokens_per_second = statistics.median(speeds)
    row.tokens_per_second_range = (min(speeds), max(speeds))
    row.over_transformers, row.over_transformers_quartiles = _ratio(contender, by_name.get(TRANSFORMERS))
    row.over_plain, row.over_plain_quartiles = _ratio(contender, by_name.get(PLAIN))
    row.repeated_4grams = share_of_repeated_ngrams([run.token_ids for run in contender.runs[0]])
    _count_steps(row, contender)
    _compare_texts(row, contender, by_name, prompts, settings, target)
    return row


def _speed(runs: Sequence[Run]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def _ratio(contender: Contender, reference: Contender | None) -> tuple[float | None, tuple[float, float] | None]:
    """Median and quartiles over (prompt, repeat) of the ratio of tokens/s: both ran within seconds of one another."""
    if reference is None:
        return None, None
    ratios = [
        _speed([run]) / _speed([other])
        for runs, others in zip(contender.runs, reference.runs, strict=True)
        for run, other in zip(runs, others, strict=True)
    ]
    if len(ratios) == 1:
        return ratios[0], (ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (low, high)


def share_of_repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Of all n-grams of the texts, the share that stood earlier in the same text.

    >>> share_of_repeated_ngrams([[1, 2, 1, 2, 1, 2, 3]])  # 1212 2121 1212 2123
    0.25
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(one)) for one in grams) / total if total else 0.0


def _count_steps(row: Row, contender: Contender) -> None:
    """Acceptance over all runs (they repeat one another), time per verify step over the profiled ones."""
    every = [run for runs in contender.runs for run in runs]
    own = [run.stats for run in every if run.stats is not None]
    if not own:
        row.acceptance_length = sum(len(run.token_ids) for run in every) / sum(run.num_forwards for run in every)
        return
    total = sum(own, GenerationStats())
    row.acceptance_length = total.acceptance_length
    row.acceptance_by_depth = total.acceptance_by_depth
    row.accepted_histogram = total.accepted_histogram
    if not total.num_verify_steps:
        return
    row.nodes_per_step = 1 + total.num_drafted / total.num_verify_steps
    stats = sum((run.stats for run in contender.profiled if run.stats is not None), GenerationStats())
    row.step_milliseconds = split_step(stats, sum(run.draft_forward_seconds for run in contender.profiled))
    outside = row.step_milliseconds["step"] - row.step_milliseconds["draft"] - row.step_milliseconds["verify"]
    row.overhead_share = outside / row.step_milliseconds["step"]


def split_step(stats: GenerationStats, draft_forward_seconds: float) -> dict[str, float]:
    """Milliseconds of a verify step by what they went to; see `Row.step_milliseconds`."""
    seconds = stats.seconds
    parts = {
        "draft": draft_forward_seconds,
        "grow": seconds["draft"] - draft_forward_seconds,
        "verify": seconds["verify"],
        "accept": seconds["accept"],
        "commit": seconds["commit"],
    }
    step = seconds["total"] - seconds["prefill"]
    parts = {"step": step, **parts, "other": step - sum(parts.values())}
    return {name: 1000 * value / stats.num_verify_steps for name, value in parts.items()}


def _compare_texts(
    row: Row,
    contender: Contender,
    by_name: dict[str, Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
) -> None:
    """At T = 0 everybody against transformers' `generate`; at T > 0 our rows against our plain decoding with the same
    seed (transformers draws from another generator of random numbers)."""
    is_ours = any(run.stats is not None for run in contender.runs[0])
    name = PLAIN if settings.is_sampled else TRANSFORMERS
    reference = by_name.get(name)
    if reference is None or (settings.is_sampled and not is_ours):
        return
    row.reference, row.num_compared = name, len(prompts)
    for place, prompt in enumerate(prompts):
        expected = reference.runs[0][place].token_ids
        found = next((runs[place].token_ids for runs in contender.runs if runs[place].token_ids != expected), None)
        if found is not None:
            row.differences.append(find_difference(prompt, expected, found, target, has_gap=not settings.is_sampled))
    row.num_identical = len(prompts) - len(row.differences)


def find_difference(
    prompt: Prompt, expected: Sequence[int], found: Sequence[int], target: Target, *, has_gap: bool
) -> Difference:
    """The first place where two texts differ, and the target's two logits there."""
    pairs = zip(expected, found, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    difference = Difference(prompt.id, position)
    if has_gap and position < min(len(expected), len(found)):
        common = torch.tensor([list(expected[:position])], dtype=torch.long, device=prompt.input_ids.device)
        with torch.no_grad():
            logits = target.model(torch.cat([prompt.input_ids, common], dim=1)).logits[0, -1]
        one, other = logits[expected[position]], logits[found[position]]
        difference.gap = float(one.float() - other.float())
        # Numbers from 2**e to 2**(e + 1) stand eps * 2**e apart; frexp's exponent is e + 1.
        difference.resolution = torch.finfo(logits.dtype).eps * 2.0 ** (math.frexp(float(one))[1] - 1)
    return difference


def describe_environment(target: Target, settings: Settings, /, **details: Any) -> dict[str, Any]:
    """Everything a reader needs to judge the numbers, or to make them again."""
    cpu, flags = _read_cpu()
    return {
        "cpu": cpu,
        "cpu_flags": flags,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.text_config._attn_implementation,
        "batch": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": _read_commit(),
        "command": shlex.join(["python", *sys.argv]),
        **asdict(settings),
        **details,
    }


def _read_cpu() -> tuple[str, list[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine(), []
    values = dict(reversed([(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))  # type: ignore[misc]
    flags = set(values.get("flags", values.get("Features", "")).split())
    name = values.get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores", [flag for flag in CPU_FLAGS if flag in flags]


def _read_commit() -> str | None:
    """The commit that is checked out, with a + when tracked files have changed since; None without git."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, environment: dict[str, Any], rows: Sequence[Row], contenders: Sequence[Contender]) -> None:
    """Rows and, so that other statistics can be made of them, every run. Never half-written."""
    runs = {
        row.label: [[{"tokens": len(run.token_ids), "seconds": run.seconds} for run in runs] for runs in contender.runs]
        for row, contender in zip(rows, contenders, strict=True)
    }
    content = {"environment": environment, "rows": [asdict(row) for row in rows], "runs": runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    scratch.replace(path)
