"""A training run's YAML file, which is read as words of a command line.

`parse_arguments` reads `--config FILE.yaml` and then the command line, whose values win. `resolve_arguments` writes the
options of a run, as YAML reads them back.
"""

import dataclasses
import difflib
import json
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainingArguments

from draftsmith.training.features.target_options import parse_overrides
from draftsmith.training.options.choices import choose_options, wants_choices
from draftsmith.training.options.program_parser import ProgramParser, optional_keys, spell
from draftsmith.training.options.run_options import ARGUMENT_CLASSES, RunOptions, check_options
from draftsmith.training.options.training_options import HeadsTrainingArguments


def parse_arguments(
    argv: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    *,
    not_from_file: Collection[str] = (),
    doc: str = "",
    groups: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Reads `[--config FILE.yaml] [--any_option value ...]` into one object for each class; the command line wins.

    Paths in the file are relative to the current folder, as on the command line. Only the path in `base: OTHER.yaml`,
    a file whose settings this one changes, is relative to the file itself.

    Args:
        argv: the arguments without the program's name; None = `sys.argv[1:]`.
        classes: dataclasses of another program, which reads a training run's file too; None = `ARGUMENT_CLASSES`.
        not_from_file: options of `classes` that have another meaning in such a file.
        doc, groups: the texts of `--help` (see `ProgramParser`).

    Raises:
        ValueError: unknown key (naming the nearest known one), missing or malformed value, unreadable file.
        SystemExit: after `--help` and `--help_all`.
    """
    classes = ARGUMENT_CLASSES if classes is None else classes
    keys = known_keys(classes)
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE.yaml", help="YAML file with any of the options below.")
    parser = ProgramParser(classes, doc=doc, groups=groups, parents=[first])
    # Read here: argparse would keep only the last `--head_overrides`, and none of the file's.
    first.add_argument("--head_overrides", nargs="+", action="extend", default=[])
    known, rest = first.parse_known_args([spell(word) for word in (sys.argv[1:] if argv is None else argv)])
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in ("--help", "--help_all"):
            _refuse_unknown_key(flag.removeprefix("--").removeprefix("no_"), keys, "on the command line")

    settings = _read_config(Path(known.config), keys) if known.config else {}
    settings = {key: value for key, value in settings.items() if key in keys and key not in not_from_file}
    _settle_heads(settings, rest)
    overrides = [*_key_values(settings.pop("head_overrides", None)), *known.head_overrides]
    words = [*_command_line(settings, optional_keys(classes)), *rest]
    given = _given_options(words, keys)
    choices = None
    if classes is ARGUMENT_CLASSES and wants_choices(given, has_file=known.config is not None):
        # Without a data set, `choose_options` says how to make one.
        if "dataset" in given or {"--help", "--help_all"} & {*rest}:
            parser.refuse(parser.parse_known_args(words)[1])  # choices are made from the words themselves
        choices = choose_options(given, parse_overrides(overrides))
        overrides = [*choices.overrides, *overrides]
        words += ["--choose=true", *choices.words]
    if overrides:
        words += ["--head_overrides", *overrides]
    *found, _, unexpected = parser.parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )  # the last one but one is the namespace with --config
    parser.refuse(unexpected)
    if choices is not None:
        check_options(RunOptions(*found))
        choices.tell()
    return tuple(found)


def known_keys(classes: Sequence[Any] = ARGUMENT_CLASSES) -> dict[str, Any]:
    """Name -> field of every option."""
    return {key.name: key for kind in classes for key in dataclasses.fields(kind) if key.init}


def default_of(key: str) -> Any:
    """The value of an option that is not given; None for a name that is no option."""
    option = known_keys().get(key)
    if option is None:
        return None
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return None if option.default is dataclasses.MISSING else option.default


def _refuse_unknown_key(key: str, known: Mapping[str, Any], where: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown key {key!r} {where}; did you mean {near!r}? (all options: --help_all)")


def _read_config(path: Path, keys: Mapping[str, Any], readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns a file's settings, added to the settings of its `base` file; a key replaces the base's whole value.

    Args:
        keys: the keys that are allowed besides training's own.
        readers: the files whose base, or base's base, this one is.
    """
    if path.resolve() in readers:
        raise ValueError(f"{path} is its own base, by way of {len(readers)} files: take `base` out of one of them")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"got --config {path}: cannot read it ({error.strerror}); configs/train has examples"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds {type(settings).__name__}: write one `key: value` per line")
    base = settings.pop("base", None)
    for key in settings:
        _refuse_unknown_key(str(key), {**known_keys(), **keys}, f"in {path}")
    if base is None:
        return settings
    return {**_read_config(path.parent / str(base), keys, (*readers, path.resolve())), **settings}


def _given_options(words: Sequence[str], keys: Collection[str]) -> dict[str, list[str]]:
    """The words of every option of a command line, without `--init_heads none`: what has no value is not given."""
    given: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            is_negated = flag not in keys and flag.removeprefix("no_") in keys
            values = [value] if equals else ["false"] if is_negated else []
            given[flag.removeprefix("no_") if is_negated else flag] = values
        else:
            values.append(word)
    return {key: said for key, said in given.items() if key not in ("head_type", "init_heads") or said != ["none"]}


def _settle_heads(settings: dict[str, Any], words: Sequence[str]) -> None:
    """`--init_heads` and `--head_type` exclude each other: one on the command line replaces the other in the file."""
    given = {word.partition("=")[0] for word in words}
    if "--init_heads" in given and "--head_type" not in given:
        settings.pop("head_type", None)
        settings.pop("head_overrides", None)
    elif "--head_type" in given and "--init_heads" not in given:
        settings.pop("init_heads", None)


def _key_values(mapping: Any) -> list[str]:
    """{"num_heads": 4} -> ["num_heads=4"]. YAML reads 1e-3 as a string, so strings pass unchanged."""
    if mapping is None:
        return []
    if not isinstance(mapping, dict):
        raise ValueError(f"got head_overrides {mapping!r}: in YAML it is a mapping, for example {{num_heads: 4}}")
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in mapping.items()]


def _command_line(settings: Mapping[str, Any], optional: Collection[str]) -> Iterator[str]:
    """A YAML file's settings as words of a command line, so that both are checked and converted in one way."""
    for key, value in settings.items():
        if value is None:
            if key not in optional:
                raise ValueError(f"got {key}: null, but it always has a value; leave the line out for the default")
            yield f"--{key}=none"
        elif isinstance(value, list):
            if value:
                yield from (f"--{key}", *map(str, value))
        elif isinstance(value, dict):
            yield f"--{key}={json.dumps(value)}"
        else:
            yield f"--{key}={value}"


# Decided by the machine, or about how the run was started: another start of the same run may differ.
_LEFT_OUT = {"choose", "dataloader_pin_memory", "ddp_backend", "local_rank", "resume_from_checkpoint"}


class _StockArguments(TrainingArguments):
    """transformers' defaults, to compare with. Sets up no device, which would reset accelerate's state."""

    _n_gpu = 0

    @property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")


def resolve_arguments(options: RunOptions) -> dict[str, Any]:
    """Returns the options as one flat mapping that, written as YAML, `--config` reads back to the same run.

    Of `TrainingArguments` it holds our own fields, and the fields that differ from transformers' defaults; no secrets.
    """
    settings: dict[str, Any] = {}
    for name, part in vars(options).items():
        if name != "training":
            settings |= dataclasses.asdict(part)
    settings |= {"head_overrides": options.model.parse_head_overrides(), **_resolve_training(options.training)}
    left_out = _LEFT_OUT | {key for key in known_keys() if key.endswith("_token")}
    # Where None differs from the default it says something, and is written as null.
    unset = {key for key in optional_keys(ARGUMENT_CLASSES) if default_of(key) is not None}
    return {
        key: value
        for key, value in settings.items()
        if key not in left_out and (value not in (None, [], {}) or (value is None and key in unset))
    }


def _resolve_training(training: HeadsTrainingArguments) -> dict[str, Any]:
    stock = _StockArguments(output_dir=training.output_dir).to_dict()
    ours = set(HeadsTrainingArguments.__annotations__)
    known = known_keys()
    settings = {
        key: value
        for key, value in training.to_dict().items()
        if key in known and (key in ours or value != stock.get(key))
    }
    settings["report_to"] = settings["report_to"] or ["none"]
    metric = training.metric_for_best_model
    if metric is not None and settings.get("greater_is_better") == (not metric.endswith("loss")):
        settings.pop("greater_is_better", None)  # follows from this metric, and would be wrong for another one
    return settings
