"""The device of these tests: CUDA where there is one, with all kinds; else a CPU, as a rehearsal, with one kind."""

from typing import Any

import pytest
import torch

from draftsmith.heads import HEAD_TYPES

HAS_CUDA = torch.cuda.is_available()
KINDS = sorted(HEAD_TYPES) if HAS_CUDA else ["eagle3"]  # the other tests compare texts of all kinds on a CPU


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if HAS_CUDA else "cpu"])
def device(request: Any) -> torch.device:
    return torch.device(request.param)
