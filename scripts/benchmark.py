"""Measures draft heads and every baseline side by side, in one process.

    draftsmith bench --target examples/chat-13m --heads examples/heads/medusa examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --tree dynamic chain --json outputs/benchmark.json

Baselines: transformers' `generate`, prompt look-up and (with --assistant) assisted generation; this library's plain
decoding, eager and compiled; and an untrained drafter of n-grams, whose speed-up comes from repeated text only.

Several targets, prompt files, temperatures and batch sizes make a matrix, with one report for each combination. Several
batch sizes add one table that compares them.

With --distributed, every drafter is measured once more while other processes verify:

    torchrun --nproc_per_node 2 -m draftsmith bench --target examples/chat-13m \\
        --heads examples/heads/eagle3 --prompts examples/prompts.jsonl --distributed
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from rich.console import Console

from draftsmith.inference.acceptance.rules import RULES, resolve_rule
from draftsmith.scripts.measuring.batches import make_batch_grid
from draftsmith.scripts.measuring.matrix import (
    Measured,
    check_matrix,
    is_faster_compiled,
    load_subject,
    measure_combination,
)
from draftsmith.scripts.measuring.measure import Settings
from draftsmith.scripts.measuring.plot import draw_batch_plot, draw_plot
from draftsmith.scripts.measuring.report import headline, make_report, write_json
from draftsmith.scripts.measuring.table import Grid, make_grids
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, TREE_HELP
from draftsmith.scripts.shared.ranks import choose_device, connect_servers, read_rank, serve_rank
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

GROUPS = {
    "target and drafters": "target heads draft_vocab_size drafter_model assistant tree acceptance",
    "prompts and sampling": "prompts num_prompts minutes max_new_tokens temperature repetition_penalty batch_size seed",
    "execution": "dtype compile pack_weights distributed device threads repeats",
    "output": "json markdown plot",
}


@dataclass
class BenchmarkArguments:
    target: list[str] = option(help="Targets: folders, hub ids or GGUF files.")
    prompts: list[str] = option(
        help="Files of prompts or conversations (JSON lines, .gz or not); the first user turns are used."
    )
    heads: list[str] = option(
        default_factory=list,
        help="Draft heads: folders or hub ids. With several targets, heads that do not fit one of them get a "
        "row that says so.",
    )
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    draft_vocab_data: list[str] = option(default_factory=list, help=DATA_HELP)
    assistant: str | None = option(
        default=None, help="A small causal LM with the target's tokenizer, for transformers' assisted generation."
    )
    drafter_model: str | None = option(
        default=None, help="A small causal LM with the target's tokenizer, as one more drafter."
    )
    num_prompts: int | None = option(
        default=None, help="Use only the first N prompts of each file; none = as many as --minutes allow."
    )
    minutes: float = option(
        default=3.0,
        help="Minutes for each report, of as many prompts as fit; 0 = all. --num_prompts sets their number instead.",
    )
    max_new_tokens: int = option(default=128, help="Tokens decoded for each prompt (fewer after an EOS).")
    temperature: list[float] = option(default_factory=lambda: [0.0], help="Sampling temperatures; 0 = greedy.")
    repetition_penalty: float | None = option(
        default=None,
        help="As in transformers: above 1, tokens of the text get lower scores; 1 = no penalty; none = as the "
        "target's generation config says.",
    )
    batch_size: list[int] = option(
        default_factory=lambda: [1],
        help="Prompts decoded together, left-padded, in the file's order; the last batch is filled up with the "
        "first prompts.",
    )
    dtype: str = option(default="auto", help=DTYPE_HELP, metadata={"choices": list(DTYPES)})
    tree: list[str] = option(default_factory=lambda: ["auto"], help=f"Token trees: {TREE_HELP}.")
    acceptance: list[str] = option(
        default_factory=lambda: ["exact"],
        help=f"Acceptance rules: {', '.join(RULES)}; at temperatures above 0 each is measured with every tree, "
        "or gets a row that says why not.",
    )
    compile: bool | None = option(
        default=None,
        help="Compile drafters and plain decoding; none = only where compiled decoding is faster: on a CPU with "
        "less than 1 GB of weights. Plain decoding and generate then run eagerly too.",
        metadata={"nargs": "?", "const": True},
    )
    pack_weights: bool = option(
        default=False, help="On a CPU: pack the weights, for all contenders. It takes their memory once more."
    )
    distributed: bool = option(
        default=False, help="Under torchrun: measure every drafter also with the other ranks as servers of the target."
    )
    seed: int = option(default=0, help="Prompt i is sampled with the seed SEED + i.")
    repeats: int = option(default=3, help="Rounds over all prompts.")
    threads: int | None = option(default=None, help="CPU threads; none = torch's choice.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    json: str | None = option(default=None, help="Write rows, runs and environment of every report to this JSON file.")
    plot: str | None = option(
        default=None,
        help="Draw a chart into this PNG file; several reports go into FILE-1.png, FILE-2.png, ..., and several "
        "batch sizes also into FILE-batches.png or FILE-batches-1.png, ...",
    )
    markdown: str | None = option(default=None, help="Write the tables to this Markdown file.")

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "repeats", "num_prompts", "threads")
        check_matrix(self, counts=counts, lists=("target", "prompts", "temperature", "acceptance", "batch_size"))
        if self.minutes < 0:
            raise ValueError(f"got --minutes {self.minutes:g}: give a positive number, or 0 for all prompts")
        if min(self.batch_size) < 1:
            raise ValueError(f"got --batch_size {' '.join(map(str, self.batch_size))}: give sizes of at least 1")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise ValueError(f"got --repetition_penalty {self.repetition_penalty}: give a positive number; 1 = none")
        self.vocabulary = DraftVocabulary.of(self)
        for rule in self.acceptance:
            resolve_rule(rule)
        if self.distributed and (len(self.target) > 1 or self.pack_weights):
            raise ValueError("got --distributed with several targets or --pack_weights: servers load one target, as is")
        if self.acceptance != ["exact"] and not any(self.temperature):
            raise ValueError(
                f"got --acceptance {' '.join(self.acceptance)} for greedy decoding, where all rules are the same: give "
                "a --temperature above 0 too"
            )

    def settings(self, temperature: float, batch_size: int = 1) -> Settings:
        return Settings(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            seed=self.seed,
            repeats=self.repeats,
            batch_size=batch_size,
            repetition_penalty=self.repetition_penalty,
        )


class Publication:
    """Prints the tables and writes the files. The files are written after each report, so a kill loses no report."""

    def __init__(self, args: BenchmarkArguments, console: Console) -> None:
        self.args, self.console = args, console
        self.reports: list[dict[str, Any]] = []
        self._pages: list[str] = []
        self._num_groups = 0

    def add(self, measured: Measured) -> None:
        args = self.args
        self.reports.append(make_report(measured.environment, measured.rows, measured.contenders))
        if args.json is not None:
            write_json(Path(args.json), self.reports)
        grids = make_grids(measured.rows, measured.environment)
        if args.plot is not None:
            draw_plot(name_plot(args, len(self.reports)), measured.rows, grids[0].title)
        self._show(grids, measured.environment)
        for line in headline(measured.rows):
            self.console.print(line, markup=False, highlight=False)

    def add_batches(self, group: Sequence[Measured]) -> None:
        """The same target, prompts and temperature at several batch sizes."""
        self._num_groups += 1
        environment = group[0].environment
        rows = {one.environment["batch"]: one.rows for one in group}
        grid = make_batch_grid(rows, environment)
        if self.args.plot is not None:
            draw_batch_plot(name_plot(self.args, self._num_groups, is_group=True), rows, grid.title)
        self._show([grid], environment)

    def _show(self, grids: Sequence[Grid], environment: dict[str, Any]) -> None:
        for grid in grids:
            grid.print(self.console)
        self._pages += [grid.to_markdown() for grid in grids]
        if self.args.markdown is not None:
            pages = [f"```bash\n{environment['command']}\n```\n", *self._pages]
            write_text(Path(self.args.markdown), "\n".join(pages))


def run(args: BenchmarkArguments, console: Console) -> list[dict[str, Any]]:
    """Measures every target x prompt file x temperature x batch size."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    publication = Publication(args, console)
    for name in args.target:
        subject = load_subject(
            name,
            heads=args.heads,
            vocabulary=args.vocabulary,
            assistant=args.assistant,
            drafter_model=args.drafter_model,
            prompts=args.prompts,
            num_prompts=args.num_prompts,
            max_new_tokens=args.max_new_tokens,
            dtype=args.dtype,
            device=choose_device(args.device) if args.distributed else args.device,
            has_packed_weights=args.pack_weights,
            is_only_target=len(args.target) == 1,
        )
        is_compiled = is_faster_compiled(subject.target) if args.compile is None else args.compile
        link = connect_servers(subject.target) if args.distributed else None
        for path, temperature in itertools.product(args.prompts, args.temperature):
            group: list[Measured] = []
            for batch_size in args.batch_size:
                measured = measure_combination(
                    subject,
                    path,
                    args.settings(temperature, batch_size),
                    trees=args.tree,
                    acceptance=args.acceptance,
                    is_compiled=is_compiled,
                    minutes=args.minutes if args.num_prompts is None else 0.0,
                    single_texts=group[0].single_texts if group else None,
                    link=link,
                )
                publication.add(measured)
                group.append(replace(measured, contenders=[]))  # frees their buffers
            if len(group) > 1:
                publication.add_batches(group)
        if link is not None:
            link.close()
        del subject, measured  # before the next target needs the memory
    if files := [name for name in (args.json, args.markdown, args.plot) if name is not None]:
        console.print(f"Wrote {', '.join(files)}.", markup=False, highlight=False)
    return publication.reports


def name_plot(args: BenchmarkArguments, number: int, *, is_group: bool = False) -> Path:
    """The file of a report's chart: --plot itself, or FILE-1.png, FILE-2.png, ... for several reports. The chart of a
    group of batch sizes goes to FILE-batches.png, or to FILE-batches-1.png, ..."""
    path = Path(args.plot or "")
    num_groups = len(args.target) * len(args.prompts) * len(args.temperature)
    is_single = (num_groups if is_group else num_groups * len(args.batch_size)) == 1
    stem = f"{path.stem}-batches" if is_group else path.stem
    return path.with_name(f"{stem}{path.suffix}" if is_single else f"{stem}-{number}{path.suffix}")


def main() -> None:
    with one_line_errors("draftsmith bench"):
        (args,) = ProgramParser([BenchmarkArguments], doc=__doc__, groups=GROUPS).read()
        if args.distributed and read_rank("bench") > 0:
            if args.threads is not None:
                torch.set_num_threads(args.threads)
            serve_rank(args.target[0], dtype=args.dtype, device=args.device)
            return
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
