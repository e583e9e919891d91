"""CostModel: what a verify pass costs by number of nodes and length of context, and what drafting costs by level.

Measured once per machine, target, drafter and dtype, and kept in a file; `tree="auto"` decides with it.

Legend: N tree nodes, D depth.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

WARM_UP_ROUNDS, MEASURED_ROUNDS = 2, 9
# Passes of many rows take long and vary little: after so many seconds, so many measured rounds are enough.
LONG_SECONDS, LEAST_MEASURED_ROUNDS = 5.0, 3


@dataclass(frozen=True)
class Plan:
    """A tree's size: its depth, its nodes (root included), and the width of its beam. depth 0, one node: no tree."""

    depth: int
    num_nodes: int
    width: int


NO_TREE = Plan(0, 1, 0)


@dataclass(frozen=True)
class CostModel:
    """Seconds, medians of several calls.

    Attributes:
        contexts: tokens in the cache, rising. sizes: nodes, rising, from 1 (plain decoding) on.
        verify: [contexts][sizes] the target's forward.
        extend: the drafter takes in accepted tokens and scores the root's children; grow: building the tree, whatever
            its depth.
        widths: of beams, rising. level: [widths] each level behind the first.
        rest: acceptance and commit of a step with a tree; plain_rest: of one without.
    """

    contexts: tuple[int, ...]
    sizes: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    extend: float
    grow: float
    widths: tuple[int, ...]
    level: tuple[float, ...]
    rest: float
    plain_rest: float

    def verify_seconds(self, num_nodes: int, context: int) -> float:
        """Interpolated between what was measured; beyond the largest, the mean slope goes on."""
        rows = [_interpolate(self.sizes, row, num_nodes) for row in self.verify]
        return _interpolate(self.contexts, rows, context)

    def level_seconds(self, width: int) -> float:
        """A level behind the first, with a beam of this width; interpolated likewise."""
        return _interpolate(self.widths, self.level, width)

    def plain_seconds(self, context: int) -> float:
        """A step without drafting."""
        return self.verify_seconds(1, context) + self.plain_rest

    def step_seconds(self, plan: Plan, context: int) -> float:
        """A step that asked the drafter: with a tree of this size, or with none after all."""
        if plan.depth == 0:
            return self.extend + self.plain_seconds(context)
        draft = self.extend + self.grow + (plan.depth - 1) * self.level_seconds(plan.width)
        return draft + self.verify_seconds(plan.num_nodes, context) + self.rest

    def to_table(self) -> str:
        """A few lines for people, in milliseconds."""
        lines = ["verify, ms      " + "".join(f"{size:>9} nodes" for size in self.sizes)]
        for context, row in zip(self.contexts, self.verify, strict=True):
            lines.append(f"{context:>9} tokens" + "".join(f"{1000 * value:>15.2f}" for value in row))
        levels = {f"level of {width}": value for width, value in zip(self.widths, self.level, strict=True)}
        parts = {"extend": self.extend, **levels, "grow": self.grow, "rest": self.rest, "plain rest": self.plain_rest}
        lines.append("draft, ms        " + "   ".join(f"{name} {1000 * value:.2f}" for name, value in parts.items()))
        return "\n".join(lines)


class BatchCosts:
    """Costs by batch size. Those between measured sizes are interpolated, each number by itself, since rows leave a
    batch in the middle of a text, where nothing can be measured.

    Args:
        measured: by batch size, of one target, drafter and way to run; all have the same contexts, sizes and widths.
    """

    def __init__(self, measured: Mapping[int, CostModel]) -> None:
        self.measured = dict(sorted(measured.items()))
        self._known = dict(measured)

    def at(self, batch_size: int) -> CostModel:
        """The same object every time."""
        if batch_size not in self._known:
            self._known[batch_size] = _mix(list(self.measured.values()), list(self.measured), batch_size)
        return self._known[batch_size]


def _mix(models: Sequence[CostModel], batch_sizes: Sequence[int], batch_size: int) -> CostModel:
    def mix(*values: float) -> float:
        return _interpolate(batch_sizes, values, batch_size)

    def mix_each(*rows: Sequence[float]) -> tuple[float, ...]:
        return tuple(itertools.starmap(mix, zip(*rows, strict=True)))

    return replace(
        models[0],
        verify=tuple(itertools.starmap(mix_each, zip(*(model.verify for model in models), strict=True))),
        extend=mix(*(model.extend for model in models)),
        grow=mix(*(model.grow for model in models)),
        level=mix_each(*(model.level for model in models)),
        rest=mix(*(model.rest for model in models)),
        plain_rest=mix(*(model.plain_rest for model in models)),
    )


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """Piecewise linear; the first value below the first x. Beyond the last x, the slope from the first to the last goes
    on, since noise tells less on it than on the last stretch; never downwards.

    >>> _interpolate([1, 3], [10.0, 20.0], 2), _interpolate([1, 3], [10.0, 20.0], 5), _interpolate([1], [4.0], 9)
    (15.0, 30.0, 4.0)
    >>> _interpolate([1, 3], [20.0, 10.0], 5)
    10.0
    """
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    if x > xs[-1]:
        return ys[-1] + max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0])) * (x - xs[-1])
    right = bisect.bisect_left(xs, x)
    low, high = xs[right - 1], xs[right]
    return ys[right - 1] + (ys[right] - ys[right - 1]) * (x - low) / (high - low)


def time_calls(
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    is_warm: Sequence[bool] | None = None,
    num_rounds: int = WARM_UP_ROUNDS + MEASURED_ROUNDS,
) -> list[float]:
    """Median seconds of each call. They take turns, so that a neighbour's load meets all of them alike.

    Args:
        is_warm: calls that are made twice in a row, of which the second counts: what is called again and again finds
            its weights in the processor's caches.
        num_rounds: how often each call is made, less often if that takes long; up to `WARM_UP_ROUNDS`, nothing is
            measured and all is 0.
    """
    began = time.perf_counter()
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(num_rounds):
        if number >= WARM_UP_ROUNDS + LEAST_MEASURED_ROUNDS and time.perf_counter() - began > LONG_SECONDS:
            break
        for own, call, warm in zip(seconds, calls, is_warm or [False] * len(calls), strict=True):
            if warm:
                call()
            start = _read_clock(device)
            call()
            if number >= WARM_UP_ROUNDS:
                own.append(_read_clock(device) - start)
    return [statistics.median(own) if own else 0.0 for own in seconds]


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def describe_machine(device: torch.device) -> str:
    """What the costs depend on besides the models."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        hardware = f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"
    return f"{hardware}, torch {torch.__version__}, transformers {transformers.__version__}"


def cache_file(key: Sequence[Any]) -> Path:
    """Where costs of this key are kept: in $DRAFTSMITH_CACHE, else in the user's cache folder."""
    root = os.environ.get("DRAFTSMITH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:16]
    return Path(root) / "draftsmith" / f"costs-{digest}.json"


def load_costs(key: Sequence[Any]) -> CostModel | None:
    """The stored costs of this key. None when there are none yet, or only those of another release."""
    try:
        content = json.loads(cache_file(key).read_text(encoding="utf-8"))
        content["verify"] = tuple(tuple(row) for row in content["verify"])
        for name in ("contexts", "sizes", "widths", "level"):
            content[name] = tuple(content[name])
        return CostModel(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_costs(key: Sequence[Any], costs: CostModel) -> None:
    """Where nothing can be written, nothing is: costs are then measured again next time."""
    path = cache_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps(asdict(costs)), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        pass
