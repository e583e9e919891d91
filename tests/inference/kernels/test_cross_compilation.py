"""The Triton kernels compile for GPUs that are not here, and fit; whether they are right is not shown."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the optional extra `triton` is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftsmith.inference.kernels import triton_kernel, triton_linear
from tests.params import slow_but

# Compute capability -> shared memory of a block, in bytes (CUDA C++ programming guide, "Technical specifications").
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compile_kernel(kernel: Any, capability: int, dtype: Any, width: int) -> Any:
    fixed = {"GROUP": 4, "HEADS": 16, "WIDTH": width, "VALUE_WIDTH": width, "FACTOR": dtype}
    fixed |= {"TILE": triton_kernel.TILE, "SPLIT": triton_kernel.SPLIT, "ROWS": triton_kernel.ROWS}
    kinds = dict.fromkeys(("query", "key", "value", "out"), f"*{dtype}") | dict.fromkeys(
        ("tops", "totals", "sums"), "*fp32"
    )
    kinds |= {"mask": "*i64", "scale": "fp32"}
    return compile_for(kernel, capability, fixed, kinds, triton_kernel.OPTIONS)


def compile_for(kernel: Any, capability: int, fixed: dict[str, Any], kinds: dict[str, str], options: Any) -> Any:
    """kinds: of the arguments that are no `fixed` constants and no integers. Pointers and the sizes of weights are
    multiples of 16, so that tiles are copied asynchronously, into several buffers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    constants = {(names.index(name),): fixed[name] for name in names if name in fixed}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("num_inputs", "num_outputs")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# The second kernel has the product of the first; where blocks have the least memory.
@pytest.mark.parametrize(
    ("kernel", "capability"),
    slow_but(
        {"_attend_tiles-80", "_finish-80"},
        {f"_attend_tiles-{number}": ("_attend_tiles", number) for number in SHARED_MEMORY}
        | {"_finish-80": ("_finish", 80)},
    ),
)
def test_they_compile(kernel: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest heads in bfloat16, so that the matrix units are used, and no product is fused by ptxas alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(getattr(triton_kernel, kernel), capability, tl.bfloat16, 256)
    assert len(compiled.asm["cubin"]) > 1000
    assert any(word in compiled.asm["ptx"] for word in ("mma.sync", "wgmma", "tcgen05.mma"))
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", slow_but({"80"}, {str(number): number for number in SHARED_MEMORY}))
def test_products_compile(dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 with the matrix units."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind, (rows, inputs) = triton_kernel.DTYPES[dtype], triton_linear.TILES[dtype]
    fixed = {"HAS_BIAS": True, "FACTOR": kind, "ROWS": rows, "COLUMNS": triton_linear.COLUMNS, "INPUTS": inputs}
    kinds = dict.fromkeys(("rows", "weight", "bias", "out"), f"*{kind}")
    compiled = compile_for(triton_linear._multiply, capability, fixed, kinds, triton_linear.OPTIONS)
    assert len(compiled.asm["cubin"]) > 1000
    has_units = any(word in compiled.asm["ptx"] for word in ("mma.sync", "wgmma", "tcgen05.mma"))
    assert has_units == (dtype == torch.bfloat16)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
