"""The notebook `examples/quickstart.ipynb` from top to bottom, with a few tokens and training steps."""

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.test_smollm2 import PLACE, pytestmark  # noqa: F401  (skips where the model is absent)

nbformat = pytest.importorskip("nbformat", reason="nbformat reads the notebook (extra: dev)")
nbclient = pytest.importorskip("nbclient", reason="nbclient runs the notebook (extra: dev)")


STEPS = "2 --max_samples 200 --max_eval_samples 4 --num_eval_prompts 1 --eval_max_new_tokens 4"


@pytest.mark.slow
@pytest.mark.ci
def test_every_cell_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(REPOSITORY / "examples" / "quickstart.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "smollm2-135m").symlink_to(PLACE)
    sources = {"install": "import os, sys\npython = sys.executable", "parameters": f"NUM_TOKENS, STEPS = 8, {STEPS!r}"}
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            cell.source = sources[tag]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert printed.count("tokens per forward pass") == 6
