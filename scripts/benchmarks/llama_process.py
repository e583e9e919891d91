"""A llama.cpp server in a process of its own: its threads would slow this library's down, and these its.

    python llama_process.py '{"model": FILE, "heads": FILE or null, "depth": 3, "context": 4096, "threads": 1}'

Prints the server's address, or what is wrong, and serves until its standard input ends.
"""

import json
import sys
from typing import Any


def start(*, model: str, heads: str | None, depth: int, context: int, threads: int) -> Any:
    """The server. Options are those of `LlamaCppDecoding`."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = context, 1, 0, -1
    draft = params.speculative.draft
    if heads is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft.mparams.path, draft.n_max, draft.p_min = heads, depth, 0.0
    for pool in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        pool.n_threads = threads
    return xllamacpp.Server(params)


if __name__ == "__main__":
    try:
        server = start(**json.loads(sys.argv[1]))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
    print(server.listening_address, flush=True)
    sys.stdin.read()
