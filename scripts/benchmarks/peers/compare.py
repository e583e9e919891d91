"""Compares acceptance lengths and speed with those of the EAGLE and Medusa authors' own code, on one thread of a CPU.

    python scripts/benchmarks/peers/compare.py --eagle EAGLE_CHECKOUT --eagle_python EAGLE_ENV/bin/python \\
        --medusa MEDUSA_CHECKOUT --medusa_python MEDUSA_ENV/bin/python --json outputs/peers.json

Both sides decode the same prompts with the same heads and trees, in turns, prompt by prompt. The authors' files are not
edited. Environments that work: torch 2.13 with transformers 4.53.3 for EAGLE, and with transformers 4.36.2 and numpy 1
for Medusa.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

import torch
from rich.console import Console

from draftsmith.inference import Decoder
from draftsmith.inference.trees.static import StaticTree
from draftsmith.scripts.benchmarks.peers.cases import CASES, PEERS, Case
from draftsmith.scripts.benchmarks.peers.exports import write_heads, write_target
from draftsmith.scripts.benchmarks.peers.texts import Text, first_difference, mean_and_error, tokens_per_second, trim
from draftsmith.scripts.benchmarks.peers.worker import Worker
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.measure import Prompt, load_prompts
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.model_loading import load_heads, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

MODES: dict[str, dict[str, Any]] = {"eager": {}, "packed": {"pack_weights": True}, "compiled": {"compile": True}}
DTYPES = ("float32", "bfloat16")


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
    dtypes: list[str] = option(default_factory=lambda: ["float32"], help=f"Of {', '.join(DTYPES)}.")
    modes: list[str] = option(
        default_factory=lambda: ["eager", "packed"],
        help=f"How this library decodes, of {', '.join(MODES)}. The first mode's texts are compared with theirs.",
    )
    json: str | None = option(default=None, help="Write the results to this file.")

    def __post_init__(self) -> None:
        for name, allowed in (("cases", CASES), ("dtypes", DTYPES), ("modes", MODES)):
            given = getattr(self, name)
            if not given or set(given) - set(allowed):
                raise ValueError(f"got --{name} {' '.join(given)}; allowed are {', '.join(allowed)}")
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
    """Runs both sides on the same prompts in one dtype.

    Args:
        folder: scratch, for exports and jobs.
    """

    def __init__(self, args: CompareArguments, dtype: str, folder: Path) -> None:
        self.args, self.dtype, self.folder = args, dtype, folder
        self.target, tokenizer = load_target(args.target, dtype=dtype, device="cpu")
        limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
        self.prompts = load_prompts(Path(args.prompts), tokenizer, self.target, **limits)[0]
        self.eos = tokenizer.eos_token_id
        write_target(self.target, self.eos, folder / "target")

    def run(self, case: Case, temperature: float) -> dict[str, Any]:
        """One row: each side's acceptance length with its standard error, its speed, and the texts that differ."""
        num_seeds = self.args.num_seeds if temperature else 1
        with self.start_worker(case, temperature) as worker:
            tree = case.tree or StaticTree(worker.header.pop("tree"))
            sides: dict[str, Callable[[Prompt, int], Text]] = {
                "theirs": lambda prompt, seed: worker.decode(prompt.input_ids[0].tolist(), seed)
            }
            for mode in self.args.modes:
                sides[mode] = self.make_ours(case, temperature, tree=tree, is_coupled=False, **MODES[mode])
            first = self.args.modes[0]
            sides["own_settings"] = self.make_ours(case, temperature, tree=case.own_tree, **MODES[first])
            texts = self.take_turns(sides, num_seeds)
        row = {"case": case.title, "dtype": self.dtype, "temperature": temperature, "num_texts": len(texts["theirs"])}
        row |= worker.header
        speeds = {name: tokens_per_second(own) for name, own in texts.items()}
        texts["theirs"] = [trim(text, self.eos, self.args.max_new_tokens) for text in texts["theirs"]]
        for name, own in texts.items():
            mean, error = mean_and_error(own, num_seeds)
            row[name] = {"mean": mean, "error": error, "tokens_per_second": speeds[name]}
        if not temperature:
            row["differences"] = self.find_differences(texts["theirs"], texts[first])
        return row

    def take_turns(self, sides: dict[str, Callable[[Prompt, int], Text]], num_seeds: int) -> dict[str, list[Text]]:
        """Each side's texts, `num_seeds` of a prompt one after the other. Who decodes a prompt first rotates."""
        names, texts = list(sides), {name: [] for name in sides}
        for decode in sides.values():
            decode(self.prompts[0], 0)  # warm-up
        for turn, (prompt, seed) in enumerate(itertools.product(self.prompts, range(num_seeds))):
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                texts[name].append(sides[name](prompt, prompt.index * num_seeds + seed))
        return texts

    def start_worker(self, case: Case, temperature: float) -> Worker:
        peer = PEERS[case.peer]
        if not (self.folder / case.heads).is_dir():
            heads = load_heads(str(Path(self.args.heads) / case.heads), self.target)
            write_heads(heads, self.target, peer.form, self.folder / case.heads)
        job = {
            "target": "target",  # short names: older transformers look for kinds of models in the names of folders
            "heads": case.heads,
            # Their loop ends with more tokens than this. The last bonus token is known as one more step's root.
            "max_new_tokens": self.args.max_new_tokens - 1,
            "temperature": temperature,
            "dtype": self.dtype,
            **case.job,
        }
        python, checkout = (Path(getattr(self.args, name)).absolute() for name in (f"{case.peer}_python", case.peer))
        return Worker(python, peer.worker, checkout, self.folder, job)

    def make_ours(self, case: Case, temperature: float, **options: Any) -> Callable[[Prompt, int], Text]:
        """Decodes with a `Decoder` of these options."""
        decoder = Decoder(self.target, load_heads(str(Path(self.args.heads) / case.heads), self.target), **options)
        settings: dict[str, Any] = {"max_new_tokens": self.args.max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

        def decode(prompt: Prompt, seed: int) -> Text:
            start = time.process_time()
            output = decoder.generate(prompt.input_ids, seed=seed, **settings)
            seconds = time.process_time() - start
            if output.stats.seconds["compile"]:  # once more, with the graphs that this text needed
                return decode(prompt, seed)
            counts = enumerate(output.stats.accepted_histogram, 1)
            lengths = [length for length, count in counts for _ in range(count)]
            return Text(output.sequences[0, prompt.input_ids.shape[1] :].tolist(), lengths, seconds)

        return decode

    def find_differences(self, theirs: Sequence[Text], ours: Sequence[Text]) -> list[dict[str, Any]]:
        """The greedy texts that differ, each with the target's logits of both tokens at the first difference."""
        found = []
        for prompt, one, other in zip(self.prompts, theirs, ours, strict=True):
            place = first_difference(one.tokens, other.tokens)
            if place is None:
                continue
            scores = self.score(prompt, one.tokens[:place])
            tokens = [text.tokens[place : place + 1] for text in (one, other)]  # none where a text has ended
            logits = [float(scores[token[0]]) if token else None for token in tokens]
            found.append({"prompt": prompt.id, "place": place, "logits": logits})
        return found

    @torch.no_grad()
    def score(self, prompt: Prompt, tokens: Sequence[int]) -> torch.Tensor:
        """The target's logits [V] after a prompt and tokens."""
        ids = torch.cat([prompt.input_ids, torch.tensor([list(tokens)], dtype=torch.long)], dim=1)
        logits: torch.Tensor = self.target.model(ids).logits[0, -1]
        return logits


def describe_checkout(path: str) -> str:
    """The commit of a checkout, or "unknown" for a folder without its history."""
    if not (Path(path) / ".git").exists():  # git would answer for a repository around the folder
        return "unknown"
    command = ["git", "-C", path, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make_grids(rows: Sequence[dict[str, Any]], modes: Sequence[str]) -> list[Grid]:
    """The tables of acceptance lengths, with a note for each greedy text that differs, and of speed."""
    columns = ["heads and tree", "dtype", "T"]
    lengths, speeds, notes = [], [], []
    for row in rows:
        first = [row["case"], row["dtype"], f"{row['temperature']:g}"]
        means = [f"{row[name]['mean']:.3f} ± {row[name]['error']:.3f}" for name in ("theirs", modes[0], "own_settings")]
        differences = row.get("differences")
        same = "–" if differences is None else f"{row['num_texts'] - len(differences)}/{row['num_texts']}"
        lengths.append([*first, *means, same])
        theirs = row["theirs"]["tokens_per_second"]
        ours = [row[mode]["tokens_per_second"] for mode in modes]
        speeds.append([*first, f"{theirs:.1f}", *(f"{speed:.1f} ({speed / theirs:.2f}x)" for speed in ours)])
        for one in differences or []:
            scores = ["the end" if logit is None else f"{logit:.6f}" for logit in one["logits"]]
            notes.append(
                f"{row['case']}, {row['dtype']}: {one['prompt']} differs at token {one['place']}; the target's logits "
                f"are {scores[0]} for the authors' token and {scores[1]} for ours"
            )
    legend = (
        "Tokens per verify step of all texts ± the standard error over prompts. Same settings: their tree and scores, "
        "uncoupled. Own settings: this library's tree of as many nodes, coupled at T = 1."
    )
    length_columns = [*columns, "authors' code", "same settings", "own settings", "same text"]
    return [
        Grid("Acceptance lengths beside the authors' own code", length_columns, lengths, [*notes, legend]),
        Grid(
            "Speed beside the authors' own code",
            [*columns, "authors' code", *modes],
            speeds,
            ["Tokens per second of CPU time, prompt passes included, with the same settings on both sides."],
        ),
    ]


def run(args: CompareArguments, console: Console) -> list[Grid]:
    """Measures all rows, then prints the tables. The JSON file is written after each row."""
    torch.set_num_threads(1)
    names = ("target", "prompts", "num_prompts", "max_new_tokens", "num_seeds", "modes")
    checkouts = {name: describe_checkout(path) for name in PEERS if (path := getattr(args, name)) is not None}
    environment = {**describe_machine(torch.device("cpu")), **describe_program(), "checkouts": checkouts}
    rows: list[dict[str, Any]] = []
    content = {"environment": environment | {name: getattr(args, name) for name in names}, "rows": rows}
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(args, dtype, Path(folder))
            for case in args.chosen():
                for temperature in (0.0, 1.0) if case.is_sampled else (0.0,):
                    rows.append(comparison.run(case, temperature))
                    console.print(f"done: {case.title}, {dtype}, T = {temperature:g}", highlight=False)
                    if args.json is not None:
                        write_text(Path(args.json), json.dumps(content, indent=1, allow_nan=False) + "\n")
    grids = make_grids(rows, args.modes)
    for grid in grids:
        grid.print(console)
    if args.json is not None:
        console.print(f"wrote {args.json}", markup=False, highlight=False)
    return grids


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("compare.py"):
        (args,) = ProgramParser([CompareArguments], doc=__doc__).read(argv)
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
