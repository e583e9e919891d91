"""What programs that print one Markdown table share: options, errors of one line, and the table in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from scripts.benchmarks.report import write_text


def run_table_program(
    arguments: type[Any], compare: Callable[[Any], str], program: str, argv: Sequence[str] | None = None
) -> int:
    """Parses options, prints what `compare` makes of them, and writes it to `--markdown` if given.

    Args:
        arguments: a dataclass of the options, one of them `markdown`.
        compare: makes the table; its ValueErrors and OSErrors end the program with one line.
        program: the file's path, for that line and for the description, the first paragraph of its docstring.
        argv: options; None = those of the command line.
    """
    name, description = Path(program).name, (sys.modules[compare.__module__].__doc__ or "").partition("\n\n")[0]
    parser = HfArgumentParser(arguments, description=description)
    try:
        (args,) = parser.parse_args_into_dataclasses(None if argv is None else list(argv))
        table = compare(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    print(table)
    if args.markdown is not None:
        write_text(Path(args.markdown), table + "\n")
    return 0
