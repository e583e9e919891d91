"""Tokens a verify step by acceptance rule: the same drafters, trees and prompts, at temperatures above 0.

    python scripts/compare_acceptance.py --target examples/chat-13m --heads examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --temperature 0.7 1 --tree chain:4 configs/trees/static12.yaml

"exact" drafts with the target's own noise, "exact, uncoupled" without; "rejection" and "block_verification" draw their
drafts. Texts are sampled with several seeds; rules draw other texts, so each mean comes with its standard error.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_measure import Prompt, load_prompts
from model_loading import DTYPES, load_heads, load_target, parse_tree
from rich.progress import track

from heads import DraftHeads
from inference import Decoder, Target

RULES = {
    "exact": {"acceptance": "exact"},
    "exact, uncoupled": {"acceptance": "exact", "is_coupled": False},
    "rejection": {"acceptance": "rejection"},
    "block_verification": {"acceptance": "block_verification"},
    "typical (lossy)": {"acceptance": "typical", "is_coupled": False},
}


@dataclass
class AcceptanceArguments:
    """Options of compare_acceptance.py."""

    target: str = field(metadata={"help": "The frozen target: a folder or hub id."})
    heads: list[str] = field(metadata={"help": "Trained heads: folders or hub ids."})
    prompts: str = field(metadata={"help": "Prompts or conversations, as for benchmark.py."})
    temperature: list[float] = field(default_factory=lambda: [0.7, 1.0], metadata={"help": "Sampling temperatures."})
    tree: list[str] = field(
        default_factory=lambda: ["chain:4"], metadata={"help": "Trees of a fixed shape, as for benchmark.py."}
    )
    num_prompts: int | None = field(default=None, metadata={"help": "Of the file; none = all."})
    num_seeds: int = field(default=3, metadata={"help": "Texts of each prompt."})
    max_new_tokens: int = field(default=64, metadata={"help": "Of each text."})
    dtype: str = field(default="float32", metadata={"help": f"The target's dtype: {', '.join(DTYPES)}."})
    markdown: str | None = field(default=None, metadata={"help": "A file for the table; it is printed in any case."})

    def __post_init__(self) -> None:
        if min(self.temperature) <= 0:
            raise ValueError(
                f"got --temperature {self.temperature}: give numbers above 0; a greedy target has one rule"
            )
        if self.max_new_tokens < 2 or self.num_seeds < 1:
            raise ValueError(
                f"got --max_new_tokens {self.max_new_tokens} and --num_seeds {self.num_seeds}: give at least 2 and 1"
            )


def main(argv: list[str] | None = None) -> int:
    parser = HfArgumentParser(AcceptanceArguments, description=__doc__.partition("\n\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses(argv)
        table = compare(args)
    except (ValueError, OSError) as error:
        sys.exit(f"compare_acceptance.py: {error}")
    print(table)
    if args.markdown is not None:
        path = Path(args.markdown)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table + "\n", encoding="utf-8")
    return 0


def compare(args: AcceptanceArguments) -> str:
    """A Markdown table: a row for each set of heads, tree and temperature, a column for each rule."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    lines = [f"| heads | tree | T | {' | '.join(RULES)} |", f"| --- | --- | ---: |{' ---: |' * len(RULES)}"]
    for name in args.heads:
        heads = load_heads(name, target)
        kind = heads.config.head_type
        for tree in args.tree:
            for temperature in args.temperature:
                cells = [
                    describe(measure(target, heads, tree, rule, prompts, temperature, args))
                    for rule in track(RULES, description=f"{kind}, {tree}, T={temperature:g}", transient=True)
                ]
                lines.append(f"| {kind} | {Path(tree).stem} | {temperature:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(
    target: Target,
    heads: DraftHeads,
    tree: str,
    rule: str,
    prompts: Sequence[Prompt],
    temperature: float,
    args: AcceptanceArguments,
) -> list[float]:
    """Tokens a step of every text; none for a tree the rule cannot judge."""
    try:
        decoder = Decoder(target, heads, tree=parse_tree(tree), **RULES[rule])  # type: ignore[arg-type]
    except ValueError as error:
        if rule == "block_verification":
            return []
        raise ValueError(f"{rule}: {error}") from error
    return [
        decoder.generate(
            prompt.input_ids,
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            seed=1000 * seed + prompt.index,
        ).stats.acceptance_length
        for seed in range(args.num_seeds)
        for prompt in prompts
    ]


def describe(lengths: Sequence[float]) -> str:
    """Mean and standard error.

    >>> describe([2.0, 4.0]), describe([])
    ('3.00 ± 1.00', '–')
    """
    if not lengths:
        return "–"
    error = statistics.stdev(lengths) / len(lengths) ** 0.5 if len(lengths) > 1 else float("nan")
    return f"{statistics.mean(lengths):.2f} ± {error:.2f}"


if __name__ == "__main__":
    sys.exit(main())
