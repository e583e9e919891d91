"""Which kinds of heads there are: this library's own, those that a user registers, and those of installed packages."""

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from transformers import PreTrainedModel

from draftsmith.heads.config import DraftHeadsConfig
from draftsmith.inference.drafters.base import Drafter

HEAD_TYPES: dict[str, type[Any]] = {}  # head_type -> its subclass of DraftHeads
GROUP = "draftsmith.heads"  # of entry points: examples/own_kind.py shows one

Kind = TypeVar("Kind", bound=type[Any])


def register(kind: Kind) -> Kind:
    """Adds a kind of heads, under the `head_type` of its config: a function, or a decorator of the class.

    `create_heads`, `DraftHeads.from_pretrained` and every program then know it. Programs import no file of yours: for
    them, let a package name the kind as an entry point of the group `draftsmith.heads`.

    Raises:
        ValueError: no subclass of DraftHeads, a class without a config of its own, or one whose `head_type` is that of
            another class.
    """
    # Only DraftHeads is both; it looks kinds up here.
    if not (isinstance(kind, type) and issubclass(kind, Drafter) and issubclass(kind, PreTrainedModel)):
        raise ValueError(f"register got {kind!r}: give a subclass of draftsmith.DraftHeads")
    config_class = getattr(kind, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, DraftHeadsConfig) and config_class.head_type):
        raise ValueError(
            f"{kind.__name__}.config_class is {config_class!r}: give a subclass of DraftHeadsConfig with a head_type"
        )
    name = config_class.head_type
    known = HEAD_TYPES.setdefault(name, kind)
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"head_type {name!r} of {kind.__name__} is that of {known.__name__}: choose another")
    HEAD_TYPES[name] = kind  # the cell of a notebook that ran again
    return kind


def known_kinds() -> list[str]:
    """The names that `find_kind` takes, sorted."""
    return sorted({*HEAD_TYPES, *entry_points(group=GROUP).names})


def find_kind(head_type: str | None) -> type[Any]:
    """The class of a kind. That of an installed package is imported when it is first asked for.

    Raises:
        ValueError: an unknown kind (the message lists the known ones), or a package whose kind cannot be imported or
            has another `head_type`.
    """
    if head_type not in HEAD_TYPES:
        for entry in entry_points(group=GROUP, name=head_type or ""):
            _import_kind(entry)
    if head_type is None or head_type not in HEAD_TYPES:
        near = difflib.get_close_matches(str(head_type), known_kinds(), n=1)
        hint = f"; did you mean {near[0]}" if near else ""
        raise ValueError(f"unknown head_type {head_type!r}{hint}; known kinds: {', '.join(known_kinds())}")
    return HEAD_TYPES[head_type]


def _import_kind(entry: EntryPoint) -> None:
    package = f" of the package {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    described = f"the entry point {entry.name} = {entry.value}{package}"
    try:
        found = register(entry.load()).config_class.head_type
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{described} gives no kind of heads: {type(error).__name__}: {error}. Mend or uninstall the package"
        ) from error
    if found != entry.name:
        raise ValueError(f"{described} is of head_type {found!r}: give the entry point that name")
