"""vLLM's load client with our server: the drafting that it reports is what our decoder counts."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference import Target, generate
from draftsmith.inference.stats import GenerationStats
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.engines.chains import read_turns
from tests.engines.environments import running
from tests.engines.environments.servers import VLLM_VARIABLES, running_server
from tests.engines.learning import load_trained

NUM_REQUESTS, MAX_TOKENS, NUM_AT_ONCE, DEPTH = 12, 64, 3, 4
TREE = f"chain:{DEPTH}"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def read_counters(address: str) -> dict[str, float]:
    """The server's own counters of drafting, by their names without the prefix."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = [line.split() for line in answer.read().decode().splitlines()]
    prefix, end = "vllm:spec_decode_", "_total"
    totals = [(name.partition("{")[0], float(value)) for name, value in (one for one in lines if len(one) == 2)]
    return {name[len(prefix) : -len(end)]: n for name, n in totals if name.startswith(prefix) and name.endswith(end)}


def test_vllm_bench_serve_reports_our_acceptance(
    vllm_python: str, target: Target, chat_tokenizer: Any, tmp_path: Path
) -> None:
    turns = read_turns(NUM_REQUESTS)
    reply = {"from": "gpt", "value": "word " * MAX_TOKENS}
    conversations = [{"conversations": [{"from": "human", "value": turn[0]["content"]}, reply]} for turn in turns]
    (tmp_path / "sharegpt.json").write_text(json.dumps(conversations), encoding="utf-8")

    command = [sys.executable, str(REPOSITORY / "scripts" / "serve.py"), "--target", str(CHAT_TARGET), "--tree", TREE]
    command += ["--heads", str(REPOSITORY / "examples/heads/eagle3"), "--dtype", "float32", "--threads", "1"]
    with running_server(command, tmp_path / "log", {}) as address:
        client = [vllm_python, str(Path(running.__file__).with_name("vllm_bench.py")), "--base-url", address]
        client += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--temperature", "0"]
        client += ["--dataset-name", "sharegpt", "--dataset-path", "sharegpt.json"]
        client += ["--sharegpt-output-len", str(MAX_TOKENS), "--num-prompts", str(NUM_REQUESTS)]
        client += ["--max-concurrency", str(NUM_AT_ONCE), "--save-result", "--result-filename", "result.json"]
        variables = {**running.clean_environment(), **VLLM_VARIABLES}
        run = subprocess.run(client, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-4000:]
        served = read_counters(address)
    told = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    figures = {name.removeprefix("spec_decode_"): value for name, value in told.items() if "spec_decode" in name}
    print("\nvllm bench serve:", figures)
    assert (told["completed"], told["failed"]) == (NUM_REQUESTS, 0)
    assert f"{'Acceptance length:':<40} {figures['acceptance_length']:<10.2f}" in run.stdout

    heads, stats = load_trained("eagle3", target), GenerationStats()
    for turn in turns:
        ids = torch.tensor([chat_tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]])
        stats += generate(target, heads, ids, tree=TREE, do_sample=False, max_new_tokens=MAX_TOKENS).stats
    accepted = sum(stats.accepted_per_depth)
    assert figures["acceptance_length"] == pytest.approx(stats.acceptance_length, abs=1e-9)
    assert (figures["num_drafts"], figures["draft_tokens"]) == (stats.num_verify_steps, stats.num_drafted)
    assert figures["accepted_tokens"] == accepted
    rates = [count / stats.num_verify_steps for count in stats.accepted_per_depth]
    assert figures["per_position_acceptance_rates"] == pytest.approx(rates, abs=1e-9)
    assert served["num_drafts"] == stats.num_verify_steps
    assert (served["num_draft_tokens"], served["num_accepted_tokens"]) == (stats.num_drafted, accepted)
