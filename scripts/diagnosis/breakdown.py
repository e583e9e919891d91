"""Where drafts are accepted: by depth, by place in the text, by kind of text, by how sure the target is."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.scripts.diagnosis.evidence import Evidence, Text

FEWEST = 10  # places of a row of the table
PLACES = (64, 256, 1024)  # new tokens
ENTROPIES = (0.3, 1.0, 2.0)  # nats
_LIST = re.compile(r"\s*([-*+•]|\d+[.)])\s")

Table = list[tuple[str, float, int]]
"""Name of a group, how often drafts are right in it, and the number of drafts."""


def break_down(evidence: Evidence, tokenizer: Any) -> dict[str, Table]:
    """Tables of how often drafts are right; those of one row tell nothing and are left out."""
    depths = [(f"depth {d}", *evidence.accuracy(d)) for d in range(1, evidence.num_depths + 1)]
    kinds = {id(text): name_kinds(text, tokenizer) for text in evidence.texts}
    tables = {
        "by depth, where the drafts before are right": [row for row in depths if row[2] >= FEWEST],
        "at depth 1, by place among the new tokens": group(
            evidence.texts, lambda text, place: _name_range(place - text.prompt_length, PLACES), PLACES
        ),
        "at depth 1, by kind of text": sorted(
            group(evidence.texts, lambda text, place: kinds[id(text)][place - text.prompt_length]),
            key=lambda row: -row[2],
        ),
        "at depth 1, by entropy of the target in nats": group(
            evidence.texts, lambda text, place: _name_range(float(text.entropies[place]), ENTROPIES), ENTROPIES
        ),
    }
    return {name: table for name, table in tables.items() if len(table) > 1}


def group(texts: Iterable[Text], name: Callable[[Text, int], str], bounds: tuple[float, ...] = ()) -> Table:
    """Accuracy at depth 1 of each group of predicted tokens."""
    counts: dict[str, list[int]] = {_name_range(bound, bounds): [0, 0] for bound in (-1.0, *bounds)} if bounds else {}
    for text in texts:
        for place in range(text.prompt_length + 1, len(text.ids)):
            if text.is_drafted[0, place - 1]:
                count = counts.setdefault(name(text, place), [0, 0])
                count[0] += bool(text.hits[0, place - 1])
                count[1] += 1
    return [(group, right / known, known) for group, (right, known) in counts.items() if known >= FEWEST]


def _name_range(value: float, bounds: tuple[float, ...]) -> str:
    """
    >>> [_name_range(value, (64, 256)) for value in (3, 64, 300)]
    ['below 64', '64 to 256', '256 and more']
    """
    below = [bound for bound in bounds if bound <= value]
    if not below:
        return f"below {bounds[0]:g}"
    return f"{below[-1]:g} to {bounds[len(below)]:g}" if len(below) < len(bounds) else f"{bounds[-1]:g} and more"


def name_kinds(text: Text, tokenizer: Any) -> list[str]:
    """The kind of text that each new token is part of: code, list, numbers, another script than Latin, or prose."""
    pieces, detokenizer = [], IncrementalDetokenizer(tokenizer)
    for token_id in text.ids[text.prompt_length :].tolist():
        pieces.append(detokenizer.add(token_id))
    kinds, line, is_code = [], "", False
    for piece in pieces:
        kinds.append(_name_kind(line + piece, piece, is_code=is_code))
        line += piece
        if "\n" in line:
            *whole, line = line.split("\n")
            is_code ^= sum(one.lstrip().startswith("```") for one in whole) % 2 == 1
    return kinds


def _name_kind(line: str, piece: str, *, is_code: bool) -> str:
    if is_code or line.lstrip().startswith("```"):
        return "code"
    if any(letter.isdigit() or letter in "=+*/$%" for letter in piece):
        return "numbers"
    if any(ord(letter) > 0x24F and letter.isalpha() for letter in piece):
        return "other scripts"
    return "list" if _LIST.match(line) else "prose"
