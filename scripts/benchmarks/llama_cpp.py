"""llama.cpp as a contender, through the package xllamacpp: its server decodes the same prompts."""

import json
import sys
import time
import weakref
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.gguf_file import write_gguf
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import LAYER_SIZES, OF_LAYER, to_pairs, write_rope
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from draftsmith.scripts.benchmarks import llama_process
from draftsmith.scripts.measuring.measure import Batch, Run, Settings
from draftsmith.training.data.reply_spans import find_special_ids

NORMAL, CONTROL = 1, 3  # types of tokens
SIZES = {
    "vocab_size": "vocab_size",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "head_dim",
    **LAYER_SIZES,
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_llama(file: Path, target: Target, tokenizer: Any = None) -> None:
    """Writes a Llama in its own dtype; tokenizer: a fast one of transformers that splits texts as SmolLM's does; None =
    without."""
    config, state = target.text_config, target.model.state_dict()
    rope, factors = write_rope(config)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        **({"tokenizer.ggml.model": "none"} if tokenizer is None else describe_tokenizer(tokenizer)),
        **{f"llama.{theirs}": getattr(config, ours) for theirs, ours in SIZES.items()},
        **{f"llama.{key}": value for key, value in rope.items()},
    }
    layers = range(config.num_hidden_layers)
    names = {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for i in layers for ours, theirs in OF_LAYER.items()}
    tensors: dict[str, Tensor] = {theirs: state[ours] for ours, theirs in (ENDS | names).items()}
    for name in tensors:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = to_pairs(tensors[name], config.head_dim)
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    write_gguf(file, metadata, tensors)


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer and its chat template, as metadata."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = find_special_ids(tokenizer)
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


def write_heads(folder: Path, heads: DraftHeads, target: Target, tokenizer_gguf: Path) -> Path:
    """Exports heads as `draftsmith export --format gguf` does.

    Raises:
        ValueError: llama.cpp has no place for something in these heads.
    """
    known = find_format("gguf", heads.config.head_type).with_target_file(str(tokenizer_gguf))
    exported = known.write(heads.config, heads.state_dict(), target)
    folder.mkdir(parents=True, exist_ok=True)
    exported.save(folder)
    return folder / exported.file


class LlamaCppDecoding:
    """A llama.cpp server in another process, on torch's number of threads, which takes prompts of token ids one at a
    time. It ends with this object.

    Args:
        model: the target's GGUF file.
        heads: EAGLE-3 heads in GGUF, which draft chains of `depth` tokens; None = plain decoding.
        context: the most tokens of a text, its prompt included.

    Raises:
        ValueError: xllamacpp is not installed, or it cannot load a file.
    """

    def __init__(self, model: Path, heads: Path | None = None, *, depth: int = 3, context: int = 4096) -> None:
        if find_spec("xllamacpp") is None:
            raise ValueError("llama.cpp needs xllamacpp: pip install xllamacpp")
        options = {"depth": depth, "context": context, "threads": torch.get_num_threads()}
        files = {"model": str(model), "heads": None if heads is None else str(heads)}
        program = [sys.executable, llama_process.__file__, json.dumps({**files, **options})]
        self.process = Popen(program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        lines = []
        weakref.finalize(self, _end, self.process)
        for line in self.process.stdout:
            lines.append(line.strip())
            if line.startswith("http"):
                break
        else:
            reason = " ".join(lines) or f"its process ended with {self.process.wait()}"
            raise ValueError(f"llama.cpp cannot load {model} with {heads or 'no heads'}: {reason}")
        self.address = lines[-1]

    def __call__(self, batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
        request: dict[str, Any] = {
            "prompt": batch.input_ids[0].tolist(),
            "n_predict": max_new_tokens or settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed + batch.prompts[0].index,
            "return_tokens": True,
            "cache_prompt": False,
        }
        if settings.is_sampled:
            request |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        body, header = json.dumps(request).encode(), {"Content-Type": "application/json"}
        start = time.perf_counter()
        with urlopen(Request(f"{self.address}/completion", body, header)) as answer:
            found = json.load(answer)
        seconds = time.perf_counter() - start
        tokens: list[int] = found["tokens"]
        return Run([tokens], seconds, len(tokens) - found["timings"].get("draft_n_accepted", 0))


def _end(process: Popen[str]) -> None:
    """Closes the input that keeps the server running."""
    try:
        process.communicate(timeout=10)
    except TimeoutExpired:
        process.kill()
        process.wait()
