"""Which checkpoint is resumed: complete ones only, whatever a kill or a full disk left behind."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.training.run.resume import find_checkpoint, find_damage
from tests.tiny_targets import tiny_target


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files Trainer writes into a checkpoint."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-9"
    heads = create_heads("medusa", tiny_target("llama"), num_heads=1)
    heads.save_pretrained(folder)
    torch.save(torch.optim.AdamW(heads.parameters()).state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 9}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 9}))
    return folder


@pytest.fixture
def output_dir(checkpoint: Path, tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        shutil.copytree(checkpoint, tmp_path / f"checkpoint-{step}")
    return tmp_path


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES = {
    "no trainer state": (remove("trainer_state.json"), "trainer_state.json is missing"),
    "no weights": (remove("model.safetensors"), "model.safetensors is missing"),
    "no optimizer": (remove("optimizer.pt"), "optimizer.pt is missing"),
}


@pytest.mark.parametrize(("damage", "found"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    output_dir: Path, damage: Callable[[Path], None], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(output_dir / "checkpoint-100")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(str(output_dir), True) == output_dir / "checkpoint-10"
    (message,) = caplog.messages
    assert "checkpoint-100 is skipped" in message
    assert found in message


def test_an_optimizer_may_be_kept_in_a_folder(output_dir: Path) -> None:
    """DeepSpeed's way."""
    newest = output_dir / "checkpoint-100"
    (newest / "optimizer.pt").unlink()
    (newest / "global_step100").mkdir()
    assert find_damage(newest) is None


def test_the_newest_is_the_one_of_the_highest_step(output_dir: Path) -> None:
    (output_dir / "checkpoint-notes").mkdir()
    assert find_checkpoint(str(output_dir), "True") == output_dir / "checkpoint-100"


def test_a_folder_that_is_asked_for(output_dir: Path, tmp_path: Path) -> None:
    older = output_dir / "checkpoint-9"
    assert find_checkpoint("elsewhere", str(older)) == older
    (older / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"cannot resume from .*checkpoint-9: trainer_state\.json is missing; give"):
        find_checkpoint("elsewhere", str(older))
    with pytest.raises(ValueError, match=r"cannot resume from .*nothing: config\.json is missing"):
        find_checkpoint("elsewhere", str(tmp_path / "nothing"))
