"""The devices of these tests: each runs on a CPU, as a rehearsal, and on CUDA (`pytest -m gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device: `make gpu` where there is one"),
            ],
        ),
    ]
)
def device(request: Any) -> torch.device:
    return torch.device(request.param)
