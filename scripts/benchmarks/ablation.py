"""Trains heads with several configurations on the same data, and compares their acceptance in one table.

    python scripts/benchmarks/ablation.py --configs configs/ablation/eagle3.yaml configs/ablation/hass.yaml \\
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console

from inference import Decoder, GenerationStats, Target
from scripts.measuring.environment import describe_environment
from scripts.measuring.measure import Prompt, Settings, load_prompts
from scripts.measuring.render import Grid
from scripts.shared.model_loading import TREE_HELP, load_heads, load_target
from scripts.shared.one_line_errors import one_line_errors
from scripts.shared.whole_files import write_text
from training.options.program_parser import ProgramParser

TRAINING_PROGRAM = Path(__file__).resolve().parents[2] / "training" / "train_heads.py"
MEASURED = ("prompts", "num_prompts", "max_new_tokens", "tree", "temperature", "dtype", "seed")


@dataclass
class AblationArguments:
    configs: list[str] = field(
        default_factory=list, metadata={"help": "Training configurations; none = all of configs/ablation."}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "Conversations that all runs train on; none = the data set of each file."}
    )
    target: str = field(default="examples/chat-13m", metadata={"help": "Target of all configurations."})
    prompts: str = field(default="examples/prompts.jsonl", metadata={"help": "Prompts to measure acceptance on."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use only the first N prompts; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    tree: str = field(default="dynamic:6,4,24", metadata={"help": f"Token tree for measuring: {TREE_HELP}."})
    temperature: list[float] = field(
        default_factory=lambda: [0.0, 1.0], metadata={"help": "Sampling temperatures; 0 = greedy."}
    )
    dtype: str = field(default="float32", metadata={"help": "Dtype of target and heads for measuring."})
    seed: int = field(default=0, metadata={"help": "Prompt i is sampled with the seed SEED + i."})
    output: str = field(
        default="outputs/ablation", metadata={"help": "Folder for the runs, ablation.md and ablation.json."}
    )

    def __post_init__(self) -> None:
        self.configs = self.configs or sorted(map(str, Path("configs/ablation").glob("*.yaml")))
        names = [Path(config).stem for config in self.configs]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"got --configs {' '.join(self.configs)}: give one or more files, each name once")
        for config in self.configs:
            if not Path(config).is_file():
                raise ValueError(f"--configs {config} does not exist: give training configurations")


def train(args: AblationArguments, config: Path, options: Sequence[str]) -> dict[str, Any]:
    """Trains until the run has its training record, and returns it.

    Raises:
        ChildProcessError: the training failed; its log says why.
    """
    folder = Path(args.output) / config.stem
    record = folder / "training_record.json"
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = ["--config", str(config), "--target", args.target, "--output_dir", str(folder), *options]
        words += ["--resume_from_checkpoint", "true", "--disable_tqdm", "true"]
        words += ["--dataset", args.dataset] if args.dataset is not None else []
        words += [] if torch.accelerator.is_available() else ["--use_cpu", "true"]
        with (folder / "training.log").open("ab") as log:
            command = [sys.executable, str(TRAINING_PROGRAM), *words]
            if code := subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                raise ChildProcessError(f"{config.stem}: the training ended with {code}, see {log.name}")
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))["training"]
    return found


def measure(args: AblationArguments, folder: Path, target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Acceptance of finished heads by temperature. Their folder keeps it for the next call with the same options."""
    options = {name: getattr(args, name) for name in MEASURED}
    kept = folder / "acceptance.json"
    if kept.exists() and (content := json.loads(kept.read_text(encoding="utf-8")))["options"] == options:
        found: dict[str, Any] = content["temperatures"]
        return found
    decoder = Decoder(target, load_heads(str(folder), target), tree=args.tree)
    found = {}
    for temperature in args.temperature:
        settings = Settings(args.max_new_tokens, temperature, args.seed)
        outputs = [
            decoder.generate(prompt.input_ids, seed=args.seed + prompt.index, **settings.generate_kwargs())
            for prompt in prompts
        ]
        found[f"{temperature:g}"] = summarize([output.stats for output in outputs])
    write_text(kept, json.dumps({"options": options, "temperatures": found}, indent=1) + "\n")
    return found


def summarize(each: Sequence[GenerationStats]) -> dict[str, Any]:
    """Acceptance length of all texts together, its standard error over prompts, and acceptance by depth."""
    total = sum(each, GenerationStats())
    steps = [stats.num_verify_steps for stats in each]
    tokens = [stats.acceptance_length * stats.num_verify_steps for stats in each]
    return {
        "acceptance_length": total.acceptance_length,
        "standard_error": find_ratio_error(tokens, steps),
        "acceptance_by_depth": total.acceptance_by_depth,
    }


def find_ratio_error(tokens: Sequence[float], steps: Sequence[int]) -> float | None:
    """Standard error of sum(tokens) / sum(steps) over prompts, to first order; None for one prompt.

    >>> round(find_ratio_error([20, 30], [10, 10]), 3)
    0.5
    """
    if len(steps) < 2 or not sum(steps):
        return None
    ratio = sum(tokens) / sum(steps)
    squares = sum((t - ratio * s) ** 2 for t, s in zip(tokens, steps, strict=True))
    return math.sqrt(squares * len(steps) / (len(steps) - 1)) / sum(steps)


def make_grid(results: dict[str, dict[str, Any]], environment: dict[str, Any]) -> Grid:
    """A line for each run: training, acceptance length by temperature, acceptance by depth at the first temperature."""
    temperatures = list(next(iter(results.values()))["temperatures"])
    shares = {name: one["temperatures"][temperatures[0]]["acceptance_by_depth"] for name, one in results.items()}
    deepest = max(map(len, shares.values()))
    cells = []
    for name, one in results.items():
        tokens, seconds = (one["training"].get(key) for key in ("tokens", "seconds"))
        line = [name, f"{tokens / 1e6:.2f} M" if tokens else "–", f"{seconds / 60:.0f} min" if seconds else "–"]
        for measured in one["temperatures"].values():
            error = measured["standard_error"]
            line.append(f"{measured['acceptance_length']:.2f}" + (f" ± {error:.2f}" if error is not None else ""))
        own = [f"{share:.2f}" for share in shares[name]]
        cells.append([*line, *own, *["–"] * (deepest - len(own))])
    columns = ["run", "training tokens", "training", *(f"T={t}" for t in temperatures)]
    title = (
        f"Acceptance length on {environment['num_prompts']} prompts of {Path(environment['prompts']).name}, "
        f"{environment['target']}, tree {environment['tree']}"
    )
    note = (
        "±: standard error over prompts; one seed each. Depth d: of the steps that accepted depth d - 1, the share "
        f"that accepted depth d, at T={temperatures[0]}."
    )
    return Grid(title, [*columns, *(f"depth {depth + 1}" for depth in range(deepest))], cells, [note])


def run(args: AblationArguments, options: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Trains and measures each configuration. The files are written after each of them."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    details = {"target": args.target, "prompts": args.prompts, "num_prompts": len(prompts), "tree": args.tree}
    environment = describe_environment(target, None, **details)
    results: dict[str, dict[str, Any]] = {}
    output = Path(args.output)
    for config in map(Path, args.configs):
        with console.status(f"{config.stem} (training.log in {output / config.stem})"):
            training = train(args, config, options)
            measured = measure(args, output / config.stem, target, prompts)
        results[config.stem] = {"training": training, "temperatures": measured}
        grid = make_grid(results, environment)
        write_text(output / "ablation.md", f"```bash\n{environment['command']}\n```\n\n{grid.to_markdown()}")
        content = {"environment": environment, "results": results}
        write_text(output / "ablation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    grid.print(console)
    console.print(f"wrote {output / 'ablation.md'} and {output / 'ablation.json'}", markup=False, highlight=False)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("ablation.py"):
        parser = ProgramParser([AblationArguments], doc=__doc__)
        args, options = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
        run(args, options, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
