"""The devices of these tests: each runs on CUDA (`pytest -m gpu`), and on a CPU, as a rehearsal, with one kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch finds no CUDA device: `make gpu` where there is one"
    ),
]


REHEARSED = "eagle3"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA_MARKS)])
def device(request: Any) -> torch.device:
    kind = request.node.callspec.params["kind"]
    if request.param == "cpu" and kind != REHEARSED:
        pytest.skip(f"on a CPU {REHEARSED} rehearses for all kinds, whose texts the other tests compare there")
    return torch.device(request.param)
