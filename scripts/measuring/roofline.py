"""Computes the hardware's limit for one round of decoding, from the bytes it reads and the products it computes.

A round is one draft phase and one verify pass. Its limit follows the roofline model (doi 10.1145/1498765.1498785):

    max(bytes of weights / memory bandwidth, FLOPs / matmul throughput)

Bandwidth and throughput are measured. Bandwidth is measured on a buffer as large as the target's weights, because the
weights of a small model stay in the last-level cache, which is faster than memory. Only weights count: caches,
activations and the products inside attention are left out. So the limit may be too low, and a decoder's share of the
limit is never too high.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from draftsmith.inference import Decoder, Drafter, Target, TreePolicy
from draftsmith.scripts.shared.clock import read_clock

MAX_BUFFER_BYTES = 2**30  # no cache holds more, so a larger buffer would read no slower
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}  # width of the square product; keeps every unit busy
PASSES = 8
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
SAMPLE_SECONDS = 0.005  # shorter passes are timed several at once


@dataclass(frozen=True)
class Hardware:
    """bandwidth_gb_s: 1e9 bytes read per second. matmul_gflop_s: 1e9 floating-point operations per second, a
    multiplication and an addition count as two."""

    bandwidth_gb_s: float
    matmul_gflop_s: float


@dataclass
class Work:
    """The work of a round: bytes of weights read, and floating-point operations of products with weights."""

    weight_bytes: float
    flops: float

    def limit_milliseconds(self, hardware: Hardware) -> float:
        """The shortest time in which the hardware can do this work.

        >>> Work(weight_bytes=20e6, flops=1e9).limit_milliseconds(Hardware(bandwidth_gb_s=10.0, matmul_gflop_s=100.0))
        10.0
        """
        seconds = max(self.weight_bytes / (hardware.bandwidth_gb_s * 1e9), self.flops / (hardware.matmul_gflop_s * 1e9))
        return 1000 * seconds


def measure_bandwidth(num_bytes: int, device: torch.device) -> float:
    """GB/s of reading a buffer of `num_bytes` (at most `MAX_BUFFER_BYTES`), the best of several passes."""
    # Ones: untouched pages of zeros take no memory.
    buffer = torch.ones(max(1, min(num_bytes, MAX_BUFFER_BYTES) // 4), device=device)
    return 4e-9 * buffer.numel() / best_seconds(lambda: torch.dot(buffer, buffer), device)


def measure_copy(num_bytes: int, device: torch.device) -> float:
    """GB/s of copying a buffer of `num_bytes`, the best of several passes: bytes read and bytes written."""
    buffer = torch.ones(max(1, num_bytes // 4), device=device)
    other = torch.empty_like(buffer)
    return 8e-9 * buffer.numel() / best_seconds(lambda: other.copy_(buffer), device)


def measure_matmul(dtype: torch.dtype, device: torch.device, *, size: int | None = None) -> float:
    """GFLOP/s of a square product in `dtype`, the best of several passes. size: width; None = `MATMUL_SIZE`."""
    size = size or MATMUL_SIZE.get(device.type, MATMUL_SIZE["cuda"])
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2e-9 * size**3 / best_seconds(lambda: left @ right, device)


def best_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call; short calls are timed together, so that the clock's resolution does not matter."""
    start = read_clock(device)
    call()
    first = read_clock(device) - start
    calls = max(1, round(SAMPLE_SECONDS / max(first, 1e-6)))
    best = first
    for _ in range(PASSES):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (read_clock(device) - start) / calls)
    return best


class ProductCounter(TorchDispatchMode):
    """Inside its context, adds up the operations of matrix products, of backward passes too. Products inside fused and
    compiled attention are left out."""

    flops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled attention would run uncompiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def count_work(*models: nn.Module) -> Iterator[Work]:
    """Inside its context, adds up the work of these modules' forward passes. A module that runs at every level of a
    tree reads its weights at every level."""
    work = Work(0.0, 0.0)

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Embedding):
            return
        own = list(module.parameters(recurse=False))
        if isinstance(output, Tensor):
            num_rows = output.numel() / output.shape[-1]
            work.flops += sum(2.0 * num_rows * weight.numel() for weight in own if weight.dim() == 2)
        # A pass does not read all experts (stacked in one tensor). Without experts, the limit stays a lower bound.
        work.weight_bytes += sum(weight.numel() * weight.element_size() for weight in own if weight.dim() <= 2)

    modules = {module for model in models for module in model.modules()}
    handles = [module.register_forward_hook(count) for module in modules]
    try:
        yield work
    finally:
        for handle in handles:
            handle.remove()


def count_round(
    target: Target, drafter: Drafter | None, policy: TreePolicy | None, prompt: Tensor, *, max_new_tokens: int = 32
) -> Work:
    """The work of an average round, counted while a prompt [1, L] is decoded eagerly and greedily.

    The first round does not count, because the drafter also reads the prompt in it. The text must have a second one.

    Args:
        drafter, policy: as in `Decoder`; both None for plain decoding.
    """
    decoder = Decoder(target, drafter, tree=policy, batch_invariant=False)
    models = [target.model, *([decoder.drafter] if isinstance(decoder.drafter, nn.Module) else [])]
    marks: list[Work] = []  # after the prefill, after the first round, ...
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "stop_strings": []}
    with count_work(*models) as work:
        for _ in decoder.stream(prompt, torch.ones_like(prompt), **options):
            marks.append(replace(work))
    _, first, *_, last = marks
    num_rounds = len(marks) - 2
    return Work((last.weight_bytes - first.weight_bytes) / num_rounds, (last.flops - first.flops) / num_rounds)
