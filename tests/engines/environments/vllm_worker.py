"""Runs in vLLM's own environment: decodes prompts with exported heads and records what vLLM drafts.

    python vllm_worker.py JOB.json RESULT.json

The job: target, heads (folders; heads null = the target by itself), method, num_drafts, prompts (token ids),
max_new_tokens, options (of `speculative_config`), engine (further arguments of `LLM`). The result: the texts, each
draft with the request it belongs to, and the accepted tokens per position as vLLM's metrics count them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options: dict[str, Any] = {}
    if job["method"]:
        speculation = {"method": job["method"], "num_speculative_tokens": job["num_drafts"], **job.get("options", {})}
        if job["heads"]:
            speculation["model"] = job["heads"]
        options["speculative_config"] = speculation
    engine = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=job["max_length"],
        max_num_seqs=1,  # one text at a time, so that drafts belong to it
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        async_scheduling=False,
        **options,
        **job.get("engine", {}),
    )
    drafts: list[list[int]] = []
    if job["method"]:
        record_drafts(engine, drafts)
    sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], detokenize=False)
    texts = []
    for prompt in job["prompts"]:
        drafts.clear()
        (output,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        texts.append({"tokens": list(output.outputs[0].token_ids), "drafts": [*drafts]})
    metrics = {}
    for metric in engine.get_metrics():
        if "spec_decode" in metric.name:
            metrics[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    Path(sys.argv[2]).write_text(json.dumps({"texts": texts, "metrics": metrics}), encoding="utf-8")


def record_drafts(engine: Any, drafts: list[list[int]]) -> None:
    """Every call of the drafter appends the tokens that it proposes."""
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None) or runner.speculator  # of the first runner, or of the second
    propose = drafter.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        tokens = propose(*args, **kwargs)
        drafts.append((tokens.tolist() if hasattr(tokens, "tolist") else list(tokens))[0])
        return tokens

    drafter.propose = recorded


if __name__ == "__main__":
    main()
