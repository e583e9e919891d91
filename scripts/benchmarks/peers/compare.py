"""Compares acceptance lengths with those of the EAGLE and Medusa authors' own code, on a CPU.

    python scripts/benchmarks/peers/compare.py --eagle EAGLE_CHECKOUT --eagle_python EAGLE_ENV/bin/python \\
        --medusa MEDUSA_CHECKOUT --medusa_python MEDUSA_ENV/bin/python --json outputs/peers.json

Both sides decode the same prompts in float32 with the same heads and trees. The authors' files are not edited.
Environments that work: torch 2.13 with transformers 4.53.3 for EAGLE, and with transformers 4.36.2 and numpy 1 for
Medusa.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from rich.console import Console

from heads import DraftHeads
from inference import Decoder
from inference.trees.static import StaticTree
from scripts.benchmarks.peers.cases import CASES, PEERS, Case
from scripts.benchmarks.peers.exports import write_heads, write_target
from scripts.benchmarks.peers.texts import Text, first_difference, mean_and_error, read_worker, trim
from scripts.measuring.environment import describe_machine, describe_program
from scripts.measuring.measure import Prompt, load_prompts
from scripts.measuring.render import Grid
from scripts.shared.model_loading import load_heads, load_target
from scripts.shared.one_line_errors import one_line_errors
from scripts.shared.whole_files import write_text
from training.options.program_parser import ProgramParser


@dataclass
class CompareArguments:
    eagle: str | None = field(default=None, metadata={"help": "Checkout of SafeAILab/EAGLE; none = do not run it."})
    eagle_python: str | None = field(default=None, metadata={"help": "Python of an environment that runs it."})
    medusa: str | None = field(
        default=None, metadata={"help": "Checkout of FasterDecoding/Medusa; none = do not run it."}
    )
    medusa_python: str | None = field(default=None, metadata={"help": "Python of an environment that runs it."})
    target: str = field(default="examples/chat-13m", metadata={"help": "Target, a Llama: a folder or hub id."})
    heads: str = field(default="examples/heads", metadata={"help": "Folder of the folders eagle3, eagle and medusa."})
    prompts: str = field(default="examples/prompts.jsonl", metadata={"help": "File of prompts or conversations."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use only the first N prompts; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    num_seeds: int = field(default=3, metadata={"help": "Texts for each prompt at temperature 1."})
    cases: list[str] = field(default_factory=lambda: list(CASES), metadata={"help": f"Of {', '.join(CASES)}."})
    json: str | None = field(default=None, metadata={"help": "Write the results to this file."})

    def __post_init__(self) -> None:
        if unknown := [name for name in self.cases if name not in CASES]:
            raise ValueError(f"got --cases {' '.join(unknown)}; allowed are {', '.join(CASES)}")
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
        self.args = args
        self.folder = folder
        self.target, tokenizer = load_target(args.target, dtype="float32", device="cpu")
        limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
        self.prompts = load_prompts(Path(args.prompts), tokenizer, self.target, **limits)[0]
        self.eos = tokenizer.eos_token_id
        write_target(self.target, self.eos, folder / "target")

    def run(self, case: Case, temperature: float) -> dict[str, Any]:
        """One row: each side's acceptance length with its standard error, and the texts that differ."""
        seeds = range(self.args.num_seeds if temperature else 1)
        heads = load_heads(str(Path(self.args.heads) / case.heads), self.target)
        header, theirs = self.run_theirs(case, heads, temperature, seeds)
        same_tree = case.tree or StaticTree(header.pop("tree"))
        same = self.run_ours(Decoder(self.target, heads, tree=same_tree, is_coupled=False), temperature, seeds)
        own = self.run_ours(Decoder(self.target, heads, tree=case.own_tree), temperature, seeds)
        row = {"case": case.title, "temperature": temperature, "num_texts": len(same), **header}
        for name, texts in (("theirs", theirs), ("same_settings", same), ("own_settings", own)):
            mean, error = mean_and_error(texts, len(seeds))
            row[name] = {"mean": mean, "error": error}
        return row if temperature else {**row, "differences": self.find_differences(theirs, same)}

    def run_theirs(
        self, case: Case, heads: DraftHeads, temperature: float, seeds: Sequence[int]
    ) -> tuple[dict[str, Any], list[Text]]:
        """The worker's first line, and a text for each prompt and seed."""
        peer = PEERS[case.peer]
        if not (self.folder / case.heads).is_dir():
            write_heads(heads, self.target, peer.form, self.folder / case.heads)
        job = {
            "target": "target",  # short names: older transformers look for kinds of models in the names of folders
            "heads": case.heads,
            "prompts": [prompt.input_ids[0].tolist() for prompt in self.prompts for _ in seeds],
            # Their loop ends with more tokens than this. The last bonus token is known as one more step's root.
            "max_new_tokens": self.args.max_new_tokens - 1,
            "temperature": temperature,
            "seed": 0,
            **case.job,
        }
        (self.folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        python, checkout = (Path(getattr(self.args, name)).absolute() for name in (f"{case.peer}_python", case.peer))
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        command = [str(python), str(peer.worker), "job.json"]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-500:]}")
        header, texts = read_worker(done.stdout)
        return header, [trim(text, self.eos, self.args.max_new_tokens) for text in texts]

    def run_ours(self, decoder: Decoder, temperature: float, seeds: Sequence[int]) -> list[Text]:
        settings: dict[str, Any] = {"max_new_tokens": self.args.max_new_tokens, "do_sample": temperature > 0}
        if temperature:
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        texts = []
        for number, prompt in enumerate(self.prompts):
            for seed in seeds:
                output = decoder.generate(prompt.input_ids, seed=number * len(seeds) + seed, **settings)
                counts = enumerate(output.stats.accepted_histogram, 1)
                lengths = [length for length, count in counts for _ in range(count)]
                texts.append(Text(output.sequences[0, prompt.input_ids.shape[1] :].tolist(), lengths))
        return texts

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


def make_grid(rows: Sequence[dict[str, Any]]) -> Grid:
    """The table of all rows, with a note for each greedy text that differs."""
    columns = ["heads and tree", "T", "authors' code", "same settings", "own settings", "same text"]
    cells, notes = [], []
    for row in rows:
        means = [f"{row[n]['mean']:.3f} ± {row[n]['error']:.3f}" for n in ("theirs", "same_settings", "own_settings")]
        differences = row.get("differences")
        same = "–" if differences is None else f"{row['num_texts'] - len(differences)}/{row['num_texts']}"
        cells.append([row["case"], f"{row['temperature']:g}", *means, same])
        for one in differences or []:
            theirs, ours = ("the end" if logit is None else f"{logit:.6f}" for logit in one["logits"])
            notes.append(
                f"{row['case']}: {one['prompt']} differs at token {one['place']}; the target's logits are {theirs} for "
                f"the authors' token and {ours} for ours"
            )
    legend = (
        "Tokens per verify step of all texts ± the standard error over prompts. Same settings: their tree and scores, "
        "uncoupled. Own settings: this library's tree of as many nodes, coupled at T = 1."
    )
    return Grid("Acceptance lengths beside the authors' own code", columns, cells, [*notes, legend])


def run(args: CompareArguments, console: Console) -> Grid:
    """Measures all rows, then prints the table. The JSON file is written after each row."""
    names = ("target", "prompts", "max_new_tokens", "num_seeds")
    checkouts = {name: describe_checkout(path) for name in PEERS if (path := getattr(args, name)) is not None}
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
