"""Trains heads with several configurations on the same data, and compares their acceptance in one table.

    python scripts/benchmarks/training/ablation.py --configs configs/ablation/eagle3.yaml configs/ablation/hass.yaml \\
        --dataset outputs/replies.jsonl.gz --output outputs/ablation

`draftsmith data` writes the data set. Options that this program does not know go to each training run, such as
`--max_steps 1000`. Run the same command again to continue: finished runs are not repeated.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

import torch
from rich.console import Console

from draftsmith.inference import Decoder, GenerationStats, Target
from draftsmith.scripts.measuring.environment import describe_environment
from draftsmith.scripts.measuring.measure import Batch, Settings, load_prompts
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.model_loading import TREE_HELP, load_heads, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.run.outcome import written_command

TRAINING_PROGRAM = Path(__file__).resolve().parents[3] / "training" / "train_heads.py"
MEASURED = ("target", "prompts", "num_prompts", "max_new_tokens", "batch_size", "dtype", "seed")


@dataclass
class AblationArguments:
    configs: list[str] = option(default_factory=list, help="Training configurations; none = all of configs/ablation.")
    dataset: str | None = option(
        default=None, help="Conversations that all runs train on; none = the data set of each file."
    )
    target: str = option(default="examples/chat-13m", help="Target of all configurations.")
    prompts: list[str] = option(
        default_factory=lambda: ["examples/prompts.jsonl"], help="Files of prompts to measure acceptance on."
    )
    num_prompts: int | None = option(default=None, help="Use only the first N prompts of each file; none = all.")
    max_new_tokens: int = option(default=128, help="Tokens decoded for each prompt (fewer after an EOS).")
    tree: list[str] = option(
        default_factory=lambda: ["dynamic:6,4,24"], help=f"Token trees for measuring: {TREE_HELP}."
    )
    temperature: list[float] = option(default_factory=lambda: [0.0, 1.0], help="Sampling temperatures; 0 = greedy.")
    batch_size: int = option(
        default=1, help="Prompts measured together: faster, and standard errors are then over batches."
    )
    dtype: str = option(default="float32", help="Dtype of target and heads for measuring.")
    seed: int = option(default=0, help="Batch i of a file is sampled with the seed SEED + i.")
    output: str = option(default="outputs/ablation", help="Folder for the runs, ablation.md and ablation.json.")

    def __post_init__(self) -> None:
        self.configs = self.configs or sorted(map(str, Path("configs/ablation").glob("*.yaml")))
        names = [Path(config).stem for config in self.configs]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"got --configs {' '.join(self.configs)}: give one or more files, each name once")
        if len({Path(path).stem for path in self.prompts}) < len(self.prompts) or self.batch_size < 1:
            raise ValueError(
                f"got --prompts {' '.join(self.prompts)} --batch_size {self.batch_size}: give each file's name once, "
                "and 1 prompt or more"
            )
        for config in self.configs:
            if not Path(config).is_file():
                raise ValueError(f"--configs {config} does not exist: give training configurations")


def train(args: AblationArguments, config: Path, options: Sequence[str]) -> dict[str, Any]:
    """Trains until the run has its training record, and returns it.

    Raises:
        ValueError: the folder has the record of a run with other options.
        ChildProcessError: the training failed; its log says why.
    """
    folder = Path(args.output) / config.stem
    words = ["--config", str(config), "--target", args.target, "--output_dir", str(folder), *options]
    words += ["--resume_from_checkpoint", "true", "--disable_tqdm", "true"]
    words += ["--dataset", args.dataset] if args.dataset is not None else []
    words += [] if torch.accelerator.is_available() else ["--use_cpu", "true"]
    record = folder / "training_record.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "training.log").open("ab") as log:
            command = [sys.executable, str(TRAINING_PROGRAM), *words]
            if code := subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                raise ChildProcessError(f"{config.stem}: the training ended with {code}, see {log.name}")
    elif (found := _read(record)["command"]) != (wanted := written_command(words)):
        raise ValueError(f"{folder} has heads of {found!r}, and not of {wanted!r}: give another --output, or remove it")
    trained: dict[str, Any] = _read(record)["training"]
    return trained


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def measure(
    args: AblationArguments, folder: Path, target: Target, batches: dict[str, list[Batch]]
) -> dict[str, dict[str, Any]]:
    """Acceptance of finished heads by tree and temperature. Their folder keeps it for the next call with the same
    options."""
    kept = folder / "acceptance.json"
    found: dict[str, dict[str, Any]] = {}
    options = {name: getattr(args, name) for name in MEASURED}
    if kept.exists() and (content := json.loads(kept.read_text(encoding="utf-8")))["options"] == options:
        found = content["acceptance"]
    heads = None
    for tree in args.tree:
        decoder = None
        for temperature in map("{:g}".format, args.temperature):
            if temperature in found.get(tree, {}):
                continue
            heads = heads or load_heads(str(folder), target)
            decoder = decoder or Decoder(target, heads, tree=tree)
            kwargs = Settings(args.max_new_tokens, float(temperature), args.seed).generate_kwargs()
            each = {
                name: [
                    decoder.generate(
                        batch.input_ids, attention_mask=batch.attention_mask, seed=args.seed + batch.index, **kwargs
                    ).stats
                    for batch in some
                ]
                for name, some in batches.items()
            }
            found.setdefault(tree, {})[temperature] = summarize(each)
            write_text(kept, json.dumps({"options": options, "acceptance": found}, indent=1) + "\n")
    return {tree: {f"{t:g}": found[tree][f"{t:g}"] for t in args.temperature} for tree in args.tree}


def summarize(each: dict[str, list[GenerationStats]]) -> dict[str, Any]:
    """Acceptance by file of prompts, of all texts together (micro), and the mean of the files (macro)."""
    files = {name: summarize_texts(stats) for name, stats in each.items()}
    lengths, errors = ([one[key] for one in files.values()] for key in ("acceptance_length", "standard_error"))
    return {
        "acceptance_length": sum(lengths) / len(lengths),
        "standard_error": None if None in errors else math.hypot(*errors) / len(errors),
        "micro": summarize_texts([stats for some in each.values() for stats in some]),
        "files": files,
    }


def summarize_texts(each: Sequence[GenerationStats]) -> dict[str, Any]:
    """Acceptance length of all batches together, its standard error over them, and acceptance by depth."""
    total = sum(each, GenerationStats())
    steps = [stats.num_verify_steps for stats in each]
    tokens = [stats.acceptance_length * stats.num_verify_steps for stats in each]
    return {
        "acceptance_length": total.acceptance_length,
        "standard_error": find_ratio_error(tokens, steps),
        "acceptance_by_depth": total.acceptance_by_depth,
    }


def find_ratio_error(tokens: Sequence[float], steps: Sequence[int]) -> float | None:
    """Standard error of sum(tokens) / sum(steps) over batches, to first order; None for one batch.

    >>> round(find_ratio_error([20, 30], [10, 10]), 3)
    0.5
    """
    if len(steps) < 2 or not sum(steps):
        return None
    ratio = sum(tokens) / sum(steps)
    squares = sum((t - ratio * s) ** 2 for t, s in zip(tokens, steps, strict=True))
    return math.sqrt(squares * len(steps) / (len(steps) - 1)) / sum(steps)


def make_grid(results: dict[str, dict[str, Any]], environment: dict[str, Any]) -> Grid:
    """A line for each run: training, acceptance length by tree and temperature, acceptance by depth with the first."""
    first = next(iter(results.values()))["acceptance"]
    pairs = [(tree, temperature) for tree, some in first.items() for temperature in some]
    shares = {name: find_cell(one, *pairs[0])["micro"]["acceptance_by_depth"] for name, one in results.items()}
    deepest = max(map(len, shares.values()))
    cells = []
    for name, one in results.items():
        tokens, seconds = (one["training"].get(key) for key in ("tokens", "seconds"))
        line = [name, f"{tokens / 1e6:.2f} M" if tokens else "–", f"{seconds / 60:.0f} min" if seconds else "–"]
        line += [format_cell(find_cell(one, *pair)) for pair in pairs]
        own = [f"{share:.2f}" for share in shares[name]]
        cells.append([*line, *own, *["–"] * (deepest - len(own))])
    columns = ["run", "training tokens", "training", *(f"{tree} T={temperature}" for tree, temperature in pairs)]
    title = f"Acceptance length on {environment['num_prompts']} prompts, {environment['target']}"
    note = (
        "Mean of the files of prompts ± its standard error; in brackets the mean of all texts together; "
        "one seed each. Depth d: of the steps that accepted depth d - 1, the share that accepted depth d, "
        f"{pairs[0][0]}, T={pairs[0][1]}."
    )
    return Grid(title, [*columns, *(f"depth {depth + 1}" for depth in range(deepest))], cells, [note])


def find_cell(result: dict[str, Any], tree: str, temperature: str) -> dict[str, Any]:
    found: dict[str, Any] = result["acceptance"][tree][temperature]
    return found


def format_cell(measured: dict[str, Any]) -> str:
    error = measured["standard_error"]
    cell = f"{measured['acceptance_length']:.2f}" + (f" ± {error:.2f}" if error is not None else "")
    return cell + (f" ({measured['micro']['acceptance_length']:.2f})" if len(measured["files"]) > 1 else "")


def run(args: AblationArguments, options: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Trains and measures each configuration. The files are written after each of them."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
    prompts = {Path(path).stem: load_prompts(Path(path), tokenizer, target, **limits)[0] for path in args.prompts}
    num_prompts = sum(map(len, prompts.values()))
    batches = {
        name: [
            Batch.of(*some[i : i + args.batch_size], index=i // args.batch_size)
            for i in range(0, len(some), args.batch_size)
        ]
        for name, some in prompts.items()
    }
    details = {"target": args.target, "prompts": args.prompts, "num_prompts": num_prompts, "tree": args.tree}
    own = Settings(args.max_new_tokens, max(args.temperature)).find_model_settings(target)
    environment = {**describe_environment(target, None, generation_config=own, **details), "batch": args.batch_size}
    results: dict[str, dict[str, Any]] = {}
    output = Path(args.output)
    for config in map(Path, args.configs):
        with console.status(f"{config.stem} (training.log in {output / config.stem})"):
            training = train(args, config, options)
            measured = measure(args, output / config.stem, target, batches)
        results[config.stem] = {"training": training, "acceptance": measured}
        grid = make_grid(results, environment)
        write_text(output / "ablation.md", f"```bash\n{environment['command']}\n```\n\n{grid.to_markdown()}")
        content = {"environment": environment, "results": results}
        write_text(output / "ablation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    grid.print(console)
    console.print(f"wrote {output / 'ablation.md'} and {output / 'ablation.json'}", markup=False, highlight=False)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("ablation.py", kept="finished runs are kept"):
        parser = ProgramParser([AblationArguments], doc=__doc__)
        args, options = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
        run(args, options, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
