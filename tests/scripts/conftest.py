"""What programs that measure are given: a small target, and prompts."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_targets import tiny_target
from tests.training.conversation_cases import write


@pytest.fixture(scope="session")
def small_chat(chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random target that is quicker than the embedded one, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("small-chat")
    options = {"vocab_size": len(chat_tokenizer), "eos_token_id": chat_tokenizer.eos_token_id, "hidden_size": 64}
    tiny_target("llama", initializer_range=0.1, max_position_embeddings=1024, **options).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"id": str(n), "turns": [f"Count to {n}"]} for n in range(3)]
    return Path(write(tmp_path / "prompts.jsonl", rows))
