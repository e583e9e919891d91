"""What is typed in a chat: messages, and commands that begin with a slash."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.console import Console

from draftsmith.scripts.chat.session import ChatSession

with suppress(ImportError):  # not on Windows
    import readline  # noqa: F401 (arrow keys edit a line, and find earlier ones)

NONE = "none"


class Quit(Exception):
    """Ends the chat."""


def _new(session: ChatSession, value: str) -> str:
    session.reset()
    return "a new conversation"


def _heads(session: ChatSession, value: str) -> str:
    if value:
        session.change_heads(None if value == NONE else value)
    return f"heads: {session.args.heads or NONE}"


def _tree(session: ChatSession, value: str) -> str:
    if value:
        session.change(tree=value)
    return f"tree: {session.args.tree or 'auto'}" if session.drafter is not None else "tree: nothing is drafted"


def _temperature(session: ChatSession, value: str) -> str:
    if value:
        try:
            temperature = float(value)
        except ValueError as error:
            raise ValueError(f"got /temperature {value}: give a number, such as 0 or 0.8") from error
        session.change(temperature=temperature)
    return f"temperature: {session.args.temperature:g}"


def _compare(session: ChatSession, value: str) -> str:
    session.compare()
    return ""


def _help(session: ChatSession, value: str) -> str:
    lines = [f"/{name:<24}{purpose}" for name, (purpose, _) in COMMANDS.items()]
    return "\n".join([*lines, "Ctrl-C ends a reply, Ctrl-D the program."])


def _quit(session: ChatSession, value: str) -> str:
    raise Quit


# Name and argument -> purpose and function.
COMMANDS: dict[str, tuple[str, Callable[[ChatSession, str], str]]] = {
    "heads FOLDER": ("draft with other heads, or with none; without FOLDER: show them", _heads),
    "tree TREE": ("draft other trees, such as chain:4 or dynamic:5,6,24", _tree),
    "temperature X": ("sample at another temperature; 0 = greedy", _temperature),
    "compare": ("decode the last prompt plainly with the same seed, and compare", _compare),
    "new": ("begin a new conversation", _new),
    "help": ("show this list", _help),
    "quit": ("end the program", _quit),
}
BY_NAME = {name.partition(" ")[0]: function for name, (_, function) in COMMANDS.items()}


def run_command(session: ChatSession, line: str) -> None:
    """Runs a line such as "/tree chain:4", and prints what came of it.

    Raises:
        Quit: the line is "/quit".
        ValueError, OSError: the command cannot be run; nothing has changed.
    """
    name, _, value = line[1:].partition(" ")
    if name not in BY_NAME:
        raise ValueError(f"got /{name}; commands are {', '.join(f'/{known}' for known in BY_NAME)}")
    if said := BY_NAME[name](session, value.strip()):
        session.notes.print(said, style="dim", markup=False, soft_wrap=True)


def chat(session: ChatSession) -> None:
    """Answers what is typed until /quit or Ctrl-D."""
    session.notes.print("/help lists the commands, Ctrl-C ends a reply, Ctrl-D the program", style="dim")
    for line in _read_lines(session.console):
        try:
            if re.fullmatch(r"/[a-z]+( .*)?", line):
                run_command(session, line)
            else:
                session.reply(line)
        except Quit:
            return
        except KeyboardInterrupt:  # the second one within a reply, or one within a command
            session.console.print()
        except (ValueError, OSError) as error:
            session.notes.print(str(error), style="red", markup=False, soft_wrap=True)


def _read_lines(console: Console) -> Iterator[str]:
    # readline must not count the escape sequences.
    prompt = "> " if console.no_color or not console.is_terminal else "\001\x1b[1m\002> \001\x1b[0m\002"
    while True:
        try:
            if line := input(prompt).strip():
                yield line
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D ends the program", style="dim")
        except EOFError:
            console.print()
            return
