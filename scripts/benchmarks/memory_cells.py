"""What one decoding call holds at most, split into what it consists of, and what it leaves behind.

Legend: B batch, L prompt length.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from heads import create_heads
from inference import Decoder, Drafter, Target
from scripts.benchmarks.context_cost import build_random_target
from scripts.benchmarks.memory_tracker import MemoryTracker, count_bytes, profile_peak

KIND_OF_RANDOM_HEADS = "eagle3"
RANDOM_SHAPE = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 4096}


@dataclass(frozen=True)
class Cell:
    """Bytes of one call. cache: the target's keys and values (transformers': as the call leaves them). state: the
    drafter's own buffers. rest: what the peak has besides target, heads, cache and state. left: what is alive
    afterwards, besides target and heads, when the output is dropped and the decoder kept."""

    contender: str
    batch: int
    prompt: int
    new: int
    target: int
    heads: int
    cache: int
    state: int
    rest: int
    left: int

    @property
    def peak(self) -> int:
        return self.target + self.heads + self.cache + self.state + self.rest


@dataclass(frozen=True)
class CallPeak:
    """Bytes beyond what was there before: at most during a call, and behind it."""

    peak: int
    left: int


def measure_call(
    device: torch.device, owners: Sequence[Any], call: Callable[[], Any], *, prepare: Callable[[], Any] = lambda: None
) -> CallPeak:
    """One call's bytes beyond those of `owners`, which exist before; what it returns is dropped.

    On a CPU tensors are followed (`MemoryTracker`); on an accelerator its allocator is asked.

    Args:
        prepare: called first; what it leaves counts, its own peak does not.
    """
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        prepare()
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        gc.collect()
        return CallPeak(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    tracker = MemoryTracker()
    tracker.follow(*owners)
    before = tracker.live
    with tracker:
        prepare()
        gc.collect()
        tracker.restart_peak()
        call()
    gc.collect()
    return CallPeak(tracker.peak - before, tracker.live - before)


def random_prompts(target: Target, batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, target.vocab_size, (batch, length), generator=generator).to(target.device)


def generate_for_ever(decoder: Decoder, prompts: Tensor, new: int, **options: Any) -> Any:
    """Texts that no end-of-sequence token ends."""
    return decoder.generate(prompts, max_new_tokens=new, eos_token_id=None, pad_token_id=0, **options)


def measure_ours(name: str, target: Target, drafter: Drafter | None, batch: int, length: int, new: int) -> Cell:
    decoder, prompts = Decoder(target, drafter), random_prompts(target, batch, length)
    owners = [target.model, drafter, prompts]
    found = measure_call(target.device, owners, lambda: generate_for_ever(decoder, prompts, new))
    cache = count_bytes(decoder._cache)
    state = 0
    if drafter is not None:
        assert decoder._cache is not None
        decoder._cache.reset()
        state = count_bytes(decoder._step.start_drafter(decoder._cache), besides=[*owners, decoder._cache])
    return Cell(
        name,
        batch,
        length,
        new,
        target=count_bytes(target.model),
        heads=count_bytes(drafter, besides=[target.model]),
        cache=cache,
        state=state,
        rest=found.peak - cache - state,
        left=found.left,
    )


def measure_transformers(target: Target, batch: int, length: int, new: int, *, is_static: bool) -> Cell:
    """transformers' own generate, with a cache that grows or a static one."""
    prompts = random_prompts(target, batch, length)
    options = {"cache_implementation": "static"} if is_static else {}
    caches: list[int] = []
    # It makes static caches as long as the longest so far: as if this were the first.
    vars(target.model).pop("_previous_max_cache_length", None)

    def call() -> None:
        output = target.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
        caches.append(count_bytes(output.past_key_values))

    found = measure_call(target.device, [target.model, prompts], call)
    return Cell(
        f"transformers, {'static' if is_static else 'dynamic'} cache",
        batch,
        length,
        new,
        target=count_bytes(target.model),
        heads=0,
        cache=caches[0],
        state=0,
        rest=found.peak - caches[0],
        left=found.left,
    )


def build_wide_target(max_length: int, device: torch.device) -> tuple[Target, Drafter]:
    """A random target with room for long prompts, and untrained heads."""
    target = build_random_target(**RANDOM_SHAPE, max_length=max_length, dtype=torch.float32, device=device)
    heads = create_heads(KIND_OF_RANDOM_HEADS, target).eval().to(device)
    return target, heads


@dataclass(frozen=True)
class Scene:
    """Bytes beyond weights and heads, of something done with a decoder that has decoded before. before, after: the
    decoder's cache. left: what is alive behind it all."""

    name: str
    before: int
    after: int
    peak: int
    left: int


def measure_scenes(target: Target, drafter: Drafter) -> list[Scene]:
    """What calls after the first one hold, and what they leave."""

    def prompts(batch: int, length: int) -> Tensor:
        return random_prompts(target, batch, length)

    def again(times: int) -> Callable[[Decoder], Any]:
        return lambda decoder: [generate_for_ever(decoder, prompts(2, 300), 8) for _ in range(times)]

    def interrupt(decoder: Decoder) -> Any:
        for _ in range(5):
            with decoder.stream(prompts(1, 300), max_new_tokens=64) as stream:
                next(stream), next(stream)
        return stream  # closed, and kept for its output

    def end_one_by_one(decoder: Decoder) -> Any:
        rows = prompts(6, 300)
        ends = {tuple(row[:4].tolist()): 304 + 4 * place for place, row in enumerate(rows)}
        return generate_for_ever(
            decoder, rows, 64, stopping_criteria=[lambda text, _: text.shape[1] >= ends[tuple(text[0, :4].tolist())]]
        )

    def continue_as(batch: int, length: int) -> Callable[[Decoder], Any]:
        return lambda decoder: generate_for_ever(decoder, prompts(batch, length), 8, reuse_cache=True)

    scenes = [
        ("20 calls of the same shape", (2, 300), again(20)),
        ("5 streams, each closed after two steps, the last one kept", (1, 300), interrupt),
        ("a batch of 6 rows that end one after the other", (6, 300), end_one_by_one),
        ("a longer prompt: another cache", (1, 1000), lambda d: generate_for_ever(d, prompts(1, 2000), 8)),
        ("reuse_cache, the cache is large enough", (1, 1000), continue_as(1, 1000)),
        ("reuse_cache, a larger cache is needed", (1, 1000), lambda d: generate_for_ever(
            d, torch.cat([prompts(1, 1000), prompts(1, 400)], dim=1), 8, reuse_cache=True)),
        ("reuse_cache, one row becomes four", (1, 1000), lambda d: generate_for_ever(
            d, prompts(1, 1000).repeat(4, 1), 8, reuse_cache=True)),
    ]  # fmt: skip
    found = []
    for name, first, then in scenes:
        decoder = Decoder(target, drafter)
        kept: list[Any] = []
        sizes: list[int] = []
        call = measure_call(
            target.device,
            [target.model, drafter],
            partial(_keep_result, kept, then, decoder),
            prepare=partial(_decode_first, decoder, prompts(*first), sizes),
        )
        found.append(Scene(name, sizes[0], count_bytes(decoder._cache), call.peak, call.left))
    return found


def _decode_first(decoder: Decoder, prompts: Tensor, sizes: list[int]) -> None:
    generate_for_ever(decoder, prompts, 8)
    sizes.append(count_bytes(decoder._cache))


def _keep_result(kept: list[Any], then: Callable[[Decoder], Any], decoder: Decoder) -> None:
    kept.append(then(decoder))


@dataclass(frozen=True)
class Check:
    """One call's peak beyond the weights, as three rulers see it, in bytes; resident memory is 0 where
    Linux does not tell it."""

    batch: int
    prompt: int
    tracked: int
    profiled: int
    resident: int


def check_rulers(batch: int, length: int, new: int = 8) -> Check:
    """The tracker's word beside the allocator's and the process's."""
    target, drafter = build_wide_target(length + 256, torch.device("cpu"))
    prompts = random_prompts(target, batch, length)
    tracked = measure_call(
        target.device,
        [target.model, drafter, prompts],
        lambda: generate_for_ever(Decoder(target, drafter), prompts, new),
    ).peak
    profiled = profile_peak(lambda: generate_for_ever(Decoder(target, drafter), prompts, new))
    # A process whose largest size nothing else has set, and whose malloc gives large blocks back when they are freed:
    # glibc's keeps some for later otherwise, other ones in each run.
    malloc = patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)})
    with malloc, multiprocessing.get_context("spawn").Pool(1) as pool:
        resident = pool.apply(_grow_resident, (batch, length, new))
    return Check(batch, length, tracked, profiled, resident)


def _grow_resident(batch: int, length: int, new: int) -> int:
    target, drafter = build_wide_target(length + 256, torch.device("cpu"))
    generate_for_ever(Decoder(target, drafter), random_prompts(target, 1, 16), new)  # code and tables
    before = read_resident("VmRSS")
    if before:
        Path("/proc/self/clear_refs").write_text("5")  # the largest size begins anew
    generate_for_ever(Decoder(target, drafter), random_prompts(target, batch, length), new)
    return read_resident("VmHWM") - before


def read_resident(name: str) -> int:
    """The process's resident memory (VmRSS) or its largest (VmHWM); 0 where Linux does not tell it.

    `resource.getrusage` will not do: the largest size it tells of a process is never below its parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
