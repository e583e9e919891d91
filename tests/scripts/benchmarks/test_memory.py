"""memory.py at small sizes; what it measures with is tested in tests/inference/test_memory.py."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from scripts.benchmarks import memory, memory_cells
from scripts.benchmarks.memory import MIB, MemoryArguments
from scripts.benchmarks.memory_cells import Check, Scene
from tests.conftest import CHAT_TARGET, REPOSITORY


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half a minute of calls on a larger random target.
    scene = Scene("twenty calls", *(size * MIB for size in (1, 2, 3, 4)))
    shape = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    monkeypatch.setattr(memory_cells, "RANDOM_SHAPE", shape)
    monkeypatch.setattr(memory, "measure_scenes", lambda *_: [scene])
    monkeypatch.setattr(memory, "check_rulers", lambda batch, prompt: Check(batch, prompt, 5, 6, 7))
    files = {name: str(tmp_path / "out" / f"memory.{name}") for name in ("json", "markdown")}
    arguments = MemoryArguments(
        target=str(CHAT_TARGET),
        heads=[str(REPOSITORY / "examples" / "heads" / "mtp")],
        batch=[1, 2],
        prompt=[8],
        new=[2],
        long_prompt=[16],
        device="cpu",
        **files,
    )
    console = Console(file=io.StringIO(), width=200)
    table = memory.run(arguments, console)
    content = json.loads(Path(files["json"]).read_text())
    cells = content["cells"]
    decoders = ["transformers, dynamic cache", "transformers, static cache", "ours, plain", "mtp"]
    expected = [(1, 2), (2, 2)]
    assert [(cell["batch"], cell["new"], cell["contender"]) for cell in cells] == [
        (*shape, decoder) for shape in expected for decoder in decoders
    ]
    for cell in [*cells, *content["long_prompts"]]:
        assert cell["peak"] == sum(cell[part] for part in ("target", "heads", "cache", "state", "rest"))
        assert min(cell["target"], cell["cache"], cell["rest"]) > 0
        assert (cell["heads"] > 0) == (cell["contender"] not in decoders[:3])
    ours = {(cell["batch"], cell["new"]): cell["cache"] for cell in cells if cell["contender"] == "mtp"}
    assert ours[2, 2] == pytest.approx(2 * ours[1, 2], rel=1e-3)
    assert Path(files["markdown"]).read_text() == table
    assert "| twenty calls | 1.00 | 2.00 | 3.00 | 4.00 |" in table
    assert "torch.profiler" in table
    assert "mtp" in console.file.getvalue()  # type: ignore[attr-defined]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["memory.json", "memory.markdown"]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got --prompt \[0\]: give at least 1"):
        MemoryArguments(prompt=[0])
