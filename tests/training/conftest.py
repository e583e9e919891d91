"""A tiny chat target, conversations for it, and a runner that trains on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.tiny_targets import tiny_target
from tests.training.runner import (
    SPECIAL,
    TEMPLATE,
    WORDS,
    Runner,
    write_conversations,
)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 60 tokens with a tokenizer of one token per word and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama", vocab_size=60, num_hidden_layers=4, initializer_range=0.2).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:3])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    return write_conversations(tmp_path / "conversations.jsonl")


@pytest.fixture
def train(target_path: Path, conversations: Path, tmp_path: Path) -> Runner:
    return Runner(target_path, conversations, tmp_path / "heads")
