"""Measures draft heads and every baseline side by side, in one process.

    draftsmith bench --target examples/chat-13m --heads examples/heads/medusa examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --tree dynamic chain --json outputs/benchmark.json

Baselines: transformers' `generate`, prompt look-up and (with --assistant) assisted generation; this library's plain
decoding, eager and compiled; and an untrained drafter of n-grams, whose speed-up comes from repeated text only.

Several prompt files, temperatures and batch sizes make a matrix, with one report for each combination.
"""

import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from rich.console import Console

from draftsmith.inference.acceptance.rules import RULES, resolve_rule
from draftsmith.scripts.measuring.matrix import check_matrix, is_faster_compiled, load_subject, measure_combination
from draftsmith.scripts.measuring.measure import Settings
from draftsmith.scripts.measuring.report import headline, make_report
from draftsmith.scripts.measuring.result_formats import FORMATS, ResultFiles
from draftsmith.scripts.measuring.table import make_grids
from draftsmith.scripts.shared.draft_vocabulary import DATA_HELP, SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPE_HELP, DTYPES, TREE_HELP
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text

GROUPS = {
    "target and drafters": "target heads draft_vocab_size drafter_model assistant tree acceptance",
    "prompts and sampling": "prompts max_turns num_prompts minutes max_new_tokens temperature repetition_penalty "
    "batch_size seed",
    "execution": "dtype compile pack_weights batch_invariant device threads repeats",
    "output": "json markdown format results",
}


@dataclass
class BenchmarkArguments:
    target: str = option(help="The target: a folder, a hub id or a GGUF file.")
    prompts: list[str] = option(
        help="Files of prompts or conversations (JSON lines, .gz or not). The target answers every turn of the user."
    )
    max_turns: int | None = option(default=None, help="Use only the first N user turns of a conversation.")
    heads: list[str] = option(default_factory=list, help="Draft heads: folders or hub ids.")
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    draft_vocab_data: list[str] = option(default_factory=list, help=DATA_HELP)
    assistant: str | None = option(
        default=None,
        help="A small causal LM with the target's tokenizer, or DFlash heads exported with --format transformers, for "
        "transformers' assisted generation.",
    )
    drafter_model: str | None = option(
        default=None, help="A small causal LM with the target's tokenizer, as one more drafter."
    )
    num_prompts: int | None = option(
        default=None, help="Use only the first N prompts of each file; none = as many as --minutes allow."
    )
    minutes: float = option(
        default=3.0,
        help="Minutes for each report, of as many prompts as fit, one at least; compiling the first heads can take "
        "longer. 0 = all prompts. --num_prompts sets their number instead.",
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
        help="Compile drafters and plain decoding, as --minutes allow; none = only where compiled decoding is faster: "
        "on a CPU with less than 1 GB of weights. Plain decoding and generate then run eagerly too.",
        metadata={"nargs": "?", "const": True},
    )
    pack_weights: bool = option(
        default=False, help="On a CPU: pack the weights, for all contenders. It takes their memory once more."
    )
    batch_invariant: bool = option(
        default=False,
        help="Score tokens alike in passes of any width. Texts are compared with plain decoding's; the same without "
        "this mode is timed beside it. Unlike elsewhere, off by default.",
    )
    seed: int = option(default=0, help="Prompt i is sampled with the seed SEED + i.")
    repeats: int = option(default=3, help="Rounds over all prompts.")
    threads: int | None = option(default=None, help="CPU threads; none = torch's choice.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    json: str | None = option(default=None, help="Write rows, runs and environment of every report to this JSON file.")
    markdown: str | None = option(default=None, help="Write the tables to this Markdown file.")
    format: str | None = option(
        default=None,
        help="Also write --results as this project's programs write and read them.",
        metadata={"choices": list(FORMATS)},
    )
    results: str | None = option(default=None, help="The folder for --format.")

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "repeats", "num_prompts", "max_turns", "threads")
        check_matrix(self, counts=counts, lists=("prompts", "temperature", "acceptance", "batch_size"))
        if not 0 <= self.minutes < math.inf:
            raise ValueError(f"got --minutes {self.minutes:g}: give a positive number, or 0 for all prompts")
        if min(self.batch_size) < 1:
            raise ValueError(f"got --batch_size {' '.join(map(str, self.batch_size))}: give sizes of at least 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"got --repetition_penalty {self.repetition_penalty}: give a positive number; 1 = none")
        if (self.format is None) != (self.results is None):
            raise ValueError("--format and --results go together: give both, or neither")
        if self.format is not None and (self.batch_size != [1] or len(self.temperature) > 1):
            raise ValueError(f"got --format {self.format}: it has results of single prompts at one --temperature")
        names = [_name_of(path) for path in self.prompts]
        if self.format is not None and len({*names}) < len(names):
            raise ValueError(
                f"got --format {self.format} with two --prompts called {max(names, key=names.count)}: rename one"
            )
        self.vocabulary = DraftVocabulary.of(self)
        for rule in self.acceptance:
            resolve_rule(rule)
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
            is_invariant=self.batch_invariant,
        )


def run(args: BenchmarkArguments, console: Console) -> None:
    """Measures every prompt file x temperature x batch size. The files are written after each report."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    subject = load_subject(
        args.target,
        heads=args.heads,
        vocabulary=args.vocabulary,
        assistant=args.assistant,
        drafter_model=args.drafter_model,
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_turns=args.max_turns,
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        device=args.device,
        has_packed_weights=args.pack_weights,
        is_invariant=args.batch_invariant,
    )
    is_compiled = is_faster_compiled(subject.target) if args.compile is None else args.compile
    reports: list[dict[str, Any]] = []
    pages: list[str] = []
    files = None if args.format is None else ResultFiles(args.format, Path(args.results or ""))
    for path, temperature in itertools.product(args.prompts, args.temperature):
        known = None
        for batch_size in args.batch_size:
            measured = measure_combination(
                subject,
                path,
                args.settings(temperature, batch_size),
                trees=args.tree,
                acceptance=args.acceptance,
                is_compiled=is_compiled,
                minutes=args.minutes if args.num_prompts is None else 0.0,
                known=known,
            )
            known = measured.prompts, measured.single_texts
            reports.append(make_report(measured.environment, measured.rows, measured.contenders))
            if args.json is not None:
                write_text(Path(args.json), json.dumps({"reports": reports}, indent=1, allow_nan=False) + "\n")
            for grid in make_grids(measured.rows, measured.environment):
                grid.print(console)
                pages.append(grid.to_markdown())
            if args.markdown is not None:
                write_text(
                    Path(args.markdown), "\n".join([f"```bash\n{measured.environment['command']}\n```\n", *pages])
                )
            if files is not None:
                files.add(
                    _name_of(path),
                    measured.contenders,
                    measured.prompts,
                    subject.tokenizer,
                    measured.environment,
                )
            for line in headline(measured.rows):
                console.print(line, markup=False, highlight=False)
            del measured  # its buffers
    if written := [name for name in (args.json, args.markdown, args.results) if name is not None]:
        console.print(f"Wrote {', '.join(written)}.", markup=False, highlight=False)


def _name_of(path: str) -> str:
    """What result files call a file of prompts."""
    return Path(path).stem.removesuffix(".jsonl")


def main() -> None:
    with one_line_errors("draftsmith bench"):
        (args,) = ProgramParser([BenchmarkArguments], doc=__doc__, groups=GROUPS).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
