"""Runs vllm_worker.py with vLLM's second model runner on a CPU.

    python vllm_interpreted.py JOB.json RESULT.json

That runner's kernels are Triton's, and no package index has Triton's compiler for CPUs: Triton's interpreter takes its
place. DFlash 2 is drafted by the second runner only.
"""

# ruff: noqa: E402

import os
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from triton.backends import Backend, backends
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class Driver:
    """Of the compiler that vLLM looks for."""

    @staticmethod
    def is_active() -> bool:
        return True


def take_integers_as_masks() -> None:
    """`mask & flag` of a block and a scalar is an integer in the interpreter, which loads and stores by booleans."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def to_bool(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, to_bool(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, to_bool(mask), *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = masked_load, masked_store


backends.clear()
backends["cpu"] = Backend(compiler=None, driver=Driver)
take_integers_as_masks()

from vllm_worker import main

if __name__ == "__main__":
    main()
