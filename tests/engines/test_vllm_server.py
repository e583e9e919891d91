"""vLLM's OpenAI-compatible server with our exported heads: eight clients stream at the same time."""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from draftsmith.inference import Target, generate
from tests.conftest import CHAT_TARGET
from tests.engines.chains import read_turns
from tests.engines.environments.servers import running_vllm
from tests.engines.learning import load_trained

NUM_CLIENTS, MAX_TOKENS = 8, 48

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def test_eight_clients_stream_the_targets_texts(
    vllm_python: str, target: Target, chat_tokenizer: Any, exported: Callable[..., Path], tmp_path: Path
) -> None:
    heads, turns = load_trained("eagle3", target), read_turns(NUM_CLIENTS)
    speculation = {"method": "eagle3", "model": str(exported(heads)), "num_speculative_tokens": 4}
    words = [str(CHAT_TARGET), "--served-model-name", "target", "--speculative-config", json.dumps(speculation)]
    words += ["--dtype", "float32", "--max-model-len", "512"]
    with running_vllm(vllm_python, words, tmp_path / "log") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

        def stream(messages: list[dict[str, str]]) -> str:
            chunks = client.chat.completions.create(
                model="target", messages=messages, temperature=0, max_tokens=MAX_TOKENS, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            served = list(pool.map(stream, turns))
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            metrics = answer.read().decode()

    for messages, text in zip(turns, served, strict=True):
        inputs = chat_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = generate(target, heads, **inputs, max_new_tokens=MAX_TOKENS, do_sample=False, tree="chain:4")
        new = output.sequences[0, inputs["input_ids"].shape[1] :]
        assert text == chat_tokenizer.decode(new, skip_special_tokens=True)
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted[0].rpartition(" ")[2]) > 0
