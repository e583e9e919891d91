"""What programs that measure are given: a small target, and prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_targets import tiny_target


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
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "turns": [f"Count to {n}"]}) + "\n" for n in range(3)))
    return path
