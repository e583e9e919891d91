"""Chooses what the user leaves open: kind of heads, optimizer, batch, dtype, from the target's shape and the device.

`draftsmith train --target X --dataset D` needs no further option. Every choice is an option like any other: on the
command line or in a file it wins over the one here, and `training_config.yaml` has the values of the run.

Legend: D hidden size, I intermediate size, V vocabulary of the target.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.hf_argparser import string_to_bool

from draftsmith.heads import DraftHeads
from draftsmith.heads.draft_vocabulary import default_draft_vocabulary
from draftsmith.heads.formats.native_mtp import find_modules
from draftsmith.heads.formats.registry import serves, settings_for
from draftsmith.heads.registration import find_kind
from draftsmith.inference.targets.files import read_config
from draftsmith.inference.targets.model_config import find_auto_class, find_length_limit, has_fast_bfloat16
from draftsmith.training.data.conversations import Place
from draftsmith.training.data.set_statistics import describe_size
from draftsmith.training.distributed.launch import count_launched, is_requested

logger = logging.getLogger(__name__)

# The most published results, and every engine serves them (docs/choosing-heads.md).
KIND = "eagle3"
# Without --for, chosen heads can be exported to all of these.
SERVED = ("vllm", "sglang")
# Rows of the recipes for large targets: SpecForge 4,096, EAGLE's authors 2,048, speculators 8,192.
LONGEST_ROW = 4096
# AdamW's rate times D, for a kind whose usual rate is 1e-4. It gives 2e-3 for chat-13m, and 1.2e-4 to 6e-5 for widths
# of 4,096 to 8,192, where SpecForge and speculators have 1e-4 and EAGLE's authors 5e-5.
RATE_TIMES_WIDTH, HIGHEST_RATE = 0.5, 2e-3
# speculators' Muon rate amounts to 0.013 at a width of 4,096. Narrow targets learn more from few steps at 0.04.
MUON, MUON_NARROW, NARROW = 0.02, 0.04, 1024
# FastMTP fine-tunes a target's own module with AdamW at this rate (arXiv 2509.18362, its sft.sh).
NATIVE_RATE = 5e-5
# Tokens of an optimizer step per unit of width, and the most: SpecForge's eight rows of 4,096.
TOKENS_PER_WIDTH, MOST_TOKENS = 16, 32_768
# Repeating pays for small sets: speculators trains 5 epochs on 5,000 conversations.
SMALL_SET, EPOCHS_SMALL, EPOCHS = 400e6, 5, 2
_GZIP = 3  # text is about this many times as large as its gzip
# Heads are float32 with AdamW's two moments and a gradient; Muon keeps one moment less.
BYTES_TRAINED = 16
# Of the memory, for arithmetic that is not exact.
USED_SHARE = 0.8

MAKE_DATA = (
    "give --dataset: conversations whose replies this target wrote, because heads learn to predict this target. From "
    "your own prompts: `draftsmith data --target {target} --prompts YOURS.jsonl.gz --output outputs/replies.jsonl.gz`. "
    "Without prompts, the target writes both sides: `draftsmith data --target {target} --mode self "
    "--num_conversations 10000 --output outputs/replies.jsonl.gz`"
)


@dataclass(frozen=True)
class Choice:
    """An option, its value in the words of the command line, and the reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What was chosen, for which target and machine."""

    title: str
    options: list[Choice]

    @property
    def overrides(self) -> list[str]:
        """Those of the heads' configuration, as `head_overrides` has them."""
        return [one.value for one in self.options if one.name == "head_overrides"]

    @property
    def words(self) -> list[str]:
        """The others as words of a command line."""
        return [f"--{one.name}={one.value}" for one in self.options if one.name != "head_overrides"]

    def tell(self) -> None:
        """Logs them with their reasons."""
        logger.info("%s", self.title)
        for one in self.options:
            logger.info("  --%s %s: %s", one.name, one.value, one.reason)


@dataclass(frozen=True)
class Machine:
    """What this process trains on. memory: bytes for each process. has_bf16: whether bfloat16 is fast."""

    name: str
    memory: int
    num_processes: int
    has_bf16: bool

    @classmethod
    def find(cls, given: Mapping[str, Sequence[str]]) -> Machine:
        num_processes = count_launched()
        wants_cpu = _is_on(given, "use_cpu")
        if torch.cuda.is_available() and not wants_cpu:
            device = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
            return cls(device.name, device.total_memory, num_processes, torch.cuda.is_bf16_supported(False))
        import psutil  # type: ignore[import-untyped, unused-ignore]

        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
        return cls("the CPU", psutil.virtual_memory().total // on_this_machine, num_processes, has_fast_bfloat16())


@dataclass(frozen=True)
class Shape:
    """The target without its weights.

    Attributes:
        config: of the language model.
        parameters: of the whole target; of one decoder layer.
        is_quantized: its files hold quantized weights.
    """

    config: Any
    parameters: int
    layer_parameters: int
    is_quantized: bool

    @classmethod
    def read(cls, name: str, *, trust_remote_code: bool) -> Shape:
        whole = read_config(name, trust_remote_code=trust_remote_code)
        config = whole.get_text_config()
        with torch.device("meta"):
            model: Any = find_auto_class(whole).from_config(whole, trust_remote_code=trust_remote_code)
        layers = max((part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=_count)
        quantized = getattr(whole, "quantization_config", None) is not None
        return cls(config, _count(model), _count(layers[-1]), quantized)

    @property
    def layers_size(self) -> int:
        return self.layer_parameters * int(self.config.num_hidden_layers)

    def make_heads(self, kind: str, overrides: Mapping[str, Any]) -> Any:
        """Heads of this kind for the target, without storage."""
        config = self.config
        target: Any = SimpleNamespace(
            model=SimpleNamespace(config=config),
            text_config=config,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            layers_size=self.layers_size,
        )
        with torch.device("meta"):
            return find_kind(kind)(find_kind(kind).config_class.from_target(target, **overrides))


def _is_on(given: Mapping[str, Sequence[str]], name: str) -> bool:
    """Whether a switch is given, without a value or with one that the parser reads as true."""
    words = given.get(name, ["false"])
    try:
        return not words or string_to_bool(words[0])
    except ArgumentTypeError:  # `none`, or what the parser refuses
        return False


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def wants_choices(given: Mapping[str, Sequence[str]], *, has_file: bool) -> bool:
    """Whether to choose: as `choose` says, and without it for new heads of a target. Never without a target's name.

    Args:
        has_file: a file gives options. With one that names the kind, nothing is chosen.
    """
    if not given.get("target"):
        return False
    if "choose" in given and given["choose"] != ["none"]:
        return _is_on(given, "choose")
    return "init_heads" not in given and not (has_file and "head_type" in given)


def choose_options(given: Mapping[str, Sequence[str]], overrides: Mapping[str, Any]) -> Choices:
    """The options that the user leaves open.

    Args:
        given: the options that are given, with their words. They are checked, unless there is no data set.
        overrides: the head_overrides that are given.

    Raises:
        ValueError: there is no data set, and how to make one; or there is none of that name.
    """
    name = given["target"][0]
    if "dataset" not in given:
        raise ValueError(MAKE_DATA.format(target=name))
    given = {key: words for key, words in given.items() if (key, [*words]) != ("served_by", ["none"])}
    machine = Machine.find(given)
    shape = Shape.read(name, trust_remote_code=_is_on(given, "trust_remote_code"))
    chosen = [one for one in _choose(given, overrides, shape, machine) if one.name not in given]
    for dataset in given["dataset"]:
        Place.find(dataset)
    title = (
        f"choices for {name} ({shape.parameters / 1e6:,.0f} million parameters) on {machine.name} with "
        f"{describe_size(machine.memory)}, {machine.num_processes} process{'es' * (machine.num_processes > 1)}; each "
        "may be given as an option"
    )
    return Choices(title, chosen)


def _choose(
    given: Mapping[str, Sequence[str]], overrides: Mapping[str, Any], shape: Shape, machine: Machine
) -> Iterator[Choice]:
    kind, is_native = KIND, given.get("init_heads") == given["target"]
    if "head_type" in given:
        (kind,) = given["head_type"]
    elif "init_heads" not in given:
        start = _choose_heads(given["target"][0], shape, given.get("served_by", SERVED))
        is_native = start.name == "init_heads"
        yield start
    is_fresh = not is_native and "init_heads" not in given
    if is_fresh and (vocabulary := _choose_vocabulary(kind, overrides, shape)) is not None:
        yield vocabulary
    if is_fresh:
        yield from _choose_settings(given, kind, overrides, shape)
    is_split = any(name in given or is_requested(name) for name in ("fsdp", "deepspeed"))
    has_muon = hasattr(torch.optim, "Muon") and not is_split
    if "lora_r" not in given:  # adapters have rates of their own
        yield from _choose_optimizer(
            kind, shape.config.hidden_size, is_fresh=is_fresh, is_native=is_native, has_muon=has_muon
        )
    if not {"bf16", "fp16"} & given.keys():
        reason = "computes fast in bfloat16; the heads' weights stay float32" if machine.has_bf16 else "lacks bfloat16"
        yield Choice("bf16", str(machine.has_bf16).lower(), f"{machine.name} {reason}")
    if not shape.is_quantized:
        dtype = "bfloat16" if machine.has_bf16 else "float32"
        yield Choice("target_dtype", dtype, f"what {machine.name} computes fast in")
    # What the heads keep does not depend on where they start; a native module is a decoder layer of the target.
    heads = shape.make_heads(kind, overrides)
    parameters = shape.layer_parameters + 2 * shape.config.hidden_size**2 if is_native else _count(heads)
    yield from _choose_rows(given, shape, machine, parameters, heads.num_unrolled_steps)
    if "max_steps" not in given:
        yield _choose_epochs(given["dataset"])


def _choose_heads(name: str, shape: Shape, places: Sequence[str]) -> Choice:
    """The target's own MTP modules if it has some that can be read and served, else new heads."""
    found = find_modules(name, shape.config.num_hidden_layers)
    if found.count and not found.is_quantized and all(serves(place, found.kind) for place in places):
        return Choice(
            "init_heads", name, f"the target's checkpoint has {found.count} MTP module(s), trained on far more tokens"
        )
    reason = f"the most published results; served by {' and '.join(places)} (--for chooses others)"
    if found.is_quantized:
        reason += "; the MTP modules in the target's checkpoint are quantized, so they are left out"
    return Choice("head_type", KIND, reason)


def _choose_vocabulary(kind: str, overrides: Mapping[str, Any], shape: Shape) -> Choice | None:
    config_class: type = find_kind(kind).config_class
    takes = any("draft_vocab_size" in inspect.signature(one.__init__).parameters for one in config_class.__mro__[:-1])  # type: ignore[misc]
    size, width = shape.config.vocab_size, shape.config.hidden_size
    if not takes or "draft_vocab_size" in overrides:
        return None
    if (fewer := default_draft_vocabulary(size, width, shape.layers_size)) is None:
        return None
    share = size * width / (size * width + shape.layers_size)
    reason = (
        f"the most frequent in the data; an LM head of all {size:,} is {share:.0%} of the target, at every draft level"
    )
    return Choice("head_overrides", f"draft_vocab_size={fewer}", reason)


def _choose_settings(
    given: Mapping[str, Sequence[str]], kind: str, overrides: Mapping[str, Any], shape: Shape
) -> Iterator[Choice]:
    """What new heads need so that they can be exported to where they will decode."""
    places = given.get("served_by", () if "head_type" in given else SERVED)
    config = shape.make_heads(kind, overrides).config
    wanted = {name: value for place in places for name, value in settings_for(place, kind).items()}
    for name, value in wanted.items():
        if name not in overrides and getattr(config, name) != value:
            words = value if isinstance(value, str) else json.dumps(value)
            yield Choice("head_overrides", f"{name}={words}", f"for {' and '.join(places)}")


def _choose_optimizer(kind: str, width: int, *, is_fresh: bool, is_native: bool, has_muon: bool) -> Iterator[Choice]:
    if is_native:
        yield Choice("learning_rate", f"{NATIVE_RATE:g}", "FastMTP's rate for a target's own module")
        return
    numerator = RATE_TIMES_WIDTH * find_kind(kind).default_learning_rate / DraftHeads.default_learning_rate
    rate = min(HIGHEST_RATE, float(f"{numerator / width:.1e}"))
    reason = f"{numerator:g} / width {width:,}, at most {HIGHEST_RATE:g}"
    yield Choice("learning_rate", f"{rate:g}", f"{reason}, for LM head and norms" if has_muon else reason)
    if has_muon:
        muon = MUON_NARROW if is_fresh and width < NARROW else MUON
        reason = "Muon for the hidden matrices learns more per token than AdamW"
        yield Choice("muon_learning_rate", f"{muon:g}", reason)


def _choose_rows(
    given: Mapping[str, Sequence[str]], shape: Shape, machine: Machine, heads_parameters: int, num_steps: int
) -> Iterator[Choice]:
    """Length and number of rows: as many as fit beside the target, up to the tokens of an optimizer step."""
    config, size = shape.config, 2 if machine.has_bf16 else 4
    limit = find_length_limit(config).max_length or LONGEST_ROW
    length = min(LONGEST_ROW, limit)
    if "max_length" in given:
        length = max(1, min(int(given["max_length"][0]), limit))  # what is below is refused with the other options
    else:
        reason = "the target's limit" if length < LONGEST_ROW else "as in published recipes"
        yield Choice("max_length", str(length), f"tokens of a row, {reason}")
    if "train_sampling_strategy" not in given:
        yield Choice("packing", "true", "several conversations fill a row, so no padding is computed")
    weights = shape.parameters * size
    if "features_endpoint" in given:
        weights = 2 * config.vocab_size * config.hidden_size * size
    elif given.get("shard_target", ["none"]) != ["none"]:
        weights //= machine.num_processes
    elif "target_device_map" not in given and weights > USED_SHARE * machine.memory:
        if machine.num_processes > 1:
            yield Choice("shard_target", "fsdp2", f"{describe_size(weights)} of weights do not fit on one device")
            weights //= machine.num_processes
        else:
            logger.warning(
                "the target's weights take %s, and this process has %s: start one process for each GPU "
                "(accelerate launch), or give --target_device_map or --features_endpoint (docs/scaling.md)",
                *(describe_size(weights), describe_size(machine.memory)),
            )
    intermediate = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    # Autograd keeps about 12 vectors of D and 3 of I for each token and depth: 1.32 MB for an 8B target and 7 depths.
    per_token = size * (num_steps * (12 * config.hidden_size + 3 * intermediate) + 4 * config.hidden_size)
    free = USED_SHARE * machine.memory - weights - BYTES_TRAINED * heads_parameters
    fitting = int(max(0, free) / (per_token * length))
    step = min(MOST_TOKENS, TOKENS_PER_WIDTH * config.hidden_size)
    wanted = max(1, math.ceil(step / (length * machine.num_processes)))
    rows = math.ceil(wanted / math.ceil(wanted / max(1, fitting)))
    if "per_device_train_batch_size" in given:
        rows = max(1, int(given["per_device_train_batch_size"][0]))
    else:
        reason = f"{fitting:,} rows fit beside {describe_size(weights)} of target (computed), {wanted} make a step"
        if not fitting:
            reason = f"no row fits beside {describe_size(weights)} of target (computed): use more GPUs or shorter rows"
        yield Choice("per_device_train_batch_size", str(rows), reason)
    total = rows * length * machine.num_processes * (accumulated := max(1, math.ceil(wanted / rows)))
    yield Choice("gradient_accumulation_steps", str(accumulated), f"{total:,} tokens for each optimizer step")


def _choose_epochs(datasets: Sequence[str]) -> Choice:
    places = [Path(name).expanduser() for name in datasets]
    files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size * (_GZIP if file.suffix == ".gz" else 1) for file in files)
    if all(place.exists() for place in places) and size < SMALL_SET:
        return Choice("num_train_epochs", str(EPOCHS_SMALL), f"{describe_size(size)} of text is little")
    return Choice("num_train_epochs", str(EPOCHS), f"the data is a hub id, or has {SMALL_SET / 1e6:.0f} MB or more")
