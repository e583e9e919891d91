"""The examples in docstrings are what the code does."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    str(path.relative_to(ROOT))
    for package in ("heads", "inference", "scripts", "training")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", FILES)
def test_examples(file: str) -> None:
    module = importlib.import_module("draftsmith." + file.removesuffix(".py").replace("/", "."))
    assert doctest.testmod(module).failed == 0
