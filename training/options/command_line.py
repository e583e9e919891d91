"""How a YAML file and the command line become the options of `arguments.py`, and how options become YAML again.

`parse_arguments` reads `--config FILE.yaml` and then the command line, whose values win. A key that no dataclass knows
is an error that names the nearest one. `none` unsets an option that may have no value.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import yaml
from transformers import TrainingArguments

from training.data.options import DataArguments
from training.features.options import FeatureArguments
from training.features.target_options import ModelArguments, PlacementArguments
from training.options.arguments import HeadsTrainingArguments
from training.options.program_parser import ProgramParser
from training.options.run_arguments import RunArguments
from training.run.joint import JointArguments
from training.synthesis.on_policy import OnPolicyArguments


class _StockArguments(TrainingArguments):
    """transformers' defaults, to compare with. It sets up no device, which would reset accelerate's state for all."""

    _n_gpu = 0

    @property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")


# The first three are always there; a part of training with options of its own adds its dataclass behind them.
ARGUMENT_CLASSES: tuple[Any, ...] = (
    ModelArguments,
    DataArguments,
    HeadsTrainingArguments,
    JointArguments,
    RunArguments,
    PlacementArguments,
    FeatureArguments,
    OnPolicyArguments,
)


class _Parser(ProgramParser):
    """Reads `none` as no value."""

    def __init__(self, classes: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(classes, **kwargs)
        optional = optional_keys(classes)
        for action in self._actions:
            if action.type is not None:
                action.type = _reading_none(action.type, action.dest, is_optional=action.dest in optional)

    def _check_value(self, action: Action, value: Any) -> None:
        if value is not None:
            super()._check_value(action, value)


def optional_keys(classes: Sequence[Any]) -> set[str]:
    """The options that may have no value."""
    hints = {name: hint for kind in classes for name, hint in get_type_hints(kind).items()}
    return {name for name, hint in hints.items() if type(None) in get_args(hint)}


def _reading_none(read: Any, key: str, *, is_optional: bool) -> Callable[[str], Any]:
    """`read`, with None for the words `none` and `null` where that is a value; to other options a text may say so."""

    @functools.wraps(read)
    def read_word(word: str) -> Any:
        if word.lower() not in ("none", "null"):
            return read(word)
        if is_optional:
            return None
        try:
            return read(word)
        except (ValueError, ArgumentTypeError):
            raise ArgumentTypeError(
                f"got {key} {word}: it always has a value; leave it out for the default, {default_of(key)}"
            ) from None

    return read_word


def parse_arguments(
    argv: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    *,
    not_from_file: Collection[str] = (),
    doc: str = "",
    groups: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Reads `[--config FILE.yaml] [--any_key value ...]`; what the command line says wins over the file.

    Paths in the file are relative to the current folder, like those on the command line; but `base: OTHER.yaml`, a file
    whose settings this one changes, stands beside it.

    Args:
        argv: the arguments without the program's name; None = `sys.argv[1:]`.
        classes: of another program, which reads a training run's file for what both need; None = `ARGUMENT_CLASSES`.
        not_from_file: options of `classes` that mean something else in such a file.
        doc, groups: what `--help` shows (see `ProgramParser`).

    Returns:
        one object for each of the classes, as `training.run.run.run_training` takes them.

    Raises:
        ValueError: unknown key (naming the nearest known one), missing or malformed value, unreadable file.
        SystemExit: after `--help`.
    """
    classes = ARGUMENT_CLASSES if classes is None else classes
    keys = _known_keys(classes)
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", metavar="FILE.yaml", help="YAML file with any of the options below.")
    parser = _Parser(classes, doc=doc, groups=groups, parents=[first])
    # Taken out of the parser's hands: argparse would keep the last `--head_overrides` only, and none of the file's.
    first.add_argument("--head_overrides", nargs="+", action="extend", default=[])
    known, rest = first.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    for word in rest:
        flag = word.partition("=")[0].replace("-", "_")
        if flag.startswith("__") and flag not in ("__help", "__help_all"):
            _refuse_unknown_key(flag.removeprefix("__").removeprefix("no_"), keys, "on the command line")

    settings = _read_config(Path(known.config), keys) if known.config else {}
    settings = {key: value for key, value in settings.items() if key in keys and key not in not_from_file}
    overrides = [*_key_values(settings.pop("head_overrides", None)), *known.head_overrides]
    if overrides:
        rest = [*rest, "--head_overrides", *overrides]
    namespace, unexpected = parser.parse_known_args([*_command_line(settings, optional_keys(classes)), *rest])
    if unexpected:
        if unexpected[0].startswith("--"):
            parser.error(f"got {unexpected[0]}: options are spelled with underscores")
        raise ValueError(f"unexpected value {unexpected[0]!r}: options are --key value (all options: --help_all)")
    values = vars(namespace)
    return tuple(
        kind(**{key.name: values[key.name] for key in dataclasses.fields(kind) if key.init}) for kind in classes
    )


def resolve_arguments(
    model: ModelArguments, data: DataArguments, training: HeadsTrainingArguments, *more: Any
) -> dict[str, Any]:
    """Returns the options as one flat mapping that, written as YAML, `--config` reads back to the same run.

    Of `TrainingArguments` it holds the fields named in this file and those that differ from transformers' defaults;
    secrets are left out, and so are what the machine decided and how an interrupted run was taken up again.
    """
    settings = {**dataclasses.asdict(model), "head_overrides": model.parse_head_overrides(), **dataclasses.asdict(data)}
    for arguments in more:
        settings |= dataclasses.asdict(arguments)
    stock = _StockArguments(output_dir=training.output_dir).to_dict()
    ours = set(HeadsTrainingArguments.__annotations__)
    left_out = {key for key in _known_keys() if key.endswith("_token")}
    left_out |= {"dataloader_pin_memory", "ddp_backend", "local_rank", "resume_from_checkpoint"}
    left_out |= {"dry_run", "dry_run_json"}
    for key, value in training.to_dict().items():
        is_ours_or_changed = key in ours or value != stock.get(key)
        if is_ours_or_changed and key in _known_keys() and key not in left_out:
            settings[key] = value
    settings["report_to"] = settings["report_to"] or ["none"]
    metric = training.metric_for_best_model
    if metric is not None and settings.get("greater_is_better") == (not metric.endswith("loss")):
        settings.pop("greater_is_better", None)  # which follows from it, and would not from another one
    unset = {key for key in optional_keys(ARGUMENT_CLASSES) if default_of(key) is not None}  # where null says something
    return {
        key: value
        for key, value in settings.items()
        if key not in left_out and (value not in (None, [], {}) or (value is None and key in unset))
    }


def _known_keys(classes: Sequence[Any] = ARGUMENT_CLASSES) -> dict[str, Any]:
    """Name -> field of every option."""
    return {key.name: key for kind in classes for key in dataclasses.fields(kind) if key.init}


def default_of(key: str) -> Any:
    """The value of an option that nobody gave; None for a name that is no option."""
    option = _known_keys().get(key)
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
    """A file's settings, over those of the file beside it that its `base` names; a key replaces the base's whole value.

    Args:
        keys: those that may be there besides training's own.
        readers: files whose base, or base's base, this one is.
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
        _refuse_unknown_key(str(key), {**_known_keys(), **keys}, f"in {path}")
    if base is None:
        return settings
    return {**_read_config(path.parent / str(base), keys, (*readers, path.resolve())), **settings}


def _key_values(mapping: Any) -> list[str]:
    """{"num_heads": 4} -> ["num_heads=4"]. YAML reads 1e-3 as a string, so strings pass as they are."""
    if mapping is None:
        return []
    if not isinstance(mapping, dict):
        raise ValueError(f"got head_overrides {mapping!r}: in YAML it is a mapping, for example {{num_heads: 4}}")
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in mapping.items()]


def _command_line(settings: dict[str, Any], optional: Collection[str]) -> Iterator[str]:
    """The arguments that say the same as a YAML file, so that both go through the same checks and conversions."""
    for key, value in settings.items():
        if value is None:
            if key not in optional:
                raise ValueError(f"got {key}: null, which is no value of it; leave the line out for the default")
            yield f"--{key}=none"
            continue
        if isinstance(value, list):
            if value:
                yield from (f"--{key}", *map(str, value))
        elif isinstance(value, dict):
            yield f"--{key}={json.dumps(value)}"
        else:
            yield f"--{key}={value}"
