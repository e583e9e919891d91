"""The command line of every program: options from dataclasses, a help of one screen, mistakes in one line."""

import difflib
import functools
import sys
import textwrap
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_args, get_type_hints

from transformers.hf_argparser import HfArgumentParser, string_to_bool

WIDTH, _INDENT = 100, 30  # of a line of the help, and the column in which its texts start


_FIELDS = {"--for": "--served_by"}  # a word of Python is no name of a field


def spell(word: str) -> str:
    """An option as it is named: `--max-length=7` is `--max_length=7`. Other words stay.

    >>> spell("--max-length=a-b"), spell("a-b"), spell("-h"), spell("--for=vllm")
    ('--max_length=a-b', 'a-b', '-h', '--served_by=vllm')
    """
    flag, equals, value = word.partition("=")
    name = _FIELDS.get(flag) or "--" + flag[2:].replace("-", "_")
    return name + equals + value if word.startswith("--") else word


class _ShowAll(Action):
    """`--help_all`: prints every option with its whole text."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        parser._print_message(HfArgumentParser.format_help(parser), sys.stdout)
        parser.exit()


class ProgramParser(HfArgumentParser):  # type: ignore[misc, unused-ignore]
    """Reads dataclasses from the command line.

    - Options are shown with underscores, and taken with hyphens too. `--flag` is `--flag true`. `none` unsets an option
      that may have no value.
    - `--help` shows the options of `groups`, one line each; `--help_all` shows every option with its whole text.
    - A mistake is a ValueError of one line.

    Args:
        classes: dataclasses; each field is an option.
        doc: the program's docstring: its first line is the purpose of the program, indented lines are examples.
        groups: title -> names of options, separated by spaces; None = one group of all options.
    """

    def __init__(self, classes: Sequence[Any], *, doc: str, groups: Mapping[str, str] | None = None, **kwargs: Any):
        super().__init__(classes, description=doc.partition("\n")[0], allow_abbrev=False, **kwargs)
        self.examples = textwrap.dedent("\n".join(line for line in doc.splitlines() if line.startswith("    ")))
        optional = optional_keys(classes)
        for action in self._actions:
            if action.required:
                action.default = SUPPRESS  # its text would end with "(default: None)"
            if action.nargs != 0 and not action.choices:
                action.metavar = action.metavar or {int: "N", float: "X"}.get(action.type, "VALUE")  # type: ignore[call-overload]
            if action.type is string_to_bool and action.nargs is None:  # a flag that is unset by default
                action.nargs, action.const = "?", True
            # `--report_to none` is a value of transformers' own.
            if action.type is not None and action.dest in optional - {"report_to"}:
                action.type = _reading_none(action.type)
            # Shown, an alias first.
            action.option_strings = [option for option in action.option_strings[::-1] if "-" not in option[2:]]
        help_all = "Show every option with its whole text."
        self.add_argument("--help_all", action=_ShowAll, nargs=0, dest=SUPPRESS, default=SUPPRESS, help=help_all)
        known = self._by_name()
        required = [self._invocation(action) for action in known.values() if action.required]
        self.usage = " ".join(["%(prog)s", *required, "[--option VALUE ...]"])
        groups = groups or {"options": " ".join(known)}
        self.groups = {title: [name for name in names.split() if name in known] for title, names in groups.items()}

    def _check_value(self, action: Action, value: Any) -> None:
        if value is not None and action.choices and value not in action.choices:
            choices = [str(choice) for choice in action.choices if choice is not None]
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            self.error(f"got {action.option_strings[0]} {value!r}: {hint}Choose from {', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        """Raises ValueError instead of printing the usage."""
        raise ValueError(f"{message} (all options: --help_all)")

    def read(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """One object for each class, from the arguments without the program's name; None = `sys.argv[1:]`.

        Raises:
            ValueError: an unknown option (with the nearest known one), a missing or a malformed value.
        """
        *parsed, rest = self.parse_args_into_dataclasses(args, return_remaining_strings=True, look_for_args_file=False)
        self.refuse(rest)
        return tuple(parsed)

    def refuse(self, words: Sequence[str]) -> None:
        """Raises ValueError for words that are no option, with the nearest known one."""
        for word in words:
            known = [f"__{name}" for name in self._by_name()]
            near = difflib.get_close_matches(word.partition("=")[0].replace("-", "_"), known, n=1, cutoff=0.6)
            hint = f"; did you mean --{near[0].lstrip('_')}?" if near else ""
            self.error(f"got {word!r}, which is no option{hint}")

    def format_help(self) -> str:
        """One screen: the options of the groups."""
        by_name = self._by_name()
        lines = [self.format_usage(), str(self.description)]
        for title, names in self.groups.items():
            lines += ["", f"{title}:", *(line for name in names for line in self._describe(by_name[name]))]
        num_rest = len(by_name) - sum(map(len, self.groups.values()))
        rest = f", {num_rest} of them not shown here" if num_rest else ""
        lines += ["", f"All options with their whole text{rest}: --help_all"]
        if self.examples:
            lines += ["", "examples:", textwrap.indent(self.examples, "  ")]
        return "\n".join(lines) + "\n"

    def _by_name(self) -> dict[str, Action]:
        """Name -> option; of a pair --x and --no_x the first."""
        found: dict[str, Action] = {}
        for action in self._actions:
            if action.dest not in ("help", SUPPRESS) and action.option_strings:
                found.setdefault(action.dest, action)
        return found

    def _invocation(self, action: Action) -> str:
        if action.const is True or action.nargs == 0:
            return f"--[no_]{action.dest}" if action.default is True else action.option_strings[0]
        choices = [str(choice) for choice in action.choices or () if choice is not None]
        value = "{" + ",".join(choices) + "}" if 0 < len(choices) < 3 else str(action.metavar or "VALUE")
        return f"{action.option_strings[0]} {value}{' ...' if action.nargs == '+' else ''}"

    def _describe(self, action: Action) -> Iterator[str]:
        """The first sentence of an option's text, cut to one line."""
        width = WIDTH - _INDENT
        text = " ".join(str(action.help or "").split()).replace("%%", "%").partition(". ")[0].rstrip(".")
        values = action.default if isinstance(action.default, list) else [action.default]
        has_default = values and not isinstance(values[0], bool | None) and values[0] not in ("", SUPPRESS)
        default = f" [{' '.join(map(str, values))}]" if has_default else ""
        if len(text + default) > width:
            text = textwrap.shorten(text.partition("; ")[0], width - len(default), placeholder=" ...")
        name = f"  {self._invocation(action)}"
        if len(name) > _INDENT - 2:
            yield name
            name = ""
        yield f"{name:<{_INDENT}}{text}{default}".rstrip()


def optional_keys(classes: Sequence[Any]) -> set[str]:
    """The options that may have no value."""
    hints = {name: hint for kind in classes for name, hint in get_type_hints(kind).items()}
    return {name for name, hint in hints.items() if type(None) in get_args(hint)}


def _reading_none(read: Any) -> Callable[[str], Any]:
    """`read`, with None for the words `none` and `null`."""

    @functools.wraps(read)
    def read_word(word: str) -> Any:
        return None if word.lower() in ("none", "null") else read(word)

    return read_word
