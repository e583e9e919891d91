"""The releases of transformers that are promised are those that CI runs: the oldest, and the pinned one."""

from __future__ import annotations

import re
import subprocess
import tomllib

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.conftest import REPOSITORY


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def find_range() -> SpecifierSet:
    requirements = map(Requirement, tomllib.loads(read("pyproject.toml"))["project"]["dependencies"])
    return next(one.specifier for one in requirements if one.name == "transformers")


def find_bound(operator: str) -> str:
    return next(one.version for one in find_range() if one.operator == operator)


def find_pin() -> str:
    found = re.search(r"^transformers==(\S+)$", read("constraints.txt"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_ci_runs_the_oldest_release() -> None:
    line = next(line for line in read(".ci/run").splitlines() if line.startswith("oldest="))
    done = subprocess.run(["bash", "-c", f"{line}\necho $oldest"], cwd=REPOSITORY, capture_output=True, check=True)
    assert done.stdout.decode().strip() == find_bound(">=")


def test_ci_runs_the_pinned_release() -> None:
    pin = find_pin()
    assert pin in find_range()
    assert find_bound("<") == str(Version(pin).major + 1)
    assert re.findall(r"pip install .* -e \S+", read("Makefile")) == [
        'pip install --quiet -c constraints.txt -e ".[dev]"'
    ]
    commands = read(".ci/run").splitlines()
    assert "make install" in commands
    assert any(command.startswith("make test ") for command in commands)


def test_the_docs_promise_both() -> None:
    promised = re.search(r"on transformers ([\d.]+) and ([\d.]+),", read("docs/targets.md"))
    assert promised is not None
    assert promised.groups() == (find_bound(">="), find_pin())
