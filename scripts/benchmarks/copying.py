"""Measures whether heads copy: how often their next token is right where greedy text repeats itself, and elsewhere.

    python scripts/benchmarks/copying.py --heads examples/heads/mtp examples/heads/eagle \\
        --prompts examples/prompts.jsonl

Every step drafts one token. The token that follows in the text is repeated if it ends a 4-gram that occurred before, in
the prompt or in the reply.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from inference import Decoder
from scripts.measuring.environment import describe_environment
from scripts.measuring.measure import Prompt, load_prompts
from scripts.measuring.render import Grid
from scripts.shared.model_loading import load_heads, load_target
from scripts.shared.one_line_errors import one_line_errors
from scripts.shared.whole_files import write_text
from training.options.program_parser import ProgramParser


@dataclass
class CopyingArguments:
    heads: list[str] = field(metadata={"help": "Draft heads: folders or hub ids."})
    prompts: list[str] = field(metadata={"help": "Files of prompts or conversations."})
    target: str = field(default="examples/chat-13m", metadata={"help": "Target of all heads."})
    num_prompts: int | None = field(default=None, metadata={"help": "Use only the first N of each file; none = all."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens decoded for each prompt (fewer after an EOS)."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of target and heads."})
    json: str | None = field(default=None, metadata={"help": "Write counts and environment to this JSON file."})


def find_repeated(text: Sequence[int], n: int = 4) -> list[bool]:
    """Entry i: whether token i ends an n-gram that occurred earlier in the text.

    >>> find_repeated([1, 2, 1, 2, 3], n=2)
    [False, False, False, True, False]
    """
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(text) + 1):
        gram = tuple(text[end - n : end]) if end >= n else ()
        found.append(gram in seen)
        seen |= {gram} if gram else set()
    return found


def count_accepted(decoder: Decoder, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[str, list[int]]:
    """{"repeated": [drafted, accepted], "new": [drafted, accepted]} of greedy decoding with trees of one token."""
    counts = {"repeated": [0, 0], "new": [0, 0]}
    for prompt in prompts:
        steps: list[tuple[int, int]] = []
        output = decoder.generate(
            prompt.input_ids,
            max_new_tokens=max_new_tokens,
            on_step=lambda tokens, drafted, steps=steps: steps.append((len(tokens), drafted)),
        )
        text = output.sequences[0].tolist()
        repeated = find_repeated(text)
        place = prompt.input_ids.shape[1] + 1
        for length, drafted in steps[1:]:  # the first is the prompt pass, which gives one token without a draft
            count = counts["repeated" if repeated[place] else "new"]
            count[0] += 1
            count[1] += drafted
            place += length
    return counts


def format_share(drafted: int, accepted: int) -> str:
    """0.73 ± 0.03 of 310: the share, its binomial standard error, and the number of drafted tokens."""
    if not drafted:
        return "–"
    share = accepted / drafted
    return f"{share:.2f} ± {math.sqrt(share * (1 - share) / drafted):.2f} of {drafted}"


def run(args: CopyingArguments, console: Console) -> dict[str, dict[str, list[int]]]:
    """Measures all heads; counts by their names, as `count_accepted` gives them."""
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
    prompts = [one for path in args.prompts for one in load_prompts(Path(path), tokenizer, target, **limits)[0]]
    counts = {}
    for name in args.heads:
        decoder = Decoder(target, load_heads(name, target), tree="chain:1")
        counts[name] = count_accepted(decoder, prompts, args.max_new_tokens)
    title = f"Share of drafted tokens that were accepted: {len(prompts)} prompts, {args.target}, chain:1, T = 0"
    cells = [[name, *(format_share(*count) for count in some.values())] for name, some in counts.items()]
    Grid(title, ["heads", "repeated", "new"], cells, []).print(console)
    if args.json is not None:
        environment = describe_environment(target, None, target=args.target, prompts=args.prompts)
        write_text(Path(args.json), json.dumps({"environment": environment, "counts": counts}, indent=1) + "\n")
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("copying.py"):
        (args,) = ProgramParser([CopyingArguments], doc=__doc__).parse_args_into_dataclasses(
            argv, look_for_args_file=False
        )
        run(args, Console(width=None if sys.stdout.isatty() else 150))


if __name__ == "__main__":
    main()
