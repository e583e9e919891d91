"""Products of a few rows with a drafter's weights: bfloat16 as compiled decoding packs them, beside 8-bit weights.

    python scripts/benchmark_products.py --heads examples/heads/eagle3 --threads 1

8-bit weights are half the bytes: they pay where reading weights is what a product costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from heads import DraftHeads
from inference.compilation import StepCompiler


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", required=True, help="Draft heads: a folder or hub id.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="Rows of the products.")
    parser.add_argument("--repeats", type=int, default=300, help="Calls of each, in turns; medians count.")
    parser.add_argument("--threads", type=int, help="CPU threads; none = torch's choice.")
    args = parser.parse_args(argv)
    if min(*args.rows, args.repeats, 1 if args.threads is None else args.threads) < 1:
        parser.error("give --rows, --repeats and --threads of at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        heads = DraftHeads.from_pretrained(args.heads, dtype=torch.bfloat16)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmark_products.py: {error}")
    print("\n".join(compare(heads, args.rows, args.repeats)))
    return 0


@torch.no_grad()
def compare(heads: DraftHeads, rows: Sequence[int], repeats: int) -> list[str]:
    """Lines of a Markdown table: a line for each matrix and number of rows."""
    lines = [
        "| matrix | rows | bfloat16, µs | 8-bit, µs | 8-bit / bfloat16 | error of 8-bit |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, module in heads.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        packed = nn.Linear(module.in_features, module.out_features, bias=False, dtype=torch.bfloat16).eval()
        packed.weight.copy_(module.weight)
        compiler = StepCompiler([packed], on_compile=lambda _: None)
        with compiler.active():
            for number in rows:
                # A graph of its own for each number of rows, as a level of a tree has.
                plain, short = compiler.compile(packed.forward), compiler.compile(quantised(module.weight))
                inputs = torch.randn(number, module.in_features, dtype=torch.bfloat16)
                exact = module.weight.float() @ inputs.float().T
                error = (short(inputs).float().T - exact).norm() / exact.norm()
                first, second = time_in_turns([lambda: plain(inputs), lambda: short(inputs)], repeats)  # noqa: B023
                shape = f"{name} {module.in_features} x {module.out_features}"
                cells = (f"{first:.0f}", f"{second:.0f}", f"{second / first:.2f}", f"{error:.3f}")
                lines.append(f"| {shape} | {number} | {' | '.join(cells)} |")
    return lines


def quantised(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product with 8-bit weights, one scale for each row of the matrix."""
    scales = weight.float().abs().amax(1).clamp(min=1e-8) / 127
    values = (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    narrow = scales.to(weight.dtype)

    def product(inputs: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten._weight_int8pack_mm(inputs, values, narrow)
        return result

    return product


def time_in_turns(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median microseconds of each call."""
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for own, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [1e6 * statistics.median(own) for own in seconds]


if __name__ == "__main__":
    sys.exit(main())
