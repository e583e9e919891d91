"""Parameters of tests of which only some are quick enough for `make test`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def slow_but(quick: Collection[str], values: Mapping[str, Any] | Iterable[str]) -> list[Any]:
    """One parameter for each name; those not in `quick` are marked slow. In a mapping each
    name has its value; a tuple is the values of several arguments."""
    named = values if isinstance(values, Mapping) else {name: name for name in values}
    if unknown := set(quick) - set(named):
        raise ValueError(f"there are no parameters {sorted(unknown)}; there are {list(named)}")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), id=name, marks=() if name in quick else pytest.mark.slow
        )
        for name, value in named.items()
    ]
