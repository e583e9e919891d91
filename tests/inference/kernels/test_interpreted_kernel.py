"""The Triton kernels in Triton's interpreter, on the CPU: numbers, independence of the rest of a pass, whole decodes.

The interpreter has to be chosen before Triton is imported, so `test_the_others_in_a_process_of_their_own` runs the
other tests. The interpreter does not show how a GPU rounds inside a product, nor races or speed.
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.inference import DynamicTree, Target, generate
from draftsmith.inference.kernels.packed_masks import WORDS
from draftsmith.inference.targets.probing.invariance import check_depth
from tests.conftest import REPOSITORY
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
from tests.lossless.test_batch_invariant import is_plain
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

pytest.importorskip("triton", reason="the optional extra `triton` is not installed")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="runs inside test_the_others_in_a_process_of_their_own, under TRITON_INTERPRET=1"
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are numpy's, and some BLAS kernels round a row of one by its place. Not in float64."""
    product = np.matmul

    def round_once(a: Any, b: Any, dtype: Any = np.float32) -> Any:
        return product(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    if IS_INTERPRETED:
        monkeypatch.setattr(np, "matmul", round_once)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(IS_INTERPRETED, reason="it starts this process")
@pytest.mark.parametrize(
    "chosen", [pytest.param("not slow", id="quick", marks=pytest.mark.ci), pytest.param("slow", id="long")]
)
def test_the_others_in_a_process_of_their_own(chosen: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-m", chosen],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# By default one dtype of each case.
NUMBERS = {f"{case}-{dtype}": (case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)}


@interpreted
@pytest.mark.parametrize(("case", "dtype"), slow_but([*NUMBERS][::4] + [*NUMBERS][3::4], NUMBERS))
def test_numbers(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_numbers(case, dtype, CPU)


@interpreted
def test_a_wrong_ancestor_shows() -> None:
    check_a_wrong_ancestor(CPU)


@interpreted
@pytest.mark.parametrize("length", slow_but(["0"], {str(length): length for length in LENGTHS}))
def test_a_row_does_not_depend_on_the_rest_of_the_pass(length: int) -> None:
    check_independence(length, torch.float32, CPU)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_products(case, dtype, CPU)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    check_product_rows(dtype, CPU)


@interpreted
@pytest.mark.parametrize("family", slow_but(["mistral"], ["llama", "mistral"]))
def test_a_whole_decode(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads; Mistral has a window of 8 tokens. The text is transformers' own, with near-ties shown."""
    from draftsmith.inference.kernels import triton_kernel

    model = tiny_target(family, initializer_range=0.3, num_hidden_layers=1)
    target, calls = Target(model), []
    assert target.masks.packs_all
    stock = triton_kernel.attend_packed
    monkeypatch.setattr(
        triton_kernel, "attend_packed", lambda *args: calls.append(args[3].shape) or stock(*args), raising=True
    )
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE, feature_layers=(1,))
    output = generate(
        target, drafter, prompt, max_new_tokens=6, do_sample=False, tree=DynamicTree(depth=3, top_k=2, num_nodes=6)
    )
    assert output.stats.acceptance_length > 1
    assert {shape[-1] - WORDS for shape in calls} == {0, 1}
    assert len(calls) == output.stats.num_target_forwards
    assert_same_text(model, expected, output.sequences)


@interpreted
@pytest.mark.parametrize("dtype", slow_but({"bfloat16"}, {"bfloat16": torch.bfloat16, "float32": torch.float32}))
def test_batch_invariant_mode(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted batch has the scores of plain decoding, row by row."""
    from draftsmith.inference.kernels import triton_kernel, triton_linear

    target, calls = Target(tiny_target("llama", dtype=dtype, num_hidden_layers=1)).batch_invariant(), set()
    for module, name in ((triton_kernel, "attend_packed"), (triton_linear, "multiply_rows")):
        stock = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, stock=stock, name=name: calls.add(name) or stock(*args))
    prompts = [random_prompt(length, seed=length) for length in (20, 9)]
    assert is_plain(target, prompts, "dynamic:3,3,8", max_new_tokens=6, do_sample=False)
    assert calls == {"attend_packed", "multiply_rows"}


@interpreted
def test_deep_trees_are_refused_in_batch_invariant_mode() -> None:
    mode = SimpleNamespace(is_batch_invariant=True, masks=SimpleNamespace(packs_all=True))
    check_depth(mode, 64)
    with pytest.raises(ValueError, match=r"65 levels deep.* at most 64: choose a smaller tree"):
        check_depth(mode, 65)


@interpreted
def test_what_keeps_torchs_products() -> None:
    """Subclasses, other dtypes, and products of which gradients are computed."""
    from draftsmith.inference.kernels.triton_linear import TritonLinear, use_triton

    subclass = type("Own", (torch.nn.Linear,), {})
    twin = use_triton(torch.nn.Sequential(torch.nn.Linear(8, 4), subclass(4, 4), torch.nn.Linear(4, 4).double()))
    assert [type(part) is TritonLinear for part in twin] == [True, False, False]
    given = torch.zeros(2, 8, requires_grad=True)
    twin[0](given).sum().backward()
    assert torch.equal(given.grad, twin[0].weight.sum(0).expand(2, -1))
