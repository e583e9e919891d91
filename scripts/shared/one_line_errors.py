"""How programs end when the user's input is wrong: one line on the error output and exit status 1, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Ends the program with one line for wrong input and for files that cannot be read or written.

    Args:
        program: the file's name, for example "generate.py". Under `draftsmith NAME` the line begins with that name.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        name = sys.argv[0] if sys.argv and sys.argv[0].startswith("draftsmith ") else program
        sys.exit(f"{name}: {' '.join(str(error).split())}")
