"""docs/targets.md promises the releases of transformers that CI runs: the oldest allowed, and the pinned one."""

import re
import tomllib

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def find_pin() -> str:
    found = re.search(r"^transformers==(\S+)$", read("constraints.txt"), re.MULTILINE)
    return found[1]


def test_the_docs_promise_the_oldest_and_the_pinned_release() -> None:
    requirements = map(Requirement, tomllib.loads(read("pyproject.toml"))["project"]["dependencies"])
    allowed = next(one.specifier for one in requirements if one.name == "transformers")
    oldest = next(one.version for one in allowed if one.operator == ">=")
    assert find_pin() in allowed
    promised = re.search(r"on transformers ([\d.]+) and ([\d.]+),", read("docs/targets.md"))
    assert promised.groups() == (oldest, find_pin())
