"""What a benchmark's runs say: one row of numbers for each contender, and a JSON file.

Acceptance length is counted as in `inference.stats`: tokens that verify steps emit / verify steps, the bonus token
included, the prefill and its token excluded. transformers does not tell its steps: there it is tokens / forwards.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark_limits import set_ideals, set_rooflines
from benchmark_measure import PLAIN, TRANSFORMERS, Contender, Prompt, Run, Settings, make_batches
from benchmark_texts import Difference, find_difference, share_of_repeated_ngrams
from roofline import Hardware

from inference import GenerationStats, Target


@dataclass
class Row:
    """One contender's numbers; None where a number does not exist.

    Attributes:
        warm_up_seconds: spent before anything was measured, compiling included.
        tokens_per_second: new tokens of all rows / seconds of the whole calls, all prompts together; the median of the
            repeats.
        over_transformers, over_plain: ratio of tokens/s to the reference at the same batch size, taken for each batch
            and repeat, then the median; with the quartiles.
        acceptance_length, acceptance_by_depth, accepted_histogram, nodes_per_step: per row.
        rows_per_step: rows of the batch that had not ended, in an average verify pass.
        step_milliseconds: of a verify step of the whole batch, prefill excluded: draft (inside the drafter), grow (the
            tree and, when sampling, the noise), verify (the target's forward), accept, commit, other (the rest); `step`
            is their sum.
        overhead_share: the share of a step that is neither the target's forward nor the drafter's.
        host_syncs_per_step: how often the host waited to read a tensor (see `GenerationStats.num_host_syncs`).
        step_speedup, ideal_speedup, ideal_share: beside plain decoding in the same mode (see `benchmark_limits`).
        round_weight_bytes, round_flops: what a draft phase and a verify pass must read and multiply (see `roofline`).
        limit_milliseconds: the shortest time the hardware could do that in; roofline_share: that / the measured step.
        num_identical: rows whose text equals in every repeat what the reference writes for their prompt alone.
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
    rows_per_step: float | None = None
    step_milliseconds: dict[str, float] | None = None
    overhead_share: float | None = None
    host_syncs_per_step: float | None = None
    step_speedup: float | None = None
    ideal_speedup: float | None = None
    ideal_share: float | None = None
    round_weight_bytes: float | None = None
    round_flops: float | None = None
    limit_milliseconds: float | None = None
    roofline_share: float | None = None
    reference: str | None = None
    num_identical: int | None = None
    num_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    repeated_4grams: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tree}" if self.tree else self.name


def make_rows(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
    *,
    hardware: Hardware | None = None,
    alone: Sequence[list[int]] | None = None,
) -> list[Row]:
    """Rows in the contenders' order; with their share of the roofline if the hardware was measured.

    Args:
        alone: the reference's text of each prompt decoded alone; None = what the runs say (see `texts_alone`).
    """
    by_name = {contender.name: contender for contender in contenders if contender.runs}
    alone = alone or texts_alone(contenders, settings)
    rows = [_make_row(contender, by_name, prompts, settings, target, alone) for contender in contenders]
    set_ideals(rows, contenders)
    if hardware is not None:
        set_rooflines(rows, contenders, hardware)
    return rows


def texts_alone(contenders: Sequence[Contender], settings: Settings) -> list[list[int]] | None:
    """The reference's text of each prompt, from runs of single prompts; None when there are none.

    At T = 0 the reference is transformers' `generate`; at T > 0 our plain decoding with the same seed (transformers
    draws from another generator of random numbers).
    """
    reference = next((one for one in contenders if one.name == reference_name(settings) and one.runs), None)
    if reference is None or settings.batch_size > 1:
        return None
    return [run.texts[0] for run in reference.runs[0]]


def reference_name(settings: Settings) -> str:
    return PLAIN if settings.is_sampled else TRANSFORMERS


def _make_row(
    contender: Contender,
    by_name: dict[str, Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
    alone: Sequence[list[int]] | None,
) -> Row:
    row = Row(contender.name, contender.tree, contender.problem, contender.warm_up_seconds)
    if contender.problem:
        return row
    speeds = [_speed(runs) for runs in contender.runs]
    row.num_new_tokens = sum(run.num_tokens for run in contender.runs[0])
    row.tokens_per_second = statistics.median(speeds)
    row.tokens_per_second_range = (min(speeds), max(speeds))
    row.over_transformers, row.over_transformers_quartiles = _ratio(contender, by_name.get(TRANSFORMERS))
    row.over_plain, row.over_plain_quartiles = _ratio(contender, by_name.get(PLAIN))
    row.repeated_4grams = share_of_repeated_ngrams([text for run in contender.runs[0] for text in run.texts])
    _count_steps(row, contender)
    if alone is not None:
        _compare_texts(row, contender, alone, prompts, settings, target)
    return row


def _speed(runs: Sequence[Run]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def _ratio(contender: Contender, reference: Contender | None) -> tuple[float | None, tuple[float, float] | None]:
    """Median and quartiles over (batch, repeat) of the ratio of tokens/s: both ran within seconds of one another."""
    if reference is None:
        return None, None
    return compare_speeds(*([_speed([run]) for runs in one.runs for run in runs] for one in (contender, reference)))


def compare_speeds(speeds: Sequence[float], others: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and quartiles of the ratios, one for each (batch, repeat)."""
    ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
    if len(ratios) == 1:
        return ratios[0], (ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (low, high)


def _count_steps(row: Row, contender: Contender) -> None:
    """Acceptance over all runs (they repeat one another), time per verify step over the profiled ones."""
    every = [run for runs in contender.runs for run in runs]
    own = [run.stats for run in every if run.stats is not None]
    if not own:
        row.acceptance_length = sum(run.num_tokens for run in every) / sum(run.num_forwards for run in every)
        return
    total = sum(own, GenerationStats())
    row.acceptance_length = total.acceptance_length
    row.acceptance_by_depth = total.acceptance_by_depth
    row.accepted_histogram = total.accepted_histogram
    if not total.num_verify_steps:
        return
    row.nodes_per_step = 1 + total.num_drafted / total.num_verify_steps
    row.rows_per_step = total.num_verify_steps / total.num_verify_passes
    row.host_syncs_per_step = total.num_host_syncs / total.num_verify_passes
    stats = sum((run.stats for run in contender.profiled if run.stats is not None), GenerationStats())
    row.step_milliseconds = split_step(stats, sum(run.draft_forward_seconds for run in contender.profiled))
    outside = row.step_milliseconds["step"] - row.step_milliseconds["draft"] - row.step_milliseconds["verify"]
    row.overhead_share = outside / row.step_milliseconds["step"]


def split_step(stats: GenerationStats, draft_forward_seconds: float) -> dict[str, float]:
    """Milliseconds of a verify step of the whole batch by what they went to; see `Row.step_milliseconds`."""
    seconds = stats.seconds
    parts = {
        "draft": draft_forward_seconds,
        "grow": seconds["draft"] - draft_forward_seconds,
        "verify": seconds["verify"],
        "accept": seconds["accept"],
        "commit": seconds["commit"],
    }
    step = seconds["total"] - seconds["prefill"] - seconds["profile"]
    parts = {"step": step, **parts, "other": step - sum(parts.values())}
    return {name: 1000 * value / stats.num_verify_passes for name, value in parts.items()}


def _compare_texts(
    row: Row,
    contender: Contender,
    alone: Sequence[list[int]],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
) -> None:
    """Every row of every batch against its prompt's text alone: at T = 0 everybody's, at T > 0 ours (rules other than
    exact acceptance give other texts)."""
    is_ours = any(run.stats is not None for run in contender.runs[0])
    if settings.is_sampled and not (is_ours and contender.is_exact):
        return
    name = reference_name(settings)
    row.reference = name if settings.batch_size == 1 else f"{name}, batch 1"
    for place, batch in enumerate(make_batches(prompts, settings.batch_size)):
        row.num_compared += len(batch.prompts)
        for number, prompt in enumerate(batch.prompts):
            expected = alone[prompt.index]
            texts = [runs[place].texts[number] for runs in contender.runs]
            found = next((text for text in texts if text != expected), None)
            if found is not None:
                difference = find_difference(prompt, expected, found, target, has_gap=not settings.is_sampled)
                row.differences.append(difference)
    row.num_identical = row.num_compared - len(row.differences)


def make_report(
    environment: dict[str, Any], rows: Sequence[Row], contenders: Sequence[Contender]
) -> dict[str, dict[str, Any] | list[Any]]:
    """One combination of target, prompts, temperature and batch size, as JSON holds it: environment, rows and, so that
    other statistics can be made of them, every run."""
    runs = {
        row.label: [[{"tokens": run.num_tokens, "seconds": run.seconds} for run in runs] for runs in contender.runs]
        for row, contender in zip(rows, contenders, strict=True)
    }
    return {"environment": environment, "rows": [asdict(row) for row in rows], "runs": runs}


def write_json(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """{"reports": [...]}, never half-written."""
    write_text(path, json.dumps({"reports": list(reports)}, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Never half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
