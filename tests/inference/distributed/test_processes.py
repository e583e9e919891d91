"""Real processes: rank 0 and two servers over gloo, with every message late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.inference.distributed import ranks
from tests.processes import start_ranks


@pytest.mark.ci
@pytest.mark.slow
def test_texts_are_the_same_and_a_killed_server_ends_the_run(tmp_path: Path) -> None:
    first, second, third = start_ranks(3, tmp_path / "rank", ranks.run, 12)
    for rank in (first, second, third):
        rank.join(300)
        rank.kill()
    output = (tmp_path / "rank0").read_text()
    found = re.search(r"(\d+) of 12 texts are the same, and in (\d+) answers overtook", output)
    assert found, output
    assert found[1] == "12"
    assert found[2] != "0"
    assert first.exitcode == 1
    assert "RuntimeError: the target server of rank 2 has died" in output
    assert second.exitcode == 0, "the other server is told to end"
