"""The README's numbers are those of the benchmark files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.benchmarks.readme_results import BEGIN, END, replace_between_markers
from tests.conftest import REPOSITORY


def test_the_readme_is_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/benchmarks/readme_results.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    assert replace_between_markers(f"a\n{BEGIN}\nold\n{END}\nb\n", "NEW") == "a\nNEW\nb\n"
    with pytest.raises(ValueError, match="no part between"):
        replace_between_markers("a\nb\n", "NEW")
