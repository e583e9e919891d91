"""Measures what a decode step costs as the context grows, on a random target; prints a table, writes JSON and a plot.

    python scripts/benchmarks/context.py --context 1024 4096 16384 32768 --json outputs/context.json

Weights are random, so nothing is said about acceptance: what a step costs does not depend on what is accepted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from transformers import HfArgumentParser

from heads import create_heads
from inference.trees.policy import resolve_policy
from scripts.benchmarks.context_cost import (
    ContextCost,
    build_random_target,
    check_contexts,
    measure_context,
    read_peak_memory,
)
from scripts.benchmarks.environment import describe_environment
from scripts.benchmarks.plot import load_pyplot, save_figure
from scripts.benchmarks.render import Grid
from scripts.benchmarks.report import write_text
from scripts.model_loading import DTYPES, TREE_HELP, parse_tree

SPARE_POSITIONS = 1024  # behind the longest context, for trees
COLUMNS = {
    "context": "{0.context}",
    "prefill s": "{0.prefill_seconds:.2f}",
    "draft prefill s": "{0.draft_prefill_seconds:.2f}",
    "peak MiB": "{0.peak_memory_mib:.0f}",
    "transformers ms": "{0.transformers_milliseconds:.2f}",
    "plain ms": "{0.plain_milliseconds:.2f}",
    "draft ms": "{0.draft_milliseconds:.2f}",
    "verify ms": "{0.verify_milliseconds:.2f}",
    "break-even": "{0.break_even:.2f}",
}
NOTE = (
    "draft: one accepted token taken in and a tree grown; verify: one pass over the tree; break-even: tokens a step "
    "must emit to be as fast as plain decoding, (draft + verify) / plain; peak: memory beyond what the weights took"
)


@dataclass
class ContextArguments:
    context: list[int] = field(
        default_factory=lambda: [1024, 4096, 16384, 32768], metadata={"help": "Tokens in the cache before a step."}
    )
    layers: int = field(default=4, metadata={"help": "Layers of the target; its heads need 4 or more."})
    hidden: int = field(default=256, metadata={"help": "Width of the hidden states; the MLP is four times as wide."})
    num_heads: int = field(default=4, metadata={"help": "Attention heads."})
    kv_heads: int = field(default=2, metadata={"help": "Key and value heads."})
    vocab: int = field(default=4096, metadata={"help": "Tokens of the vocabulary."})
    heads: str = field(default="eagle3", metadata={"help": "Kind of the untrained draft heads."})
    tree: str = field(default="dynamic", metadata={"help": f"Token tree: {TREE_HELP}."})
    steps: int = field(default=9, metadata={"help": "Measured steps of each kind; the tables show medians."})
    compile: bool = field(default=False, metadata={"help": "Compile our steps: each context makes its own graphs."})
    dtype: str = field(
        default="float32", metadata={"help": "Weights of the target and the heads.", "choices": list(DTYPES[1:])}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads; none = torch's choice."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    seed: int = field(default=0, metadata={"help": "Seed of the weights and the prompts."})
    json: str | None = field(default=None, metadata={"help": "Write environment and rows to this JSON file."})
    plot: str | None = field(default=None, metadata={"help": "Draw costs against the context into this PNG file."})
    markdown: str | None = field(default=None, metadata={"help": "Write the table to this Markdown file."})

    def __post_init__(self) -> None:
        self.context = check_contexts(self.context)
        for name in ("layers", "hidden", "num_heads", "kv_heads", "vocab", "steps", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"got --{name} {value}: give at least 1")


def run(args: ContextArguments, console: Console) -> list[ContextCost]:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    target = build_random_target(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.num_heads,
        num_kv_heads=args.kv_heads,
        vocab_size=args.vocab,
        max_length=args.context[-1] + SPARE_POSITIONS,
        dtype=getattr(torch, args.dtype),
        device=device,
        seed=args.seed,
    )
    drafter = create_heads(args.heads, target).to(target.dtype).eval()
    policy = resolve_policy(parse_tree(args.tree), drafter.max_depth)
    base_memory = read_peak_memory(device)
    rows: list[ContextCost] = []
    with Console(stderr=True).status("") as status:
        for context in args.context:
            status.update(f"{context} tokens")
            rows.append(
                measure_context(
                    target,
                    drafter,
                    policy,
                    context,
                    num_steps=args.steps,
                    base_memory=base_memory,
                    is_compiled=args.compile,
                    seed=args.seed,
                )
            )
    options = asdict(args)
    shape = {name: options[name] for name in ("layers", "hidden", "num_heads", "kv_heads", "vocab")}
    environment = describe_environment(
        target, None, **shape, heads=args.heads, tree=args.tree, steps=args.steps, compile=args.compile, seed=args.seed
    )
    grid = make_grid(rows, environment)
    grid.print(console)
    if args.json is not None:
        content = {"environment": environment, "rows": [{**asdict(row), "break_even": row.break_even} for row in rows]}
        write_text(Path(args.json), json.dumps(content, indent=1, allow_nan=False) + "\n")
    if args.markdown is not None:
        write_text(Path(args.markdown), f"```bash\n{environment['command']}\n```\n\n{grid.to_markdown()}")
    if args.plot is not None:
        draw_plot(Path(args.plot), rows, grid.title)
    return rows


def make_grid(rows: Sequence[ContextCost], environment: dict[str, Any]) -> Grid:
    title = (
        f"random Llama, {environment['layers']} layers, width {environment['hidden']}, {environment['num_heads']} "
        f"heads ({environment['kv_heads']} for keys and values), {environment['vocab']} tokens, "
        f"{environment['dtype']}, {environment['heads']} heads, trees of {rows[0].num_nodes} nodes, "
        f"{'compiled' if environment['compile'] else 'eager'}, {environment['gpu'] or environment['cpu']}, "
        f"{environment['threads']} threads"
    )
    return Grid(title, list(COLUMNS), [[form.format(row) for form in COLUMNS.values()] for row in rows], [NOTE])


def draw_plot(path: Path, rows: Sequence[ContextCost], title: str) -> None:
    """Milliseconds of each kind of step, and seconds of the prefill, against the context."""
    figure, (steps, prefill) = load_pyplot().subplots(1, 2, figsize=(12, 5), layout="constrained")
    contexts = [row.context for row in rows]
    for name, label, colour in (
        ("transformers_milliseconds", "transformers, plain step", "#808080"),
        ("plain_milliseconds", "ours, plain step", "#6aa56a"),
        ("verify_milliseconds", f"ours, verify {rows[0].num_nodes} nodes", "#4878a8"),
        ("draft_milliseconds", "ours, draft", "#d98c3f"),
    ):
        steps.plot(contexts, [getattr(row, name) for row in rows], marker="o", color=colour, label=label)
    prefill.plot(contexts, [row.prefill_seconds for row in rows], marker="o", color="#4878a8", label="target")
    prefill.plot(contexts, [row.draft_prefill_seconds for row in rows], marker="o", color="#d98c3f", label="drafter")
    for axis, label in ((steps, "milliseconds of a step"), (prefill, "seconds of the prefill")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [str(context) for context in contexts], rotation=30)
        axis.set_xlabel("tokens of context")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, wrap=True)
    save_figure(figure, path)


def main() -> None:
    parser = HfArgumentParser(ContextArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        run(args, Console(width=None if sys.stdout.isatty() else 150))
    except (ValueError, OSError) as error:
        sys.exit(f"context.py: {error}")


if __name__ == "__main__":
    main()
