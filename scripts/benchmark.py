"""Measures draft heads beside every baseline, interleaved in one process; prints tables, writes JSON, a plot, Markdown.

    python scripts/benchmark.py --target examples/chat-13m --heads examples/heads/medusa examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --tree dynamic chain --max-new-tokens 128 --json outputs/benchmark.json

Baselines: transformers' `generate` and its prompt look-up, plain decoding on our stack, and a drafter that only looks
up n-grams of the text so far (untrained: what it gains, looping text gives to every drafter).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmark_contenders import make_contenders
from benchmark_measure import Settings, load_prompts, measure
from benchmark_render import draw_plot, make_grids
from benchmark_report import describe_environment, make_rows, write_json
from model_loading import DTYPES, TREE_HELP, load_heads, load_target
from rich.console import Console
from rich.progress import Progress
from transformers import HfArgumentParser


@dataclass
class BenchmarkArguments:
    target: str = field(metadata={"help": "The target: a folder or a hub id."})
    prompts: str = field(metadata={"help": "JSON lines (.gz or not) of `turns` or conversations; first user turns."})
    heads: list[str] = field(default_factory=list, metadata={"help": "Draft heads: folders or hub ids."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use the first so many prompts; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    dtype: str = field(
        default="float32", metadata={"help": "Weights of the target and the heads.", "choices": list(DTYPES)}
    )
    tree: list[str] = field(default_factory=lambda: ["dynamic"], metadata={"help": f"Token trees: {TREE_HELP}."})
    compile: bool = field(
        default=False, metadata={"help": "Measure everybody who can be compiled a second time, compiled."}
    )
    seed: int = field(default=0, metadata={"help": "Prompt i is sampled with the seed SEED + i."})
    repeats: int = field(default=3, metadata={"help": "Rounds over all prompts."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; none = torch's choice."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    json: str | None = field(default=None, metadata={"help": "Write rows, runs and environment to this JSON file."})
    plot: str | None = field(default=None, metadata={"help": "Draw speed and acceptance length into this PNG file."})
    markdown: str | None = field(default=None, metadata={"help": "Write the tables to this Markdown file."})

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "num_prompts", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"got --{name} {value}: give at least 1")
        if self.temperature < 0:
            raise ValueError(f"got --temperature {self.temperature}: give 0 for greedy decoding, or a positive number")

    def settings(self) -> Settings:
        return Settings(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed, repeats=self.repeats
        )


def name_heads(paths: Sequence[str]) -> dict[str, str]:
    """Short distinct names for sets of heads: the ends of their paths.

    >>> name_heads(["a/heads/medusa", "b/heads/medusa", "b/heads/eagle3"])
    {'a/heads/medusa': 'a/heads/medusa', 'b/heads/medusa': 'b/heads/medusa', 'eagle3': 'b/heads/eagle3'}
    """
    if len(set(paths)) < len(paths):
        raise ValueError(f"--heads names the same heads twice: {', '.join(paths)}")

    def shorten(path: str) -> str:
        parts = path.rstrip("/").split("/")
        ends = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [other.rstrip("/") for other in paths if other != path]
        return next((end for end in ends if not any(f"/{other}".endswith(f"/{end}") for other in others)), path)

    return {shorten(path): path for path in paths}


def run(args: BenchmarkArguments, console: Console) -> None:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = args.settings()
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
    heads = {name: load_heads(path, target) for name, path in name_heads(args.heads).items()}
    prompts, num_too_long = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    modes = (False, True) if args.compile else (False,)
    contenders = make_contenders(target, heads, args.tree, settings, modes=modes)
    num_runs = args.repeats * len(prompts) * sum(not contender.problem for contender in contenders)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=num_runs)
        measure(contenders, prompts, settings, on_run=lambda: progress.advance(task))

    rows = make_rows(contenders, prompts, settings, target)
    environment = describe_environment(
        target,
        settings,
        target=args.target,
        heads=args.heads,
        trees=args.tree,
        prompts=args.prompts,
        num_prompts=len(prompts),
        num_prompts_too_long=num_too_long,
        has_chat_template=bool(tokenizer.chat_template),
    )
    grids = make_grids(rows, environment)
    for grid in grids:
        grid.print(console)
    if args.json is not None:
        write_json(Path(args.json), environment, rows, contenders)
    if args.plot is not None:
        draw_plot(Path(args.plot), rows, grids[0].title)
    if args.markdown is not None:
        Path(args.markdown).parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["```bash", environment["command"], "```", "", *(grid.to_markdown() for grid in grids)])
        Path(args.markdown).write_text(text, encoding="utf-8")


def main() -> None:
    parser = HfArgumentParser(BenchmarkArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        run(args, Console(width=None if sys.stdout.isatty() else 150))
    except (ValueError, OSError) as error:
        sys.exit(f"benchmark.py: {error}")


if __name__ == "__main__":
    main()
