"""Measures all drafters side by side on one target: one table of sizes, training, acceptance, speed and texts.

    python scripts/benchmarks/drafter_table.py --prompts examples/prompts.jsonl --json outputs/drafters.json \\
        --markdown outputs/drafters.md --plot outputs/drafters.png

Each drafter has one tree, of as many nodes as the others', cut to the depth it can draft. Each file of prompts at each
temperature is a report in the JSON file, written when it is done. What the file holds already is not measured again, so
an interrupted run goes on, and heads that are trained later are measured alone (with the baselines) and join the table.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from transformers import HfArgumentParser

from inference.drafters.ngram import NgramDrafter
from scripts.benchmarks.contenders import NGRAMS
from scripts.benchmarks.drafter_portions import DrafterInfo, Portions, describe_drafter, fingerprint_model, read_reports
from scripts.benchmarks.drafter_render import draw_depths, make_grids, render_page
from scripts.benchmarks.drafter_results import Results
from scripts.benchmarks.environment import describe_machine
from scripts.benchmarks.matrix import SMALL_MODEL, Subject, check_matrix, load_subject, measure_combination, name_heads
from scripts.benchmarks.measure import Contender, Settings
from scripts.benchmarks.report import make_report, write_json, write_text
from scripts.model_loading import DTYPES, TREE_HELP

HEADS_FOLDER = Path("examples/heads")


def find_heads() -> list[str]:
    """The committed heads."""
    return sorted(str(config.parent) for config in HEADS_FOLDER.glob("*/config.json"))


@dataclass
class TableArguments:
    target: str = field(default="examples/chat-13m", metadata={"help": "Target: a folder or hub id."})
    heads: list[str] = field(
        default_factory=find_heads,
        metadata={"help": "Folders of draft heads; default: all below examples/heads."},
    )
    drafter_model: str | None = field(
        default=None, metadata={"help": "Folder of a small causal LM with the target's tokenizer, one drafter more."}
    )
    prompts: list[str] = field(
        default_factory=lambda: ["examples/prompts.jsonl"],
        metadata={"help": "Files of JSON lines (.gz or not), `turns` or conversations; first user turns."},
    )
    num_prompts: int | None = field(default=None, metadata={"help": "The first so many prompts of a file; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    temperature: list[float] = field(
        default_factory=lambda: [0.0, 1.0], metadata={"help": "Sampling temperatures; 0 = greedy."}
    )
    dtype: str = field(
        default="float32", metadata={"help": "Weights of the target and the heads.", "choices": list(DTYPES[1:])}
    )
    tree: str = field(
        default="dynamic:4,4,16",
        metadata={"help": f"Token tree: {TREE_HELP}. Cut to a drafter's depth, with as many nodes; files are not."},
    )
    compile: bool = field(default=True, metadata={"help": "Compile the drafters; acceptance is the same."})
    seed: int = field(default=0, metadata={"help": "Prompt i is sampled with the seed SEED + i."})
    repeats: int = field(default=3, metadata={"help": "Rounds over all prompts."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; none = torch's choice."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    json: str = field(
        default="outputs/drafters.json",
        metadata={"help": "The reports. What it holds is kept, and not measured again."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Measure everything anew, whatever --json holds."})
    markdown: str | None = field(default=None, metadata={"help": "Write the tables to this Markdown file."})
    plot: str | None = field(default=None, metadata={"help": "Draw acceptance by depth into this PNG file."})

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "repeats", "num_prompts", "threads")
        check_matrix(self, counts=counts, lists=("prompts", "temperature"))
        if not self.heads:
            raise ValueError(f"no heads below {HEADS_FOLDER}: run this in the repository's root, or give --heads")

    def settings(self, temperature: float) -> Settings:
        return Settings(
            max_new_tokens=self.max_new_tokens, temperature=temperature, seed=self.seed, repeats=self.repeats
        )


def describe_drafters(args: TableArguments) -> dict[str, DrafterInfo]:
    """All that are wanted, by the names their rows have."""
    drafters = {NGRAMS: DrafterInfo("n-grams", "", "untrained", 0, {})}
    drafters |= {name: describe_drafter(path) for name, path in name_heads(args.heads).items()}
    if args.drafter_model is not None:
        drafters[SMALL_MODEL] = describe_drafter(args.drafter_model, kind=SMALL_MODEL)
    return drafters


def describe_conditions(args: TableArguments) -> dict[str, Any]:
    """What one table has in common: a ratio of speeds is worth nothing across machines, nor an acceptance length across
    numbers of tokens."""
    names = ("dtype", "tree", "compile", "num_prompts", "max_new_tokens", "repeats", "seed")
    machine = describe_machine(torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu")))
    return {"target": fingerprint_model(args.target), **{name: getattr(args, name) for name in names}, **machine}


def run(args: TableArguments, console: Console) -> Results:
    """Measures what is missing, then shows and writes the whole table."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    path = Path(args.json)
    portions = Portions(
        [] if args.overwrite else read_reports(path),
        conditions=describe_conditions(args),
        drafters=describe_drafters(args),
        prompts=args.prompts,
    )
    for note in portions.dropped:
        console.print(f"out of date, measured anew: {note}", markup=False, highlight=False)
    subject: Subject | None = None
    contenders: dict[tuple[str, ...], list[Contender]] = {}  # by who takes part: compiled once
    for temperature, prompts in itertools.product(args.temperature, args.prompts):
        names = portions.missing(prompts, temperature)
        if not names:
            continue
        subject = subject or load_all(args)
        measured = measure_combination(
            replace(subject, drafters={name: subject.drafters[name] for name in names}),
            prompts,
            args.settings(temperature),
            trees=[args.tree],
            is_compiled=args.compile,
            is_each_once=True,
            earlier=contenders.get(tuple(names)),
        )
        contenders[tuple(names)] = measured.contenders
        environment = {**measured.environment, **portions.describe(prompts, names)}
        portions.reports.append(make_report(environment, measured.rows, measured.contenders))
        write_json(path, portions.reports)
        console.print(f"measured: {', '.join(names)}; T = {temperature:g} on {prompts}", markup=False, highlight=False)
    write_json(path, portions.reports)  # without what is out of date
    results = Results(portions.reports)
    for grid in make_grids(results):
        if grid.cells:
            grid.print(console)
    if args.markdown is not None:
        write_text(Path(args.markdown), render_page(results))
    if args.plot is not None:
        draw_depths(Path(args.plot), results)
    return results


def load_all(args: TableArguments) -> Subject:
    subject = load_subject(
        args.target,
        heads=args.heads,
        assistant=None,
        drafter_model=args.drafter_model,
        has_ngrams=False,
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        plain_dtypes=[],
        device=args.device,
        is_only_target=True,
    )
    return replace(subject, drafters={NGRAMS: NgramDrafter(), **subject.drafters})


def main() -> None:
    parser = HfArgumentParser(TableArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        run(args, Console(width=None if sys.stdout.isatty() else 150))
    except (ValueError, OSError) as error:
        sys.exit(f"drafter_table.py: {error}")


if __name__ == "__main__":
    main()
