"""Acceptance of heads on prompts with one tree, at several temperatures, and whether the texts are plain decoding's.

    python scripts/benchmarks/ablation_measure.py --target examples/chat-13m --heads examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --json outputs/acceptance.json

Without --heads it decodes plainly, which makes the texts to compare with (--texts).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import HfArgumentParser

from inference import Decoder, GenerationStats
from scripts.benchmarks.environment import describe_environment
from scripts.benchmarks.measure import Settings, load_prompts
from scripts.benchmarks.report import write_text
from scripts.model_loading import DTYPES, TREE_HELP, load_heads, load_target, parse_tree

OPTIONS = ("prompts", "num_prompts", "max_new_tokens", "tree", "temperature", "dtype", "seed")


@dataclass
class MeasureArguments:
    target: str = field(metadata={"help": "The frozen target: a folder or hub id."})
    prompts: str = field(metadata={"help": "Prompts or conversations (first user turns): JSON lines, .gz or not."})
    json: str = field(metadata={"help": "Write what was measured to this file."})
    heads: str | None = field(default=None, metadata={"help": "Trained heads: a folder or hub id; none = plain."})
    texts: str | None = field(
        default=None, metadata={"help": "What this program wrote without --heads: the texts to compare with."}
    )
    tree: str = field(default="dynamic:6,4,24", metadata={"help": f"Token tree: {TREE_HELP}."})
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0], metadata={"help": "0 = greedy."})
    num_prompts: int | None = field(default=None, metadata={"help": "The first so many prompts; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    dtype: str = field(default="float32", metadata={"help": f"Weights: {', '.join(DTYPES)}."})
    seed: int = field(default=0, metadata={"help": "Prompt i is sampled with the seed SEED + i."})


def measure(args: MeasureArguments) -> dict[str, Any]:
    """{"options": what texts depend on, "environment": ..., "temperatures": {"0": ..., "1": ...}}."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts, num_too_long = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    heads = load_heads(args.heads, target) if args.heads is not None else None
    decoder = Decoder(target, heads, tree=parse_tree(args.tree)) if heads is not None else Decoder(target, None)
    expected = json.loads(Path(args.texts).read_text(encoding="utf-8"))["temperatures"] if args.texts else {}
    measured = {}
    for temperature in args.temperature:
        settings = Settings(args.max_new_tokens, temperature, args.seed)
        texts, each = [], []
        for prompt in prompts:
            output = decoder.generate(prompt.input_ids, seed=args.seed + prompt.index, **settings.generate_kwargs())
            texts.append(output.sequences[0, prompt.input_ids.shape[1] :].tolist())
            each.append(output.stats)
        found = summarize(each) if heads is not None else {}
        if heads is None:
            found["texts"] = texts
        elif expected:
            others = expected[f"{temperature:g}"]["texts"]
            found["identical"] = sum(one == other for one, other in zip(texts, others, strict=True))
        measured[f"{temperature:g}"] = found
    details = {"prompts": args.prompts, "num_prompts": len(prompts), "too_long": num_too_long, "tree": args.tree}
    environment = describe_environment(target, None, max_new_tokens=args.max_new_tokens, target=args.target, **details)
    options = {name: getattr(args, name) for name in OPTIONS}
    return {"options": options, "environment": environment, "temperatures": measured}


def summarize(each: Sequence[GenerationStats]) -> dict[str, Any]:
    """Acceptance length of all texts together, its standard error over prompts, and acceptance by depth."""
    total = sum(each, GenerationStats())
    steps = [stats.num_verify_steps for stats in each]
    tokens = [stats.acceptance_length * stats.num_verify_steps for stats in each]
    return {
        "acceptance_length": total.acceptance_length,
        "standard_error": ratio_error(tokens, steps),
        "acceptance_by_depth": total.acceptance_by_depth,
        "verify_steps": total.num_verify_steps,
    }


def ratio_error(tokens: Sequence[float], steps: Sequence[int]) -> float | None:
    """Standard error of sum(tokens) / sum(steps) over prompts, to first order; None for one prompt.

    >>> round(ratio_error([20, 30], [10, 10]), 3)
    0.5
    """
    if len(steps) < 2 or not sum(steps):
        return None
    ratio = sum(tokens) / sum(steps)
    squares = sum((t - ratio * s) ** 2 for t, s in zip(tokens, steps, strict=True))
    return math.sqrt(squares * len(steps) / (len(steps) - 1)) / sum(steps)


def main() -> None:
    parser = HfArgumentParser(MeasureArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    try:
        (args,) = parser.parse_args_into_dataclasses()
        write_text(Path(args.json), json.dumps(measure(args), indent=1, allow_nan=False) + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"ablation_measure.py: {error}")


if __name__ == "__main__":
    main()
