"""The Triton kernels on a GPU, where `tests/inference/kernels/test_interpreted_kernel.py` has only the interpreter."""

from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, DynamicTree, Target
from tests.gpu.conftest import HAS_CUDA
from tests.heads.tiny_heads import tiny_heads
from tests.inference.kernels.kernel_checks import (
    CASES,
    LENGTHS,
    PRODUCTS,
    check_a_wrong_ancestor,
    check_independence,
    check_numbers,
    check_product_rows,
    check_products,
)
from tests.lossless.near_tie import assert_same_text
from tests.tiny_targets import random_prompt, tiny_target

pytest.importorskip("triton", reason="the optional extra `triton` is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device: `make gpu` where there is one"),
]
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_numbers(case, dtype, CUDA)


def test_a_wrong_ancestor_shows() -> None:
    check_a_wrong_ancestor(CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_does_not_depend_on_the_rest_of_the_pass(length: int, dtype: torch.dtype) -> None:
    check_independence(length, dtype, CUDA)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_products(dtype: torch.dtype) -> None:
    for case in PRODUCTS:
        check_products(case, dtype, CUDA)
    check_product_rows(dtype, CUDA)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_whole_decode(family: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is transformers' own; Mistral has a window of 8 tokens."""
    from draftsmith.inference.kernels import triton_kernel

    model, prompt, calls = tiny_target(family, initializer_range=0.3).to(CUDA), random_prompt(12).to(CUDA), []
    target, stock = Target(model), triton_kernel.attend_packed
    assert target.masks.packs_all
    monkeypatch.setattr(triton_kernel, "attend_packed", lambda *args: calls.append(None) or stock(*args))
    expected = model.generate(prompt, max_new_tokens=24, do_sample=False)
    decoder = Decoder(target, tiny_heads("eagle3", target), tree=DynamicTree(4, 3, 8), graphs=graphs)
    found = decoder.generate(prompt, max_new_tokens=24, do_sample=False)
    assert calls
    assert_same_text(model, expected, found.sequences)
