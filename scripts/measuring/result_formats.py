"""What a benchmark decoded, in files that the readers of other projects take.

    spec-bench      FOLDER/CONTENDER.jsonl                            Spec-Bench's evaluation/speed.py
    speculators     FOLDER/CONTENDER/acceptance.csv                   speculators' scripts/evaluate
    specdec_bench   FOLDER/CONTENDER/acceptance_rate.json and others  ModelOpt's specdec_bench

A step's length is the tokens that it emits, the target's own included. The prompt's pass and its token count as a step
in specdec_bench only. The turns of a conversation are one question. Contenders whose steps are not known, such as
transformers' prompt look-up, are left out.
"""

import csv
import io
import itertools
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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

    def add(
        self,
        subset: str,
        contenders: Sequence[Contender],
        prompts: Sequence[Prompt],
        tokenizer: Any,
        environment: dict[str, Any],
    ) -> None:
        """Writes the first round of every contender that ran, with single prompts."""
        for contender in contenders:
            if contender.problem or not all(map(_has_steps, contender.runs[0])):
                continue
            label = re.sub(r"[^\w.-]+", "-", contender.label).strip("-")
            sets = self._sets.setdefault(label, [])
            sets.append((subset, prompts, contender.runs[0]))
            files = self._write(label, sets, tokenizer)
            if self._write is _write_specdec_bench:
                files[f"{label}/configuration.json"] = json.dumps({"contender": contender.label, **environment}) + "\n"
            for path, text in files.items():
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                write_text(self.folder / path, text)


Sets = Sequence[tuple[str, Sequence[Prompt], list[Run]]]


def _has_steps(run: Run) -> bool:
    return run.stats is not None or run.num_forwards >= run.num_tokens


def step_lengths(run: Run) -> list[int]:
    """Tokens of each step after the prompt's pass; in plain decoding one each."""
    return [1] * (run.num_tokens - 1) if run.stats is None else run.stats.steps[0]


def _questions(sets: Sets) -> Iterator[tuple[str, list[tuple[Prompt, Run]]]]:
    """The category of every question, and its turns."""
    for subset, prompts, runs in sets:
        for _, turns in itertools.groupby(zip(prompts, runs, strict=True), key=lambda turn: turn[0].id):
            turns = list(turns)
            conversation = turns[0][0].conversation
            yield (conversation.category if conversation else "") or subset, turns


def _write_spec_bench(label: str, sets: Sets, tokenizer: Any) -> dict[str, str]:
    lines = []
    for category, turns in _questions(sets):
        lengths = [step_lengths(run) for _, run in turns]
        choice = {
            "index": 0,
            "turns": [tokenizer.decode(run.texts[0], skip_special_tokens=True) for _, run in turns],
            "decoding_steps": [len(steps) for steps in lengths],
            "new_tokens": [run.num_tokens for _, run in turns],
            "wall_time": [run.seconds for _, run in turns],
            "accept_lengths": [length for steps in lengths for length in steps],
        }
        name = turns[0][0].id
        answer = {"question_id": name, "category": category, "answer_id": f"{label}-{name}", "model_id": label}
        lines.append(json.dumps({**answer, "choices": [choice], "tstamp": time.time()}) + "\n")
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
    requests: dict[str, dict[str, float]] = {}
    categories: dict[str, list[float]] = {}
    histogram: Counter[int] = Counter()
    responses = []
    for category, turns in _questions(sets):
        lengths = [[1, *step_lengths(run)] for _, run in turns]
        means = [statistics.mean(steps) for steps in lengths]
        name = turns[0][0].id
        requests[f"{category}/{name}" if name in requests else name] = {
            str(prompt.turn): mean for (prompt, _), mean in zip(turns, means, strict=True)
        }
        categories.setdefault(category, []).extend(means)
        histogram.update(length for steps in lengths for length in steps)
        texts = [tokenizer.decode(run.texts[0], skip_special_tokens=True) for _, run in turns]
        answer = {"question_id": name, "category": category, "choices": [{"index": 0, "turns": texts}]}
        responses.append(json.dumps(answer) + "\n")
    joint, conditional, before = {}, {}, sum(histogram.values())
    for length in sorted(histogram):
        reached = sum(count for other, count in histogram.items() if other >= length)
        joint[length], conditional[length] = reached / sum(histogram.values()), reached / before
        before = reached
    rates = {
        "Request_AL": requests,
        "Average_AL": statistics.mean(mean for means in categories.values() for mean in means),
        "Category_AL": {category: statistics.mean(means) for category, means in categories.items()},
        "Acceptance_Length_Histogram": dict(sorted(histogram.items())),
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }
    runs = [run for _, _, runs in sets for run in runs]
    files = {"acceptance_rate": [rates], "timing": [_describe_times(runs)]}
    texts = {f"{label}/{name}.json": json.dumps(content, indent=1) + "\n" for name, content in files.items()}
    return {**texts, f"{label}/responses.jsonl": "".join(responses)}


def _describe_times(runs: Sequence[Run]) -> dict[str, Any]:
    seconds, tokens = [run.seconds for run in runs], [run.num_tokens for run in runs]
    found = {
        "Output TPS": f"{sum(tokens) / sum(seconds):.4f}",
        "E2E Request Time": _describe(seconds),
        "Number of Output Tokens": _describe(tokens),
    }
    first = [run.stats.seconds["prefill"] for run in runs if run.stats is not None]
    if len(first) == len(runs):  # transformers' own `generate` does not tell
        rest = [max(run.seconds - one, 1e-9) for run, one in zip(runs, first, strict=True)]
        rates = [(number - 1) / time for number, time in zip(tokens, rest, strict=True)]
        steps = [time / max(1, len(step_lengths(run))) for run, time in zip(runs, rest, strict=True)]
        found |= {
            "TTFT Time": _describe(first),
            "Request Generation Step Time": _describe(steps),
            "Request Generation Tokens Per Second": _describe(rates),
        }
    return found


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
