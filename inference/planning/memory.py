"""What planners have learned, in files: one for each machine, target, drafter and set of policies."""

import hashlib
import json
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from draftsmith.inference.cache_folder import cache_folder
from draftsmith.inference.targets.model_config import find_attention
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.policy import TreePolicy

FORMAT = 6  # raise it with every change that makes stored costs wrong
SAMPLED = 16  # numbers of each weight in the name of a file
# Seconds for which a file is used after it was written. Wrong costs are replaced sooner, by the steps that try them.
MOST_AGE = 7 * 24 * 3600.0


def memory_file(target: Target, drafter: Any, policies: Sequence[TreePolicy], runner: str, **options: Any) -> Path:
    """Where what was learned is kept.

    Args:
        runner: how steps run (eager, compiled, captured).
        **options: whatever else costs depend on.
    """
    key = [
        _describe_machine(target.device),
        type(target.model).__name__,
        target.is_packed,
        target.is_batch_invariant,
        _digest(target.text_config),
        _sample_weights(target.model),
        str(target.dtype),
        find_attention(target.backbone.causal_lm),
        *_describe_drafter(drafter),
        [(policy.max_depth, policy.num_scratch, policy.num_nodes) for policy in policies],
        runner,
        sorted(options.items()),
        FORMAT,
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / f"planner-{digest}.json"


def _describe_drafter(drafter: Any) -> list[Any]:
    """Its class, settings, weights and dtype."""
    config = getattr(drafter, "config", None)
    kinds = int | float | str if config is None else int | float  # a config names its own texts, and its folder
    return [
        type(drafter).__name__,
        sorted((name, value) for name, value in vars(drafter).items() if isinstance(value, kinds)),
        None if config is None else _digest(config),
        _sample_weights(drafter) if isinstance(drafter, nn.Module) else None,
        str(getattr(drafter, "dtype", "")),
    ]


def _digest(config: Any) -> str:
    """A config's values, without where it was loaded from."""
    values = {name: value for name, value in config.to_dict().items() if not name.endswith("name_or_path")}
    return hashlib.sha256(repr(sorted(values.items(), key=lambda item: item[0])).encode()).hexdigest()


def _sample_weights(module: nn.Module) -> str:
    """A digest of the first numbers of every plain tensor among the weights. Training changes them, and with them how
    many drafts are accepted."""
    found = hashlib.sha256()
    for weight in module.parameters():
        if type(weight.data) is Tensor and weight.numel() and not weight.is_meta:
            first = weight.detach()[(0,) * (weight.dim() - 1)].reshape(-1)[:SAMPLED]
            found.update(first.float().cpu().numpy().tobytes())
    return found.hexdigest()


def _describe_machine(device: torch.device) -> str:
    """What the costs depend on besides the models."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        cpu = re.search(r"model name\s*:\s*(.*)", info.read_text(encoding="utf-8")) if info.is_file() else None
        hardware = f"{cpu[1] if cpu else platform.processor()}, {torch.get_num_threads()} threads"
    return f"{hardware}, torch {torch.__version__}, transformers {transformers.__version__}"


Learned = tuple[dict[tuple[bool, int, int], list[float]], dict[bool, list[float]]]
"""Ratios of costs by conditions, and each policy's tokens, greedy (False) and sampled."""


def load_learned(file: Path) -> Learned:
    """What was learned until a few days ago; nothing from a file that is damaged or not there."""
    try:
        if not 0 <= time.time() - file.stat().st_mtime < MOST_AGE:
            return {}, {}
        content = json.loads(file.read_text(encoding="utf-8"))
        costs = {(kind, rows, size): [*map(float, values)] for (kind, rows, size), values in content["costs"]}
        tokens = {bool(key): [*map(float, values)] for key, values in content["tokens"]}
        lengths = {*map(len, costs.values()), *(1 + len(values) for values in tokens.values())}
        return (costs, tokens) if len(lengths) <= 1 else ({}, {})
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def store_learned(file: Path, learned: Learned) -> None:
    """Adds what was learned to the file. Where nothing can be written, it is learned again next time."""
    known_costs, known_tokens = load_learned(file)
    costs, tokens = learned
    content = {"costs": [*(known_costs | costs).items()], "tokens": [*(known_tokens | tokens).items()]}
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        scratch.write_text(json.dumps(content), encoding="utf-8")
        scratch.replace(file)
