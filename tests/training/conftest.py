"""A tiny chat target, conversations for it, and a runner that trains on them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.inference import Target
from tests.conftest import CHAT_TARGET
from tests.tiny_targets import tiny_target
from tests.training.runner import Runner, save_chat_target, write_conversations


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 60 tokens with a tokenizer of one token per word and a chat template."""
    return save_chat_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target() -> Target:
    """A frozen tiny Llama, without a tokenizer."""
    return Target(tiny_target("llama").requires_grad_(False))


@pytest.fixture(scope="module")
def word_tokenizer(target_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(target_path)


@pytest.fixture
def tokenizer() -> Any:
    """The embedded target's, one of its own for each test, which may give it another template."""
    return AutoTokenizer.from_pretrained(CHAT_TARGET)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    return write_conversations(tmp_path / "conversations.jsonl")


@pytest.fixture
def train(target_path: Path, conversations: Path, tmp_path: Path) -> Runner:
    return Runner(target_path, conversations, tmp_path / "heads")
