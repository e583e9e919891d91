"""Compares all drafters on one target in one table and one small JSON file.

    python scripts/benchmarks/drafters.py --prompts examples/prompts.jsonl --output outputs/drafters

Every drafter gets a tree with the same number of nodes, cut to the depth that the drafter can draft. All drafters and
baselines take turns on each file of prompts at each temperature. OUTPUT.json is written after each report, and the same
command continues after an interruption.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console

from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.scripts.measuring.contenders import NGRAMS
from draftsmith.scripts.measuring.environment import describe_machine
from draftsmith.scripts.measuring.matrix import (
    Measured,
    Subject,
    check_matrix,
    load_subject,
    measure_combination,
    name_heads,
)
from draftsmith.scripts.measuring.measure import PLAIN, Contender, Settings
from draftsmith.scripts.measuring.table import Grid, format_number
from draftsmith.scripts.shared.model_loading import DTYPES, TREE_HELP
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

HEADS_FOLDER = Path("examples/heads")
PARTS = ("draft", "verify", "step")
AVERAGED = ("acceptance_length", "over_transformers", "over_plain")
KEPT = ("tree", "problem", "tokens_per_second", "over_transformers", "over_transformers_quartiles", "acceptance_length",
        "acceptance_by_depth", "num_identical", "num_compared")  # fmt: skip


@dataclass
class DraftersArguments:
    target: str = option(default="examples/chat-13m", help="Target: a folder or hub id.")
    heads: list[str] = option(default_factory=list, help="Folders of draft heads; none = all in examples/heads.")
    prompts: list[str] = option(
        default_factory=lambda: ["examples/prompts.jsonl"],
        help="Files of prompts or conversations (JSON lines, .gz or not); the first user turns are used.",
    )
    num_prompts: int | None = option(default=None, help="Use only the first N prompts of each file; none = all.")
    max_new_tokens: int = option(default=128, help="Tokens decoded for each prompt (fewer after an EOS).")
    temperature: list[float] = option(default_factory=lambda: [0.0, 1.0], help="Sampling temperatures; 0 = greedy.")
    dtype: str = option(default="float32", help="Dtype of target and heads.", metadata={"choices": list(DTYPES[1:])})
    tree: str = option(default="dynamic:4,4,16", help=f"Token tree: {TREE_HELP}.")
    compile: bool = option(default=True, help="Compile the drafters. Acceptance stays the same.")
    seed: int = option(default=0, help="Prompt i is sampled with the seed SEED + i.")
    repeats: int = option(default=3, help="Rounds over all prompts.")
    threads: int | None = option(default=None, help="CPU threads; none = torch's choice.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    output: str = option(default="outputs/drafters", help="Write OUTPUT.md and OUTPUT.json.")
    overwrite: bool = option(default=False, help="Ignore an existing OUTPUT.json and measure everything again.")

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "repeats", "num_prompts", "threads")
        check_matrix(self, counts=counts, lists=("prompts", "temperature"))
        self.heads = self.heads or sorted(str(config.parent) for config in HEADS_FOLDER.glob("*/config.json"))
        if not self.heads:
            raise ValueError(f"{HEADS_FOLDER} has no heads: run this in the repository's root, or give --heads")

    def settings(self, temperature: float) -> Settings:
        return Settings(self.max_new_tokens, temperature, self.seed, self.repeats)


def describe_conditions(args: DraftersArguments) -> dict[str, Any]:
    """What all reports of one file share: options, heads, target, machine."""
    names = ("target", "dtype", "tree", "compile", "num_prompts", "max_new_tokens", "repeats", "seed")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    heads = {name: describe_heads(Path(path)) for name, path in name_heads(args.heads).items()}
    return {**{name: getattr(args, name) for name in names}, **describe_machine(device), "heads": heads}


def describe_heads(folder: Path) -> dict[str, Any]:
    """Path, fingerprint of configuration and weights, and the number of training tokens if there is a training
    record."""
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    if len(files) < 2:
        raise ValueError(f"{folder} has no config.json or no *.safetensors: give the folder of trained heads")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    record = folder / "training_record.json"
    training = json.loads(record.read_text(encoding="utf-8")).get("training", {}) if record.is_file() else {}
    return {"path": str(folder), "fingerprint": digest, "training_tokens": training.get("tokens")}


def read_reports(path: Path, conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports in a file of this program; none without a file.

    Raises:
        ValueError: they were measured under other conditions.
    """
    if not path.is_file():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    theirs = content["conditions"]
    changed = [key for key, value in conditions.items() if theirs.get(key) != value]
    if changed:
        different = "; ".join(f"{key} {theirs.get(key)!r} there, {conditions[key]!r} now" for key in changed)
        raise ValueError(
            f"{path} was measured under other conditions ({different}): give --overwrite or another --output"
        )
    reports: list[dict[str, Any]] = content["reports"]
    return reports


def run(args: DraftersArguments, console: Console) -> Grid:
    """Measures what is missing, then prints and writes the table."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    path = Path(f"{args.output}.json")
    conditions = describe_conditions(args)
    reports = [] if args.overwrite else read_reports(path, conditions)
    done = {(one["environment"]["prompts"], one["environment"]["temperature"]) for one in reports}
    missing = [pair for pair in itertools.product(args.prompts, args.temperature) if pair not in done]
    subject = load_all(args) if missing else None
    contenders: list[Contender] | None = None  # compiled once
    content = {"conditions": conditions, "reports": reports}
    for prompts, temperature in missing:
        assert subject is not None
        measured = measure_combination(
            subject,
            prompts,
            args.settings(temperature),
            trees=[args.tree],
            is_compiled=args.compile,
            is_each_once=True,
            earlier=contenders,
        )
        contenders = measured.contenders
        reports.append({"environment": measured.environment, "rows": summarize(measured, subject)})
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    grid = make_grid(content)
    grid.print(console)
    write_text(Path(f"{args.output}.md"), render_page(content, grid))
    console.print(f"wrote {args.output}.md and {args.output}.json", markup=False, highlight=False)
    return grid


def load_all(args: DraftersArguments) -> Subject:
    subject = load_subject(
        args.target,
        heads=args.heads,
        assistant=None,
        drafter_model=None,
        has_ngrams=False,
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        device=args.device,
        has_packed_weights=False,
        is_only_target=True,
    )
    return replace(subject, drafters={NGRAMS: NgramDrafter(), **subject.drafters})


def summarize(measured: Measured, subject: Subject) -> list[dict[str, Any]]:
    """The numbers that tables and charts show. `over_plain` is the speed over the fastest plain decoding of this
    library in the same report."""
    plain = max(row.tokens_per_second for row in measured.rows if row.name.startswith(PLAIN))
    rows = []
    for row in measured.rows:
        name = row.name.removesuffix(", compiled")
        drafter, step = subject.drafters.get(name), row.step_milliseconds
        rows.append(
            {
                "name": row.name if drafter is None else name,
                **{key: getattr(row, key) for key in KEPT},
                "over_plain": row.tokens_per_second / plain,
                "step_milliseconds": None if step is None else {part: step[part] for part in PARTS},
                "num_parameters": drafter.num_parameters() if isinstance(drafter, torch.nn.Module) else 0,
            }
        )
    return rows


@dataclass(frozen=True)
class Mean:
    """A contender at one temperature: means over the files of prompts."""

    acceptance_length: float
    over_transformers: float
    over_plain: float
    step_milliseconds: dict[str, float] | None
    num_identical: int | None
    num_compared: int


def find_means(content: dict[str, Any], temperature: float) -> dict[str, Mean]:
    """By name; contenders that did not run on every file are left out."""
    reports = [one for one in content["reports"] if one["environment"]["temperature"] == temperature]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in itertools.chain.from_iterable(one["rows"] for one in reports):
        if not row["problem"]:
            found.setdefault(row["name"], []).append(row)
    means = {}
    for name, rows in found.items():
        if len(rows) < len(reports):
            continue
        steps = [row["step_milliseconds"] for row in rows if row["step_milliseconds"] is not None]
        identical = [row["num_identical"] for row in rows]
        means[name] = Mean(
            *(statistics.fmean(row[key] for row in rows) for key in AVERAGED),
            {part: statistics.fmean(step[part] for step in steps) for part in PARTS} if steps else None,
            None if None in identical else sum(identical),
            sum(row["num_compared"] for row in rows),
        )
    return means


def find_temperatures(content: dict[str, Any]) -> list[float]:
    return sorted({one["environment"]["temperature"] for one in content["reports"]})


def sort_names(content: dict[str, Any]) -> list[str]:
    """Drafters, the best mean acceptance length at the lowest temperature first; then the baselines."""
    lengths = {
        name: mean.acceptance_length for name, mean in find_means(content, find_temperatures(content)[0]).items()
    }
    names = dict.fromkeys(row["name"] for one in content["reports"] for row in one["rows"])
    drafters = [name for name in names if name in content["conditions"]["heads"] or name == NGRAMS]
    return [*sorted(drafters, key=lambda name: -lengths.get(name, 0.0)), *(n for n in names if n not in drafters)]


def make_grid(content: dict[str, Any]) -> Grid:
    temperatures = find_temperatures(content)
    means = {t: find_means(content, t) for t in temperatures}
    rows = {row["name"]: row for one in content["reports"] for row in one["rows"]}
    cells = []
    for name in sort_names(content):
        tokens = content["conditions"]["heads"].get(name, {}).get("training_tokens")
        size = rows[name]["num_parameters"]
        line = [name, f"{size / 1e6:.2f} M" if size else "–", f"{tokens / 1e6:.1f} M" if tokens else "–"]
        for temperature in temperatures:
            line += _describe_mean(means[temperature].get(name))
        cold = means[temperatures[0]].get(name)
        step = cold.step_milliseconds if cold is not None else None
        cells.append([*line, *(format_number(step[part] if step else None, ".1f") for part in PARTS)])
    columns = ["drafter", "parameters", "training tokens"]
    for temperature in temperatures:
        columns += [f"T={temperature:g}: tokens/step", "× generate", "× plain", "same text"]
    problems = {f"{row['name']} did not run: {row['problem']}" for row in rows.values() if row["problem"]}
    notes = [
        "tokens/step: acceptance length, the target's own token included. × generate: speed over transformers' eager "
        "`generate`. × plain: speed over the fastest plain decoding of this library. same text: at T=0 equal to "
        "transformers' `generate`, above to plain decoding with the same seed. ms: of a step at "
        f"T={temperatures[0]:g}.",
        *sorted(problems),
    ]
    return Grid(
        "All drafters, means of all files of prompts", [*columns, *(f"{part} ms" for part in PARTS)], cells, notes
    )


def _describe_mean(mean: Mean | None) -> list[str]:
    if mean is None:
        return ["–"] * 4
    same = "–" if mean.num_identical is None else f"{mean.num_identical}/{mean.num_compared}"
    return [f"{x:.2f}" for x in (mean.acceptance_length, mean.over_transformers, mean.over_plain)] + [same]


def render_page(content: dict[str, Any], grid: Grid) -> str:
    one, environments = content["conditions"], [report["environment"] for report in content["reports"]]
    files = ", ".join({f"{each['num_prompts']} of {Path(each['prompts']).name}": None for each in environments})
    return (
        f"# Drafters on one target\n\n```bash\n{environments[0]['command']}\n```\n\n"
        f"Target {one['target']}, {one['dtype']}, batch 1, tree {one['tree']} (cut to a drafter's depth), "
        f"drafters {'compiled' if one['compile'] else 'eager'}. Prompts: {files}; up to {one['max_new_tokens']} tokens "
        f"each, {one['repeats']} repeats in turns. {one['gpu'] or one['cpu']}, {one['threads']} threads; torch "
        f"{one['torch']}, transformers {one['transformers']}; commit {environments[0]['commit']}.\n\n"
        f"{grid.to_markdown()}"
    )


def main() -> None:
    with one_line_errors("drafters.py"):
        (args,) = ProgramParser([DraftersArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
