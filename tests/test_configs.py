"""Every file in configs/ loads, by whoever reads it in earnest."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from draftsmith.heads import HEAD_TYPES
from draftsmith.heads.config import is_hub_id
from draftsmith.inference import StaticTree
from draftsmith.training.options.command_line import parse_arguments
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"
TRAIN = sorted((CONFIGS / "train").rglob("*.yaml"))
BASES = {path for path in TRAIN if path.name.startswith("shared-")}  # without a target
ACCELERATE = sorted((CONFIGS / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((CONFIGS / "deepspeed").glob("*.json"))
TREES = sorted((CONFIGS / "trees").glob("*.yaml"))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", [path for path in TRAIN if path not in BASES], ids=name)
def test_training_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    model, data, training, *_ = parse_arguments(["--config", str(path), "--use_cpu", "true"])
    if model.head_type is None:
        # The MTP modules in the target's own checkpoint, or heads of this repository.
        assert model.init_heads == model.target or Path(model.init_heads, "config.json").exists()
    else:
        kind = HEAD_TYPES[model.head_type].config_class
        config = kind(**model.parse_head_overrides())
        assert config.head_type == model.head_type
    assert Path(training.output_dir).parts[0] == "outputs", "what runs write is ignored by git under outputs/"
    assert Path(training.output_dir).name == path.stem
    for used in (model.target, *data.dataset, *data.eval_dataset, *filter(None, [data.eval_prompts])):
        is_made_by_the_user = Path(used).parts[0] == "outputs"
        is_of_the_hub = path.parent.name == "targets" and is_hub_id(used)
        assert is_made_by_the_user or is_of_the_hub or Path(used).exists(), f"{path.name} names {used}, which is absent"


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_accelerate_config(path: Path) -> None:
    config = load_config_from_file(str(path))
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.distributed_type == settings["distributed_type"]
    if file := settings.get("deepspeed_config", {}).get("deepspeed_config_file"):
        assert REPOSITORY / file in DEEPSPEED
        assert not settings["use_cpu"], "with use_cpu accelerate silently falls back to plain data parallel"
    launcher = launch_command_parser().parse_args(["--config_file", str(path), "training/train_heads.py"])
    launcher, *_ = _validate_launch_command(launcher)
    assert launcher.num_processes == settings["num_processes"]
    assert launcher.num_machines == settings["num_machines"]
    assert launcher.use_fsdp == (settings["distributed_type"] == "FSDP")
    assert launcher.use_deepspeed == (settings["distributed_type"] == "DEEPSPEED")
    for key, value in settings.get("fsdp_config", {}).items():
        assert getattr(launcher, key) == value
    assert settings["num_processes"] == 1 or settings["distributed_type"] != "MULTI_CPU", "starts only one process"


@pytest.mark.parametrize("path", TREES, ids=name)
def test_tree(path: Path) -> None:
    paths = [list(ranks) for ranks in StaticTree.from_file(path).paths[1:]]
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == {"paths": paths}, "write nodes by depth, then by rank"
