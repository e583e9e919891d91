"""A target and saved heads that several test files share."""

from pathlib import Path

import pytest

from draftsmith.inference import Target
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import target_of


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("llama")


@pytest.fixture
def saved(target: Target, tmp_path: Path) -> Path:
    """Eagle3 heads with a draft vocabulary, saved."""
    tiny_heads("eagle3", target, draft_vocab_size=40).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"
