"""Somebody else's EAGLE-3 heads decode here, are trained further, and are served by vLLM.

tests/training/run/test_imported_heads.py goes the same way with tiny heads, without vLLM.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.scripts import export_heads, import_heads
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.engines.chains import Texts, compare_with_vllm, decode_chains
from tests.engines.learning import load_trained
from tests.training.runner import Runner

DEPTH = 4

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def write_as_specforge(heads: DraftHeads, folder: Path) -> None:
    """A published folder: a pickle, a config of Llama keys, a copy of the embeddings, and layer ids that count from
    the layer after."""
    folder.mkdir()
    target = heads.target
    shape = AutoConfig.from_pretrained(CHAT_TARGET).to_dict()
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
    config = {
        **{key: shape[key] for key in (*keys, "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": heads.config.intermediate_size,
        "draft_vocab_size": heads.config.draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in heads.feature_layers],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    embedding: Any = target.embed_tokens
    torch.save({**heads.state_dict(), "embed_tokens.weight": embedding.weight.detach()}, folder / "pytorch_model.bin")


def test_the_way_of_published_heads(target: Target, texts: Texts, run_vllm: Callable[..., Any], tmp_path: Path) -> None:
    theirs = load_trained("eagle3", target)
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": texts.max_new_tokens}
    known = decode_chains(target, theirs, texts.prompts, **options).stats
    published, imported, trained, served = (tmp_path / name for name in ("published", "imported", "trained", "served"))
    write_as_specforge(theirs, published)

    words = ["--checkpoint", str(published), "--target", str(CHAT_TARGET), "--output", str(imported)]
    import_heads.main(words)  # the usual layers, counted from the layer after
    heads: DraftHeads = DraftHeads.from_pretrained(imported, dtype=torch.float32)
    found = decode_chains(target, heads.bind(target), texts.prompts, **options)
    assert found.texts == texts.replies
    assert found.stats.accepted_histogram == known.accepted_histogram
    print("acceptance length as published and as imported:", known.acceptance_length, found.stats.acceptance_length)

    train = Runner(CHAT_TARGET, REPOSITORY / "examples/conversations.jsonl.gz", trained)
    start = {"head_type": None, "head_overrides": None, "init_heads": imported, "target_dtype": "float32"}
    train(**start, max_samples=160, validation_fraction=0.1, max_length=256, max_steps=8, learning_rate=2e-4)
    words = ["--heads", str(trained), "--target", str(CHAT_TARGET), "--format", "vllm", "--output", str(served)]
    export_heads.main(words)

    heads = DraftHeads.from_pretrained(trained, dtype=torch.float32)
    assert not torch.equal(heads.state_dict()["fc.weight"], theirs.state_dict()["fc.weight"])
    compare_with_vllm(run_vllm, heads.bind(target), texts, DEPTH, heads=str(served), method="eagle3")
