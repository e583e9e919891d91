"""How tables look in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftsmith.scripts.measuring.table import Grid


@pytest.mark.parametrize(("width", "num_tables"), [(80, 3), (200, 1)])
def test_a_narrow_terminal_breaks_no_number(width: int, num_tables: int) -> None:
    numbers = [f"{100 + place}.25" for place in range(12)]
    columns = ["decoding", *(f"part {place}" for place in range(12))]
    printed = io.StringIO()
    grid = Grid("Where the time goes", columns, [["examples/heads/eagle3, dynamic:2,2,4", *numbers]], ["a note"])
    grid.print(Console(width=width, file=printed))
    text = printed.getvalue()
    assert all(text.count(number) == 1 for number in numbers)
    assert text.count("decoding") == num_tables
    assert (text.count("Where the time goes"), text.count("a note")) == (1, 1)
    assert max(map(len, text.splitlines())) <= width
