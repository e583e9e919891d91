"""Which hidden states a pass is asked for."""

from __future__ import annotations

import pytest

from draftsmith.inference.targets import model_config


@pytest.mark.parametrize(("takes_lists", "expected"), [(True, [1, 3]), (False, True)])
def test_requested_states(takes_lists: bool, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers counts the layers of a list otherwise, all states are asked for."""
    monkeypatch.setattr(model_config, "_TAKES_CHOSEN_STATES", takes_lists)
    assert model_config.request_states([3, 1, 3]) == expected
    assert model_config.request_states([]) is False
