"""Compares acceptance lengths with those of the EAGLE and Medusa authors' own code, in float32 on one thread of a CPU.

    python scripts/benchmarks/peers/compare.py --eagle EAGLE_CHECKOUT --eagle_python EAGLE_ENV/bin/python \\
        --medusa MEDUSA_CHECKOUT --medusa_python MEDUSA_ENV/bin/python --json outputs/peers.json

Both sides decode the same prompts with the same heads and trees. The authors' files are not edited. Environments that
work: torch 2.13 with transformers 4.53.3 for EAGLE, and with transformers 4.36.2 and numpy 1 for Medusa.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.inference import Decoder
from draftsmith.inference.text_difference import find_difference
from draftsmith.inference.trees.static import StaticTree
from draftsmith.scripts.benchmarks.peers.cases import CASES, PEERS, Case
from draftsmith.scripts.benchmarks.peers.exports import write_heads, write_target
from draftsmith.scripts.benchmarks.peers.worker import Text, Worker, mean_and_error, trim
from draftsmith.scripts.measuring.environment import describe_machine, describe_program, read_commit
from draftsmith.scripts.measuring.measure import Prompt, load_prompts
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.model_loading import load_heads, load_target
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text

DTYPE = "float32"
WORKER = Path(__file__).with_name("authors_worker.py").resolve()
SIDES = ("theirs", "same_settings", "own_settings")


@dataclass
class CompareArguments:
    eagle: str | None = option(default=None, help="Checkout of SafeAILab/EAGLE; none = do not run it.")
    eagle_python: str | None = option(default=None, help="Python of an environment that runs it.")
    medusa: str | None = option(default=None, help="Checkout of FasterDecoding/Medusa; none = do not run it.")
    medusa_python: str | None = option(default=None, help="Python of an environment that runs it.")
    target: str = option(default="examples/chat-13m", help="Target, a Llama: a folder or hub id.")
    heads: str = option(default="examples/heads", help="Folder of the folders eagle3, eagle and medusa.")
    prompts: str = option(default="examples/prompts.jsonl", help="File of prompts or conversations.")
    num_prompts: int | None = option(default=None, help="Use only the first N prompts; none = all.")
    max_new_tokens: int = option(default=128, help="Tokens decoded for each prompt (fewer after an EOS).")
    num_seeds: int = option(default=3, help="Texts for each prompt at temperature 1.")
    cases: list[str] = option(default_factory=lambda: list(CASES), help=f"Of {', '.join(CASES)}.")
    json: str | None = option(default=None, help="Write the results to this file.")

    def __post_init__(self) -> None:
        if set(self.cases) - set(CASES):
            raise ValueError(f"got --cases {' '.join(self.cases)}; allowed are {', '.join(CASES)}")
        for name in PEERS:
            if (getattr(self, name) is None) != (getattr(self, f"{name}_python") is None):
                raise ValueError(f"give both --{name} and --{name}_python, or neither")
            if (checkout := getattr(self, name)) is not None and not (Path(checkout) / name).is_dir():
                raise ValueError(f"--{name} {checkout} has no folder {name!r}: give the authors' checkout")
        if not self.chosen():
            raise ValueError("nothing to compare: give --eagle and --eagle_python, or --medusa and --medusa_python")

    def chosen(self) -> list[Case]:
        return [CASES[name] for name in self.cases if getattr(self, CASES[name].peer) is not None]


class Comparison:
    """Runs both sides on the same prompts.

    Args:
        folder: scratch, for exports and jobs.
    """

    def __init__(self, args: CompareArguments, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.target, tokenizer = load_target(args.target, dtype=DTYPE, device="cpu")
        limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
        self.prompts = load_prompts(Path(args.prompts), tokenizer, self.target, **limits)[0]
        self.eos = tokenizer.eos_token_id
        write_target(self.target, self.eos, folder / "target")

    def run(self, case: Case, temperature: float) -> dict[str, Any]:
        """One row: each side's acceptance length with its standard error, and the greedy texts that differ."""
        num_seeds = self.args.num_seeds if temperature else 1
        with self.start_worker(case, temperature) as worker:
            tree = case.tree or StaticTree(worker.header.pop("tree"))
            sides: dict[str, Callable[[Prompt, int], Text]] = {
                "theirs": lambda prompt, seed: worker.decode(prompt.input_ids[0].tolist(), seed),
                "same_settings": self.make_ours(case, temperature, tree=tree, is_coupled=False),
                "own_settings": self.make_ours(case, temperature, tree=case.own_tree),
            }
            texts = {
                name: [
                    decode(prompt, prompt.index * num_seeds + seed)
                    for prompt in self.prompts
                    for seed in range(num_seeds)
                ]
                for name, decode in sides.items()
            }
        row = {"case": case.title, "temperature": temperature, "num_texts": len(texts["theirs"]), **worker.header}
        texts["theirs"] = [trim(text, self.eos, self.args.max_new_tokens) for text in texts["theirs"]]
        for name, own in texts.items():
            mean, error = mean_and_error(own, num_seeds)
            row[name] = {"mean": mean, "error": error}
        if not temperature:
            row["differences"] = self.find_differences(texts["theirs"], texts["same_settings"])
        return row

    def start_worker(self, case: Case, temperature: float) -> Worker:
        if not (self.folder / case.heads).is_dir():
            heads = load_heads(str(Path(self.args.heads) / case.heads), self.target)
            write_heads(heads, self.target, case.peer, self.folder / case.heads)
        job = {
            "peer": case.peer,
            "target": "target",  # short names: older transformers look for kinds of models in the names of folders
            "heads": case.heads,
            # Their loop ends with more tokens than this. The last bonus token is known as one more step's root.
            "max_new_tokens": self.args.max_new_tokens - 1,
            "temperature": temperature,
            "dtype": DTYPE,
            **case.job,
        }
        python, checkout = (Path(getattr(self.args, name)).absolute() for name in (f"{case.peer}_python", case.peer))
        return Worker(python, WORKER, checkout, self.folder, job)

    def make_ours(self, case: Case, temperature: float, **options: Any) -> Callable[[Prompt, int], Text]:
        """Decodes with a `Decoder` of these options."""
        heads = load_heads(str(Path(self.args.heads) / case.heads), self.target)
        decoder = Decoder(self.target, heads, batch_invariant=False, **options)
        settings: dict[str, Any] = {"max_new_tokens": self.args.max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

        def decode(prompt: Prompt, seed: int) -> Text:
            output = decoder.generate(prompt.input_ids, seed=seed, **settings)
            counts = enumerate(output.stats.accepted_histogram, 1)
            lengths = [length for length, count in counts for _ in range(count)]
            return Text(output.sequences[0, prompt.input_ids.shape[1] :].tolist(), lengths)

        return decode

    def find_differences(self, theirs: Sequence[Text], ours: Sequence[Text]) -> list[dict[str, Any]]:
        """The greedy texts that differ, each with the first place and what the target gives both tokens there."""
        pairs = zip(self.prompts, theirs, ours, strict=True)
        found = [
            (prompt.id, find_difference(self.target, prompt.input_ids, one.tokens, other.tokens, do_sample=False))
            for prompt, one, other in pairs
        ]
        return [{"prompt": name, "place": one.place, "reason": one.explain()} for name, one in found if one]


def make_grid(rows: Sequence[dict[str, Any]]) -> Grid:
    """The table of acceptance lengths, with a note for each greedy text that differs."""
    cells, notes = [], []
    for row in rows:
        means = [f"{row[name]['mean']:.3f} ± {row[name]['error']:.3f}" for name in SIDES]
        differences = row.get("differences")
        same = "–" if differences is None else f"{row['num_texts'] - len(differences)}/{row['num_texts']}"
        cells.append([row["case"], f"{row['temperature']:g}", *means, same])
        notes += [
            f"{row['case']}: {one['prompt']} differs at token {one['place']}. {one['reason']}"
            for one in differences or []
        ]
    legend = (
        "Tokens per verify step of all texts ± the standard error over prompts. Same settings: their tree and scores, "
        "uncoupled. Own settings: this library's tree of as many nodes, coupled at T = 1."
    )
    columns = ["heads and tree", "T", "authors' code", "same settings", "own settings", "same text"]
    return Grid("Acceptance lengths beside the authors' own code", columns, cells, [*notes, legend])


def run(args: CompareArguments, console: Console) -> Grid:
    """Measures all rows, then prints the table. The JSON file is written after each row."""
    torch.set_num_threads(1)
    names = ("target", "prompts", "num_prompts", "max_new_tokens", "num_seeds")
    checkouts = {name: read_commit(Path(path)) for name in PEERS if (path := getattr(args, name)) is not None}
    environment = {**describe_machine(torch.device("cpu")), **describe_program(), "checkouts": checkouts}
    rows: list[dict[str, Any]] = []
    content = {"environment": environment | {name: getattr(args, name) for name in names}, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(args, Path(folder))
        for case in args.chosen():
            for temperature in (0.0, 1.0) if case.is_sampled else (0.0,):
                rows.append(comparison.run(case, temperature))
                console.print(f"done: {case.title}, T = {temperature:g}", highlight=False)
                if args.json is not None:
                    write_text(Path(args.json), json.dumps(content, indent=1, allow_nan=False) + "\n")
    grid = make_grid(rows)
    grid.print(console)
    if args.json is not None:
        console.print(f"wrote {args.json}", markup=False, highlight=False)
    return grid


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("compare.py"):
        (args,) = ProgramParser([CompareArguments], doc=__doc__).read(argv)
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
