"""How programs end when the user's input is wrong, or the user interrupts them: without a traceback."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors(program: str, *, kept: str = "what it has written stays") -> Iterator[None]:
    """Ends the program with a line (status 1) for wrong input and for files that cannot be read or written, and with one
    (status 130) for Ctrl-C.

    Args:
        program: as users type it, for example "draftsmith chat".
        kept: what an interrupted program leaves behind, and how to go on if that is not the same command.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        words = program.split() if " " in program else ["python", sys.argv[0]]
        again = shlex.join([*words, *sys.argv[1:]])
        print(f"\n{program}: interrupted; {kept}. Again: {again}", file=sys.stderr)
        sys.exit(130)
