"""What a benchmark decoded, in files that the readers of other projects take.

    spec-bench      FOLDER/CONTENDER.jsonl                            Spec-Bench's evaluation/speed.py
    speculators     FOLDER/CONTENDER/acceptance.csv                   speculators' scripts/evaluate
    specdec_bench   FOLDER/CONTENDER/{acceptance_rate,timing}.json    ModelOpt's specdec_bench

A step's length is the tokens that it emits, the target's own included. The prompt's pass and its token count as a step
in specdec_bench only. Lengths of a text's steps are in no order. Contenders whose steps are not known, such as
transformers' prompt look-up, are left out.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.inference import GenerationStats
from draftsmith.scripts.measuring.measure import Contender, Prompt, Run
from draftsmith.training.whole_files import write_text

QUARTILES = (0.25, 0.5, 0.75)


class ResultFiles:
    """Files of one format in a folder; each set of prompts is added to them.

    Args:
        name: one of `FORMATS`.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self._write = FORMATS[name]
        self._sets: dict[str, list[tuple[str, Sequence[Prompt], list[Run]]]] = {}

    def add(self, subset: str, contenders: Sequence[Contender], prompts: Sequence[Prompt], tokenizer: Any) -> None:
        """Writes the first round of every contender that ran, with single prompts."""
        for contender in contenders:
            if contender.problem or not all(map(_has_steps, contender.runs[0])):
                continue
            label = re.sub(r"[^\w.-]+", "-", contender.label).strip("-")
            sets = self._sets.setdefault(label, [])
            sets.append((subset, prompts, contender.runs[0]))
            for path, text in self._write(label, sets, tokenizer).items():
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                write_text(self.folder / path, text)


Sets = Sequence[tuple[str, Sequence[Prompt], list[Run]]]


def _has_steps(run: Run) -> bool:
    return run.stats is not None or run.num_forwards >= run.num_tokens


def step_lengths(run: Run) -> list[int]:
    """Tokens of each step after the prompt's pass; in plain decoding one each."""
    if run.stats is None or not run.stats.num_verify_steps:
        return [1] * (run.num_tokens - 1)
    return [1 + accepted for accepted, count in enumerate(run.stats.accepted_histogram) for _ in range(count)]


def _write_spec_bench(label: str, sets: Sets, tokenizer: Any) -> dict[str, str]:
    lines = []
    for subset, prompts, runs in sets:
        for prompt, run in zip(prompts, runs, strict=True):
            lengths = step_lengths(run)
            choice = {
                "index": 0,
                "turns": [tokenizer.decode(run.texts[0], skip_special_tokens=True)],
                "decoding_steps": [len(lengths)],
                "new_tokens": [run.num_tokens],
                "wall_time": [run.seconds],
                "accept_lengths": lengths,
            }
            answer = {"question_id": prompt.id, "category": subset, "answer_id": f"{label}-{prompt.id}"}
            lines.append(json.dumps({**answer, "model_id": label, "choices": [choice], "tstamp": time.time()}) + "\n")
    return {f"{label}.jsonl": "".join(lines)}


def _write_speculators(label: str, sets: Sets, tokenizer: Any) -> dict[str, str]:
    totals = {
        subset: sum((run.stats for run in runs if run.stats is not None), GenerationStats()) for subset, _, runs in sets
    }
    depth = max(len(total.accepted_per_depth) for total in totals.values())
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    table.writerow(["subset", *counts, "acceptance_length", *(f"acceptance_at_pos_{place}" for place in range(depth))])
    for subset, total in totals.items():
        accepted = total.accepted_per_depth + [0] * (depth - len(total.accepted_per_depth))
        drafts = max(1, total.num_verify_steps)
        at_places = [number / drafts for number in accepted]
        table.writerow(
            [subset, total.num_verify_steps, total.num_drafted, sum(accepted), total.acceptance_length, *at_places]
        )
    return {f"{label}/acceptance.csv": file.getvalue()}


def _write_specdec_bench(label: str, sets: Sets, tokenizer: Any) -> dict[str, str]:
    rates, timings = [], []
    for subset, prompts, runs in sets:
        requests = {prompt.id: [1, *step_lengths(run)] for prompt, run in zip(prompts, runs, strict=True)}
        means = {name: statistics.mean(lengths) for name, lengths in requests.items()}
        histogram = Counter(length for lengths in requests.values() for length in lengths)
        joint, conditional, before = {}, {}, sum(histogram.values())
        for length in sorted(histogram):
            reached = sum(count for other, count in histogram.items() if other >= length)
            joint[length], conditional[length] = reached / sum(histogram.values()), reached / before
            before = reached
        rates.append(
            {
                "Request_AL": means,
                "Average_AL": statistics.mean(means.values()),
                "Category_AL": {subset: statistics.mean(means.values())},
                "Acceptance_Length_Histogram": dict(sorted(histogram.items())),
                "Conditional_Acceptance_Rate": conditional,
                "Joint_Acceptance_Rate": joint,
            }
        )
        seconds, tokens = [run.seconds for run in runs], [run.num_tokens for run in runs]
        timings.append(
            {
                "Output TPS": f"{sum(tokens) / sum(seconds):.4f}",
                "E2E Request Time": _describe(seconds),
                "Number of Output Tokens": _describe(tokens),
            }
        )
    return {
        f"{label}/{name}.json": json.dumps(content, indent=1) + "\n"
        for name, content in (("acceptance_rate", rates), ("timing", timings))
    }


def _describe(values: Sequence[float]) -> dict[str, Any]:
    """As specdec_bench writes numbers: texts with four decimals."""
    ordered = sorted(values)
    found = {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": statistics.mean(values),
        "std": statistics.pstdev(values),
    }
    quantiles = {str(share): f"{ordered[round(share * (len(ordered) - 1))]:.4f}" for share in QUARTILES}
    return {**{name: f"{value:.4f}" for name, value in found.items()}, "quantiles": quantiles}


FORMATS: dict[str, Callable[[str, Sets, Any], dict[str, str]]] = {
    "spec-bench": _write_spec_bench,
    "speculators": _write_speculators,
    "specdec_bench": _write_specdec_bench,
}
