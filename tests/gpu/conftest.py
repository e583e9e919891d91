"""The devices of these tests: each runs on a CPU, as a rehearsal, and on CUDA (`pytest -m gpu`)."""

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


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA_MARKS)])
def device(request: Any) -> torch.device:
    return torch.device(request.param)
