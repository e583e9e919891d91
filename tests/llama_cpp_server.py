"""llama.cpp's server, in this process: the bindings xllamacpp come prebuilt."""

from pathlib import Path
from typing import Any

import pytest


def start_server(target: Path, heads: Path, *, depth: int, method: str = "EAGLE3") -> Any:
    """A server, at `listening_address`, that computes in float32 on one thread, and drafts `depth` tokens with heads.
    It lives as long as what is returned.

    Args:
        method: EAGLE3 or DFLASH.
    """
    llama = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: `make llama-cpp` does it")
    params = llama.CommonParams()
    params.model.path = str(target)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 512, 1, False, 0
    drafts = params.speculative.draft
    drafts.mparams.path, drafts.n_max, drafts.p_min = str(heads), depth, 0.0
    params.speculative.types = [getattr(llama.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{method}")]
    for part in (params, drafts):
        part.cache_type_k = part.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = 1
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return llama.Server(params)
