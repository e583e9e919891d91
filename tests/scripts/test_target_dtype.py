"""Programs load a target in the dtype that the processor computes fast in; training says what is slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.scripts.shared import model_loading
from tests.conftest import CHAT_TARGET


@pytest.mark.parametrize(("is_fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_float32_on_a_cpu_without_bfloat16(
    is_fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: is_fast)
    target, _ = model_loading.load_target(str(CHAT_TARGET), device="cpu")
    assert target.dtype == expected
    assert ("--dtype bfloat16 keeps the dtype of its weights" in caplog.text) is not is_fast


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"keeps_dtype": True}], ids=str)
def test_a_dtype_that_is_named_or_written_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: False)
    assert model_loading.load_target(str(CHAT_TARGET), device="cpu", **options)[0].dtype == torch.bfloat16


def test_processes_of_one_run_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: False)
    assert model_loading.resolve_dtype(str(CHAT_TARGET), "auto", "cpu") == "float32"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert model_loading.resolve_dtype(str(CHAT_TARGET), "auto", "cpu") == "auto"
