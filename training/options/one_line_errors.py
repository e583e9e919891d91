"""How every program ends when its input is wrong, or when it is interrupted: in one line, without a traceback."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors(program: str, *, kept: str = "") -> Iterator[None]:
    """Ends the program with one line: for Ctrl-C, and with status 1 for wrong input and files that cannot be read or
    written.

    Args:
        program, kept: as in `one_line_interrupt`.
    """
    with one_line_interrupt(program, kept=kept):
        try:
            yield
        except (ValueError, OSError) as error:
            sys.exit(f"{program}: {error}")


@contextmanager
def one_line_interrupt(program: str, *, kept: str = "") -> Iterator[None]:
    """Ends an interrupted program with status 130 and one line: what is kept, and the command that goes on.

    Args:
        program: as users type it, for example "draftsmith chat".
        kept: what the program leaves behind for the same command; "" = nothing. A text of the `KeyboardInterrupt`
            replaces both.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the second one ends at once, whatever still has to be closed
        words = program.split() if " " in program else ["python", sys.argv[0]]
        again = shlex.join([*words, *sys.argv[1:]])
        left = str(interrupt) or (kept and f"{kept}. Continue{as_launched(again)}")
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                f"\n{program}: interrupted" + (f"; {left}\n" if left else f". Again{as_launched(again)}\n")
            )
        sys.exit(130)


def as_launched(command: str) -> str:
    """What follows "Continue" before a command of this run: a launcher's options are not known here.

    >>> as_launched("draftsmith train --config c.yaml")
    ': draftsmith train --config c.yaml'
    """
    is_launched = os.environ.get("WORLD_SIZE", "1") != "1"
    return f", with the same launcher: -m {command}" if is_launched else f": {command}"
