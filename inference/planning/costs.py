"""StepCosts: how long a step takes with each tree and without one. They are kept in a file, and measured again when
they are old, or when steps take another time."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.source import SOURCE_MULTIPLE, Source
from draftsmith.inference.cache_folder import cache_folder
from draftsmith.inference.request.row import Row
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Step
from draftsmith.inference.targets.model_config import find_attention
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.policy import TreePolicy

MEASUREMENT = 15  # raise it with every change that makes stored costs wrong
CONTEXTS = (64, 896)  # both fit in the smallest cache of compiled decoding, so that its graphs are measured
WARM_UP_ROUNDS, MEASURED_ROUNDS = 2, 7
# Long steps vary little: after this many seconds, this many measured rounds are enough.
LONG_SECONDS, LEAST_MEASURED_ROUNDS = 4.0, 3
# Seconds for which costs are used. Wrong ones are found much sooner, by the steps that disagree with them.
MOST_AGE = 7 * 24 * 3600.0
# Costs that steps disagree with are measured again, but not more often than this: it takes seconds.
LEAST_AGE = 600.0


@dataclass(frozen=True)
class StepCosts:
    """Seconds of whole steps, the least of several: other work on the machine only ever adds to a time.

    Attributes:
        contexts: tokens in the cache, two numbers.
        plain: a step without drafting, at each of them; largest: one with the largest tree, likewise.
        trees: a step with each candidate, at the first of them.
        num_nodes: of each candidate.
        measured_at: seconds since 1970.
    """

    contexts: tuple[int, int]
    plain: tuple[float, float]
    largest: tuple[float, float]
    trees: tuple[float, ...]
    num_nodes: tuple[int, ...]
    measured_at: float = field(default_factory=time.time)

    def is_due(self, doubted: Collection[StepCosts]) -> bool:
        """Whether they are to be measured again. Steps took another time than the costs in `doubted`."""
        age = time.time() - self.measured_at
        return not 0 <= age < (LEAST_AGE if self in doubted else MOST_AGE)

    def seconds(self, index: int | None, length: int) -> float:
        """A step with the candidate of this index (None: without drafting) and `length` tokens in the cache. A longer
        text never takes less time, whatever noise says."""
        span = max(1, self.contexts[1] - self.contexts[0])
        share = max(0, length - self.contexts[0]) / span
        few, many = (share * max(0.0, long - short) for short, long in (self.plain, self.largest))
        if index is None:
            return self.plain[0] + few
        # Every node attends to the whole text.
        part = (self.num_nodes[index] - 1) / max(1, max(self.num_nodes) - 1)
        return self.trees[index] + few + part * max(0.0, many - few)


def find_costs(step: Step, batch_size: int, sampler: Sampler, doubted: Collection[StepCosts] = ()) -> StepCosts:
    """The stored costs for this machine, target, drafter, trees, dtype, batch and executor, or freshly measured ones.

    Args:
        step: with trees to choose from.
        sampler: as texts will be drawn, with no processor that reads the prefix.
        doubted: see `StepCosts.is_due`.
    """
    file = cache_file(_describe(step, batch_size, sampler))
    stored = load_costs(file)
    if stored is None or stored.is_due(doubted):
        stored = measure_costs(step, batch_size, sampler, num_rounds=WARM_UP_ROUNDS + MEASURED_ROUNDS)
        store_costs(file, stored)
    elif step.outlives_states:  # one round makes the graphs, which would otherwise be made within a text
        measure_costs(step, batch_size, sampler, num_rounds=1)
    return stored


@torch.no_grad()
def measure_costs(step: Step, batch_size: int, sampler: Sampler, *, num_rounds: int) -> StepCosts:
    """Times steps over token 0 after a context of zeros, in which no token becomes certain."""
    assert step.policy is not None
    target, limit = step.target, step.target.max_length
    short, long = (context if limit is None else min(context, limit) for context in CONTEXTS)
    state = step.new_state(batch_size, long + step.num_slots_after, long + step.path_width)
    rows = [Row(index, [0] * (short + 1), 0, long) for index in range(batch_size)]
    state.open(rows)
    state.cache.reset(batch_size)
    state.draft = state.start_drafter()
    if target.is_encoder_decoder:
        source = _blank_source(target, batch_size)
        target.read_source(state.cache, source)
        if step.drafter is not None:
            step.drafter.read_source(state.draft, source.token_ids, source.mask)
    if step.feature_layers:
        size = len(step.feature_layers) * target.hidden_size
        state.hold_features(torch.zeros(1, 1, size, dtype=target.dtype, device=target.device))
    trees = step.policy.candidates
    largest = max(trees, key=lambda tree: tree.num_nodes)
    plans = [(None, short), (None, long), (largest, short), (largest, long), *((tree, short) for tree in trees)]
    clock = PhaseClock(GenerationStats(), target.device)
    calls = [partial(_make_step, step, state, sampler, clock, tree, context) for tree, context in plans]
    seconds = _time_calls(calls, target.device, num_rounds=num_rounds)
    num_nodes = tuple(tree.num_nodes for tree in trees)
    step.forget()  # with it, graphs hold this state
    return StepCosts((short, long), (seconds[0], seconds[1]), (seconds[2], seconds[3]), tuple(seconds[4:]), num_nodes)


def _make_step(
    step: Step,
    state: DecodeState,
    sampler: Sampler,
    clock: PhaseClock,
    policy: TreePolicy | None,
    context: int,
) -> None:
    """One step that keeps nothing: the rows do not grow."""
    for row in state.rows:
        row.padded = [0] * (context + 1)
    state.cache.lengths.fill_(context)
    state.num_tokens.fill_(context + 1)
    state.active.zero_()
    state.num_pending.zero_()
    state.pending_bound = 0 if policy is None else 1 + min(policy.max_depth, policy.num_nodes - 1)
    step(state, policy, sampler, clock, is_counting=policy is not None).emitted.tolist()


def _blank_source(target: Target, batch_size: int) -> Source:
    """A short source for encoder-decoder targets. The cost of a longer one is not measured."""
    length = min(SOURCE_MULTIPLE, target.max_length or SOURCE_MULTIPLE)
    token_ids = torch.zeros(batch_size, length, dtype=torch.long, device=target.device)
    return target.encode_source(token_ids, torch.ones_like(token_ids))


def _time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, *, num_rounds: int) -> list[float]:
    """The least seconds of each call. Calls take turns, so that other work on the machine slows all of them alike. Each
    is made twice and the second counts, since a step finds in the processor's caches what the step before left."""
    began = time.perf_counter()
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(num_rounds):
        if number >= WARM_UP_ROUNDS + LEAST_MEASURED_ROUNDS and time.perf_counter() - began > LONG_SECONDS:
            break
        for own, call in zip(seconds, calls, strict=True):
            call()
            start = _read_clock(device)
            call()
            if number >= WARM_UP_ROUNDS:
                own.append(_read_clock(device) - start)
    return [min(own, default=0.0) for own in seconds]


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _describe(step: Step, batch_size: int, sampler: Sampler) -> list[Any]:
    """Everything that costs depend on."""
    target, policy = step.target, step.policy
    assert policy is not None
    return [
        _describe_machine(target.device),
        target.placement,
        type(target.model).__name__,
        target.is_packed,
        target.least_rows,
        _digest(target.text_config),
        str(target.dtype),
        find_attention(target.backbone.causal_lm),
        *_describe_drafter(step.drafter),
        [(tree.max_depth, tree.num_scratch, tree.num_nodes) for tree in policy.candidates],
        step.runner,
        batch_size,
        step.is_coupled,
        sampler.do_sample,
        [type(processor).__name__ for processor in sampler.processors],
        CONTEXTS,
        MEASUREMENT,
    ]


def _describe_drafter(drafter: Any) -> list[Any]:
    """Its class, settings and dtype; then the same of the drafters it is made of. A wrapper (`__wrapped__`) is left
    out."""
    drafter = inspect.unwrap(drafter)
    config = getattr(drafter, "config", None)
    kinds = int | float | str if config is None else int | float  # a config names its own texts, and its folder
    return [
        type(drafter).__name__,
        sorted((name, value) for name, value in vars(drafter).items() if isinstance(value, kinds)),
        None if config is None else _digest(config),
        str(getattr(drafter, "dtype", "")),
        *(_describe_drafter(part) for part in getattr(drafter, "drafters", ())),
    ]


def _digest(config: Any) -> str:
    """A config's values, without where it was loaded from."""
    values = {name: value for name, value in config.to_dict().items() if not name.endswith("name_or_path")}
    return hashlib.sha256(repr(sorted(values.items(), key=lambda item: item[0])).encode()).hexdigest()


def _describe_machine(device: torch.device) -> str:
    """What the costs depend on besides the models."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        cpu = re.search(r"model name\s*:\s*(.*)", info.read_text(encoding="utf-8")) if info.is_file() else None
        hardware = f"{cpu[1] if cpu else platform.processor()}, {torch.get_num_threads()} threads"
    return f"{hardware}, torch {torch.__version__}, transformers {transformers.__version__}"


def cache_file(key: Sequence[Any]) -> Path:
    """Where costs of this key are kept."""
    digest = hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:16]
    return cache_folder() / f"costs-{digest}.json"


def load_costs(file: Path) -> StepCosts | None:
    """The costs in a file; None when there are none that can be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        measured_at = float(content.pop("measured_at"))
        return StepCosts(**{name: tuple(values) for name, values in content.items()}, measured_at=measured_at)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None


def store_costs(file: Path, costs: StepCosts) -> None:
    """Keeps costs. Where nothing can be written, they are measured again next time."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        scratch.write_text(json.dumps(asdict(costs)), encoding="utf-8")
        scratch.replace(file)
