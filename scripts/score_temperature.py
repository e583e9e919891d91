"""Acceptance length of dynamic trees by the temperature that ranks their nodes for a greedy target (see
`inference.drafter.GREEDY_TEMPERATURE`).

python scripts/score_temperature.py --target examples/chat-13m --heads examples/heads/medusa examples/heads/eagle3 \\
    --prompts examples/prompts.jsonl --tree dynamic:4,4,16 dynamic --markdown outputs/score_temperature.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_measure import Prompt, load_prompts
from model_loading import DTYPES, load_heads, load_target, parse_tree
from rich.progress import track
from table_program import run_table_program

from inference import Decoder, drafter


@dataclass
class TemperatureArguments:
    """Options of score_temperature.py."""

    target: str = field(metadata={"help": "The frozen target: a folder or hub id."})
    heads: list[str] = field(metadata={"help": "Trained heads: folders or hub ids."})
    prompts: str = field(metadata={"help": "Prompts or conversations, as for benchmark.py."})
    temperature: list[float] = field(
        default_factory=lambda: [0.4, 0.5, 0.6, 0.7, 0.85, 1.0], metadata={"help": "Temperatures to compare."}
    )
    tree: list[str] = field(default_factory=lambda: ["dynamic"], metadata={"help": "Trees, as for benchmark.py."})
    num_prompts: int | None = field(default=None, metadata={"help": "Of the file; none = all."})
    max_new_tokens: int = field(default=96, metadata={"help": "Of each text."})
    dtype: str = field(default="float32", metadata={"help": f"The target's dtype: {', '.join(DTYPES)}."})
    markdown: str | None = field(default=None, metadata={"help": "A file for the table; it is printed in any case."})

    def __post_init__(self) -> None:
        if min(self.temperature) <= 0:
            raise ValueError(f"got --temperature {self.temperature}: give numbers above 0")
        if self.max_new_tokens < 2:
            raise ValueError(f"got --max_new_tokens {self.max_new_tokens}: give at least 2")


def main(argv: list[str] | None = None) -> int:
    return run_table_program(TemperatureArguments, compare, __file__, argv)


def compare(args: TemperatureArguments) -> str:
    """A Markdown table: a row for each set of heads and tree, a column for each temperature."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    lines = [
        f"| heads | tree | {' | '.join(f'{value:g}' for value in args.temperature)} |",
        f"| --- | --- |{' ---: |' * len(args.temperature)}",
    ]
    for name in args.heads:
        heads = load_heads(name, target)
        kind = heads.config.head_type
        for tree in args.tree:
            decoder = Decoder(target, heads, tree=parse_tree(tree))
            lengths = []
            for temperature in track(args.temperature, description=f"{kind}, {tree}", transient=True):
                lengths.append(measure_acceptance(decoder, prompts, temperature, args.max_new_tokens))
            lines.append(f"| {kind} | {tree} | {' | '.join(f'{length:.2f}' for length in lengths)} |")
    return "\n".join(lines)


def measure_acceptance(decoder: Decoder, prompts: list[Prompt], temperature: float, max_new_tokens: int) -> float:
    """Tokens a verify step, over all prompts; nodes are ranked at this temperature."""
    usual = drafter.GREEDY_TEMPERATURE
    drafter.GREEDY_TEMPERATURE = temperature
    try:
        stats = [
            decoder.generate(prompt.input_ids, max_new_tokens=max_new_tokens, do_sample=False).stats
            for prompt in prompts
        ]
    finally:
        drafter.GREEDY_TEMPERATURE = usual
    steps = sum(one.num_verify_steps for one in stats)
    return sum(one.acceptance_length * one.num_verify_steps for one in stats) / steps if steps else 1.0


if __name__ == "__main__":
    sys.exit(main())
