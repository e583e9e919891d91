"""Tokens a verify step by acceptance rule: the same drafters, trees and prompts, at temperatures above 0.

    python scripts/benchmarks/compare_acceptance.py --target examples/chat-13m --heads examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --temperature 0.7 1 --tree chain:4 configs/trees/static12.yaml

"exact" drafts with the target's own noise, "exact, uncoupled" without; "rejection" and "block_verification" draw their
drafts. Texts are sampled with several seeds; rules draw other texts, so each mean comes with its standard error. A rule
that cannot judge a tree has no number there. Besides heads, a small model (--drafter_model) and n-grams of the text
(--ngrams) can be compared.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.progress import track

from inference import Decoder, Drafter, Target
from inference.acceptance.rules import resolve_rule
from inference.drafters.ngram import NgramDrafter
from inference.trees.policy import StaticTree, resolve_policy
from scripts.benchmarks.matrix import SMALL_MODEL, load_all_heads
from scripts.benchmarks.measure import Prompt, load_prompts
from scripts.benchmarks.table_program import run_table_program
from scripts.model_loading import DTYPES, load_drafter_model, load_target, parse_tree

RULES: dict[str, dict[str, Any]] = {
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
    prompts: str = field(metadata={"help": "Prompts or conversations, as for benchmark.py."})
    heads: list[str] = field(default_factory=list, metadata={"help": "Trained heads: folders or hub ids."})
    drafter_model: str | None = field(
        default=None, metadata={"help": "A small causal LM with the target's tokenizer that drafts."}
    )
    ngrams: bool = field(default=False, metadata={"help": "Also n-grams of the text."})
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
        if not (self.heads or self.drafter_model or self.ngrams):
            raise ValueError("there is nothing that drafts: give --heads, --drafter_model or --ngrams")
        if min(self.temperature) <= 0:
            raise ValueError(
                f"got --temperature {' '.join(map(str, self.temperature))}: give numbers above 0; a greedy "
                "target has one rule"
            )
        if self.max_new_tokens < 2 or self.num_seeds < 1:
            raise ValueError(
                f"got --max_new_tokens {self.max_new_tokens} and --num_seeds {self.num_seeds}: give at least 2 and 1"
            )


def main(argv: list[str] | None = None) -> int:
    return run_table_program(AcceptanceArguments, compare, __file__, argv)


def compare(args: AcceptanceArguments) -> str:
    """A Markdown table: a row for each drafter, tree and temperature, a column for each rule."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    for tree in args.tree:
        if not isinstance(resolve_policy(parse_tree(tree), None), StaticTree):
            raise ValueError(f"got --tree {tree}: rules are compared on trees of a fixed shape, chain:DEPTH or a file")
    drafters: dict[str, Drafter] = dict(load_all_heads(args.heads, target, is_only_target=True)[0])
    if args.drafter_model is not None:
        drafters[SMALL_MODEL] = load_drafter_model(args.drafter_model, target, tokenizer)
    if args.ngrams:
        drafters["n-grams"] = NgramDrafter()
    lines = [f"| drafter | tree | T | {' | '.join(RULES)} |", f"| --- | --- | ---: |{' ---: |' * len(RULES)}"]
    for name, drafter in drafters.items():
        for tree in args.tree:
            for temperature in args.temperature:
                cells = [
                    describe(measure(target, drafter, tree, rule, prompts, temperature, args))
                    for rule in track(RULES, description=f"{name}, {tree}, T={temperature:g}", transient=True)
                ]
                lines.append(f"| {name} | {Path(tree).stem} | {temperature:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(
    target: Target,
    drafter: Drafter,
    tree: str,
    rule: str,
    prompts: Sequence[Prompt],
    temperature: float,
    args: AcceptanceArguments,
) -> list[float]:
    """Tokens a step of every text that has one; nothing for a tree that is no chain and a rule that needs one."""
    policy = resolve_policy(parse_tree(tree), drafter.max_depth)
    if resolve_rule(RULES[rule]["acceptance"]).needs_chain and not policy.is_chain:
        return []
    decoder = Decoder(target, drafter, tree=policy, **RULES[rule])
    every = [
        decoder.generate(
            prompt.input_ids,
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            seed=1000 * seed + prompt.index,
        ).stats
        for seed in range(args.num_seeds)
        for prompt in prompts
    ]
    return [stats.acceptance_length for stats in every if stats.num_verify_steps]


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
