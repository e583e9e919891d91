"""llama.cpp as a rival: the same target as a GGUF file, and its program llama-bench."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.formats.gguf_file import write_gguf
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import to_pairs, write_rope
from draftsmith.inference import Target

# A layer's tensors: transformers' name -> llama.cpp's.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NORMAL, CONTROL = 1, 3  # types of tokens
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_llama(file: Path, target: Target, tokenizer: Any = None) -> None:
    """Writes a Llama; tokenizer: a fast one of transformers that splits texts as SmolLM's does; None = without."""
    config, state = target.text_config, target.model.state_dict()
    rope, factors = write_rope(config)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        **({"tokenizer.ggml.model": "none"} if tokenizer is None else describe_tokenizer(tokenizer)),
        "llama.vocab_size": config.vocab_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        **{f"llama.{key}": value for key, value in rope.items()},
    }
    tensors = {f"{theirs}.weight": state[f"{ours}.weight"] for ours, theirs in ENDS.items()}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    for index in range(config.num_hidden_layers):
        for ours, theirs in LAYER.items():
            weight: Tensor = state[f"model.layers.{index}.{ours}.weight"]
            is_turned = theirs in ("attn_q", "attn_k")
            tensors[f"blk.{index}.{theirs}.weight"] = to_pairs(weight, config.head_dim) if is_turned else weight
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    write_gguf(file, metadata, tensors)


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer and its chat template, as metadata."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids) | {
        place for place, one in tokenizer.added_tokens_decoder.items() if one.special
    }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "tokenizer.ggml.token_type": [CONTROL if place in special else NORMAL for place in range(len(vocabulary))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def measure_llama_cpp(
    program: str, target: Target, *, context: int, rows: int, tokens: int, repeats: int
) -> dict[str, Any]:
    """Plain decoding after `context` tokens, and a pass over some rows (with scores for the last row only), by itself:
    not in turns with others. The threads are torch's.

    Returns:
        a contender as in `sizes.py`'s JSON, with the seconds of that pass.

    Raises:
        ValueError: the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "target.gguf"
        write_llama(file, target)
        options = {"-m": file, "-t": torch.get_num_threads(), "-d": context, "-r": repeats, "-n": tokens, "-p": rows}
        options |= {"-o": "json", "-ngl": 0 if target.device.type == "cpu" else 99}
        words = [program, *(str(word) for option in options.items() for word in option)]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{program} failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    (plain,) = (one for one in found if one["n_gen"])
    (wide,) = (one for one in found if one["n_prompt"])
    return {
        "name": "llama.cpp",
        "dtype": str(target.dtype).removeprefix("torch."),
        "mode": f"build {plain['build_commit']}",
        "tree": "",
        "samples": {1: [{"seconds": one / 1e9 / tokens, "parts": {}} for one in plain["samples_ns"]]},
        "num_rows": rows,
        "seconds_of_rows": wide["avg_ns"] / 1e9,
    }
