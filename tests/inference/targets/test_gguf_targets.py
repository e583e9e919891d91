"""A GGUF file is a target like any other: its weights dequantized, its tokenizer, its place in the heads' config."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.heads.formats.gguf_file import read_gguf, write_gguf
from draftsmith.inference import Target
from draftsmith.inference.targets import files
from draftsmith.scripts.benchmarks.llama_cpp import write_llama
from draftsmith.scripts.shared.model_loading import load_target
from draftsmith.training.features.target_loading import load_first_layers
from draftsmith.training.features.target_options import ModelArguments
from draftsmith.training.options.choices import Shape
from tests.tiny_targets import random_prompt, tiny_target

gguf = pytest.importorskip("gguf", reason="gguf is an optional extra")


@pytest.fixture(scope="module")
def source() -> Any:
    return tiny_target("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def file(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("target") / "tiny.gguf"
    write_llama(place, Target(source))
    metadata, tensors = read_gguf(place)
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [chr(33 + i) for i in range(94)] + ["ab", "cd"] + [f"t{i}" for i in range(32)],
        "tokenizer.ggml.token_type": [1] * 128,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    write_gguf(place, metadata, tensors)
    return place


def test_loads_as_the_model_that_was_written(source: Any, file: Path) -> None:
    target, tokenizer = load_target(str(file), dtype="float32")
    prompt = random_prompt(12)
    torch.testing.assert_close(target.model(prompt).logits, source(prompt).logits)
    assert tokenizer.convert_tokens_to_ids("b") == ord("b") - 33
    assert files.read_generation_config(str(file)).eos_token_id == 2
    assert create_heads("mtp", target).config.target_name_or_path == str(file)


def test_training_reads_its_shape_and_its_first_layers(source: Any, file: Path) -> None:
    assert Shape.read(str(file), trust_remote_code=False).parameters == source.num_parameters()
    first = load_first_layers(ModelArguments(target=str(file), target_dtype="float32", head_type="mtp"), 2)
    assert (first.num_loaded, first.num_layers) == (2, 4)
    assert torch.equal(first.lm_head_weight(), source.lm_head.weight)
