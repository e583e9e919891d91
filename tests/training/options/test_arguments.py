"""Options from YAML and from the command line: what wins, what is refused, and what a refusal says."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import TrainingArguments

from draftsmith.training.options.command_line import known_keys, parse_arguments, resolve_arguments
from draftsmith.training.options.run_options import _EXCLUDED, ARGUMENT_CLASSES, RunOptions

REQUIRED = ["--target", "t", "--head_type", "medusa", "--dataset", "d.jsonl", "--bf16", "false", "--use_cpu", "true"]
REQUIRED += ["--choose", "false"]


def write(folder: Path, settings: dict[str, Any] | str) -> str:
    path = folder / "config.yaml"
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def test_yaml_alone(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "target: t\nhead_type: medusa\nhead_overrides: {num_heads: 4, rope: [1, 2]}\ndataset: [a.jsonl, b.jsonl]\n"
        "learning_rate: 1e-3\nbf16: false\nuse_cpu: true\nmax_samples: null\nmax_steps: -1\n"
        "lr_scheduler_kwargs: {num_cycles: 0.5}\n",
    )
    model, data, training, *_ = parse_arguments(["--config", config])
    assert model.parse_head_overrides() == {"num_heads": 4, "rope": [1, 2]}
    assert data.dataset == ["a.jsonl", "b.jsonl"]
    assert data.max_samples is None
    assert training.learning_rate == 1e-3, "YAML 1.1 reads 1e-3 as a string"
    assert training.lr_scheduler_kwargs == {"num_cycles": 0.5}
    assert training.bf16 is False


def test_command_line_wins_over_yaml(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        {
            "target": "yaml",
            "head_type": "medusa",
            "head_overrides": {"num_heads": 4, "num_layers": 2},
            "dataset": ["a", "b"],
            "max_length": 100,
            "bf16": True,
            "use_cpu": True,
        },
    )
    flags = ["--target", "flag", "--dataset", "c", "--max_length", "7", "--no_bf16"]
    overrides = ["--head_overrides", "num_heads=5", "--head_overrides", "name=x", "other=1e-5"]
    model, data, training, *_ = parse_arguments([*flags, "--config", config, *overrides])
    assert (model.target, data.dataset, data.max_length, training.bf16) == ("flag", ["c"], 7, False)
    assert model.parse_head_overrides() == {"num_heads": 5, "num_layers": 2, "name": "x", "other": 1e-5}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_bfloat16_on_cpus_needs_no_further_option() -> None:
    _, _, training, *_ = parse_arguments([*REQUIRED[:6], "--bf16", "true", "--choose", "false"])
    assert training.bf16
    assert (training.device.type, training.use_cpu) == ("cpu", False)  # as it was given, for machines with accelerators


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*REQUIRED, "--learning_rat", "1"], "'learning_rat'.*'learning_rate'"),
        ([*REQUIRED, "stray"], "'stray'"),
        ([*REQUIRED, "--max_length", "many"], "max_length.*'many'"),
        ([*REQUIRED, "--validation_fraction", "1.5"], "validation_fraction 1.5"),
        ([*REQUIRED, "--loss_type", "hinge"], "loss_type is 'hinge'.*cross_entropy"),
        ([*REQUIRED, "--depth_weights", "d_pace", "--step_decay", "0.8"], "depth_weights 'd_pace'.*step_decay 0.8"),
        *(([*REQUIRED, f"--max_steps={value}"], f"got max_steps {value}: .*-1") for value in (0, -2)),
        ([*REQUIRED, "--num_train_epochs", "0"], "got num_train_epochs 0"),
        ([*REQUIRED, "--per_device_train_batch_size", "0"], "got per_device_train_batch_size 0"),
        ([*REQUIRED, "--save_steps=-3"], "got save_steps -3"),
        ([*REQUIRED, "--init_heads", "h"], "head_type.*init_heads"),
        (["--target", "t"], "--dataset.*draftsmith data --target t"),
        ([*REQUIRED, "--dataset_split", "a", "b", "c"], "3 of dataset_split.*1 of dataset"),
        ([*REQUIRED, "--columns", "prompt=a"], "columns.*messages=.*prompt=.*response="),
    ],
)
def test_bad_command_lines_say_what_to_do(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targt: x", "'targt'.*config.yaml.*'target'"),
        ("target: [", "config.yaml.*YAML"),
        ("head_overrides: [num_heads=4]", "head_overrides.*mapping"),
    ],
)
def test_bad_files_say_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments([*REQUIRED, "--config", write(tmp_path, text)])


def test_resolved_options_read_back_to_the_same_run(tmp_path: Path) -> None:
    # max_grad_norm 1.0 is transformers' default and not ours: it must survive all the same.
    flags = ["--max_grad_norm", "1.0", "--weight_decay", "0.1", "--head_overrides", "a=[1]", "--hub_token", "secret"]
    arguments = parse_arguments([*REQUIRED, *flags, "--report_to", "tensorboard", "--eval_strategy", "epoch"])
    settings = resolve_arguments(RunOptions(*arguments))
    assert settings["max_grad_norm"] == 1.0
    assert "secret" not in str(settings)
    assert "hub_token" not in settings
    again = parse_arguments(["--config", write(tmp_path, settings)])
    assert again[:2] == arguments[:2]
    one, other = (dataclasses.replace(a[2], hub_token=None).to_dict() for a in (arguments, again))
    assert one == other
    assert resolve_arguments(RunOptions(*again)) == settings


def test_heads_on_the_command_line_replace_those_in_the_file(tmp_path: Path) -> None:
    """Trained heads bring their configuration along, so the file's kind and overrides go together."""
    config = write(tmp_path, {"head_type": "medusa", "head_overrides": {"num_heads": 2}})
    words = ["--target", "t", "--dataset", "d", "--use_cpu", "true", "--config", config]
    model = parse_arguments([*words, "--init_heads", "h"])[0]
    assert (model.head_type, model.init_heads, model.head_overrides) == (None, "h", [])
    with pytest.raises(ValueError, match="leave head_overrides out"):
        parse_arguments([*words, "--init_heads", "h", "--head_overrides", "num_heads=3"])
    config = write(tmp_path, {"init_heads": "h"})
    model = parse_arguments([*words, "--head_type", "eagle"])[0]
    assert (model.head_type, model.init_heads) == ("eagle", None)


def test_none_unsets_an_option(tmp_path: Path) -> None:
    """On the command line and in a file over its base; the last word wins, and what was unset is written down so."""
    (tmp_path / "base.yaml").write_text("muon_learning_rate: 0.04\nmax_samples: 5\nsave_total_limit: 3\nmax_steps: 2\n")
    config = write(tmp_path, {"base": "base.yaml", "max_samples": None, "metric_for_best_model": None})
    words = [*REQUIRED, "--config", config]
    assert parse_arguments(words)[2].muon_learning_rate == 0.04
    flags = ["--muon_learning_rate", "none", "--save_total_limit=none", "--loss_type", "none"]
    arguments = parse_arguments([*words, *flags, "--eval_prompts", "none", "--optim_target_modules", "none"])
    _, data, training, *_ = arguments
    assert (data.max_samples, training.max_steps) == (None, 2)
    for key in ("muon_learning_rate", "save_total_limit", "metric_for_best_model", "loss_type", "optim_target_modules"):
        assert getattr(training, key) is None, key
    assert parse_arguments([*words, *flags, "--muon_learning_rate", "0.02"])[2].muon_learning_rate == 0.02
    again = parse_arguments(["--config", write(tmp_path, resolve_arguments(RunOptions(*arguments)))])
    assert again[2].to_dict() == training.to_dict()


def test_every_option_is_documented_once() -> None:
    stock = {key.name for key in dataclasses.fields(TrainingArguments)}
    names = [key.name for kind in ARGUMENT_CLASSES for key in dataclasses.fields(kind) if key.init]
    assert len(names) == len(set(names))
    for kind in ARGUMENT_CLASSES:
        for key in dataclasses.fields(kind):
            if key.init and (key.name not in stock or key.name in kind.__annotations__):
                assert len(key.metadata.get("help", "")) > 15, f"{kind.__name__}.{key.name} has no help text"


def test_a_file_changes_its_base(tmp_path: Path) -> None:
    """A key replaces the base's whole value, and the command line wins over both."""
    (tmp_path / "deep").mkdir()
    shared = {"target": "t", "dataset": ["d"], "head_type": "medusa", "head_overrides": {"num_heads": 2}, "seed": 3}
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump(shared))
    (tmp_path / "middle.yaml").write_text("base: shared.yaml\nseed: 4\nhead_overrides: {num_layers: 2}\n")
    (tmp_path / "deep" / "one.yaml").write_text("base: ../middle.yaml\ndataset: e\n")
    words = ["--config", str(tmp_path / "deep" / "one.yaml"), "--use_cpu", "true"]
    model, data, training, *_ = parse_arguments(words)
    assert (model.target, data.dataset, training.seed) == ("t", ["e"], 4)
    assert model.parse_head_overrides() == {"num_layers": 2}
    assert parse_arguments([*words, "--seed", "5"])[2].seed == 5


def test_hyphens_and_bare_flags(tmp_path: Path) -> None:
    config = write(tmp_path, {"head_type": "medusa", "head_overrides": {"num_heads": 2}})
    words = ["--target", "t", "--dataset", "d", "--use-cpu", "--no-bf16", "--config", config, "--max-length=7"]
    model, data, training, _, run, *_ = parse_arguments(
        [*words, "--init-heads", "a-b", "--packing", "--choose", "false"]
    )
    assert (model.init_heads, model.head_type, data.max_length, data.packing) == ("a-b", None, 7, True)
    assert (training.use_cpu, training.bf16, run.choose) == (True, False, False)


def test_contradictions_name_options_that_there_are() -> None:
    """A misspelt name would never match."""
    assert {name for one, other, _ in _EXCLUDED for name in (one, other)} <= known_keys().keys()
