"""The Triton kernels in Triton's interpreter, on the CPU: numbers, independence of the rest of a pass, whole decodes.

The interpreter has to be chosen before Triton is imported, so `test_the_others_in_a_process_of_their_own` runs the
other tests. The interpreter does not show how a GPU rounds inside a product, nor races or speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.inference import DynamicTree, Target, generate
from draftsmith.inference.kernels.packed_masks import WORDS
from tests.conftest import REPOSITORY
from tests.inference.kernels.kernel_checks import (
    CASES,
    LENGTHS,
    check_a_wrong_ancestor,
    check_independence,
    check_numbers,
)
from tests.lossless.near_tie import assert_same_text
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
