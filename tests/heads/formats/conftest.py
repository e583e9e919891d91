"""The target of these tests: as deep as the authors' EAGLE-3 needs."""

import pytest

from draftsmith.inference import Target
from tests.heads.formats.round_trip import NUM_LAYERS
from tests.tiny_targets import target_of


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama", num_hidden_layers=NUM_LAYERS)
