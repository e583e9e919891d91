"""Shows which tokens of conversations heads would learn, and counts conversations, turns and tokens.

    draftsmith inspect --target examples/chat-13m --dataset examples/conversations.jsonl.gz
    draftsmith inspect --config configs/train/medusa-chat-13m.yaml --num_rows 5 --json outputs/data.json

The data options are those of training, and a training configuration is read too. In a terminal, learned text is green
and special tokens stand out (`bench` extra). Elsewhere, learned text is in [[ ]].
"""

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draftsmith.inference.targets.files import read_config, read_tokenizer
from draftsmith.inference.targets.model_config import find_length_limit
from draftsmith.training.data.options import DataArguments, option
from draftsmith.training.data.reply_spans import find_special_ids
from draftsmith.training.data.set_statistics import join_sets, measure_sets
from draftsmith.training.data.training_sets import cut_to_limit
from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.whole_files import write_text

GROUPS = {
    "data": "config target dataset columns max_length max_samples",
    "output": "num_rows json",
}


@dataclass
class InspectArguments:
    target: str = option(help="The target whose tokenizer and chat template are used: a folder or hub id.")
    num_rows: int = option(default=3, help="Conversations to show from each data set.")
    json: str | None = option(default=None, help="JSON file to write the counts to.")
    trust_remote_code: bool = option(default=False, help="Run Python code that comes with the target.")

    def __post_init__(self) -> None:
        if self.num_rows < 0:
            raise ValueError(f"got num_rows {self.num_rows}: give 0 (none) or more")


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with one_line_errors("draftsmith inspect"):
        args, data_args = parse_arguments(argv, (InspectArguments, DataArguments), doc=__doc__, groups=GROUPS)
        tokenizer = read_tokenizer(args.target, trust_remote_code=args.trust_remote_code)
        config = read_config(args.target, trust_remote_code=args.trust_remote_code)
        data_args = cut_to_limit(data_args, find_length_limit(config.get_text_config()))
        measured = measure_sets(data_args, tokenizer)
    show = make_printer()
    for each in measured:
        for index in range(min(args.num_rows, len(each.rows))):
            show([(f"--- {each.name}, conversation {index + 1}\n", "")])
            show([*describe_row(each.rows[index], tokenizer), ("\n", "")])
    *sets, total = (each.count(data_args.max_length) for each in (*measured, join_sets(measured)))
    for counts in [*sets, total] if len(sets) > 1 else sets:
        show([(format_statistics(counts, data_args), "")])
    if args.json:
        result = {"target": args.target, "sets": sets, "total": total}
        write_text(Path(args.json), json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def describe_row(row: dict[str, list[int]], tokenizer: Any) -> Iterator[tuple[str, str]]:
    """The text of a row in pieces, each with its kind: "", "special", "trained" or "trained special"."""
    special = find_special_ids(tokenizer)
    ids, mask = row["input_ids"], row["loss_mask"]
    kinds = [
        " ".join(["trained"] * bit + ["special"] * (token in special)) for token, bit in zip(ids, mask, strict=True)
    ]
    written = 0  # characters: tokens decoded by themselves lose spaces and parts of characters
    for end in range(1, len(ids) + 1):
        if end < len(ids) and kinds[end] == kinds[end - 1]:
            continue
        text = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        yield text[written:], kinds[end - 1]
        written = len(text)


def make_printer() -> Any:
    """A function that prints pieces: in colour in a terminal, else with markers around trained text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            print("in colour with: pip install 'draftsmith[bench]'", file=sys.stderr)
        else:
            styles = {"": "dim", "special": "dim cyan", "trained": "green", "trained special": "bold magenta"}
            console = Console(highlight=False)
            return lambda pieces: console.print(Text.assemble(*((text, styles[kind]) for text, kind in pieces)))
    return lambda pieces: print(mark(pieces))


def mark(pieces: list[tuple[str, str]]) -> str:
    """
    >>> mark([("a", ""), ("Yo", "trained"), ("<e>", "trained special")])
    'a[[Yo<e>]]'
    """
    text, is_open = "", False
    for piece, kind in pieces:
        if kind.startswith("trained") != is_open:
            is_open = not is_open
            text += "[[" if is_open else "]]"
        text += piece
    return text + ("]]" if is_open else "")


def format_statistics(counts: dict[str, Any], data_args: DataArguments) -> str:
    lines = [
        f"{counts['name']}: {counts['num_conversations']} conversations of {counts['num_records']} records",
        *(f"  dropped {number}: {reason}" for reason, number in counts["dropped"].items()),
        *(f"  {number} {note}" for note, number in counts["notes"].items()),
        f"  turns {counts['num_turns']}, of which {counts['num_replies']} are the assistant's",
        f"  tokens {counts['num_tokens']}, of which {counts['num_trained_tokens']} have a loss "
        f"({counts['trained_share']:.1%})",
        "  tokens of a conversation, by quantile: "
        + ", ".join(f"{quantile}: {length}" for quantile, length in counts["lengths"].items()),
        f"  {counts['num_at_max_length']} have max_length ({data_args.max_length}) tokens; the rest is cut off",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
