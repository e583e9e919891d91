"""vLLM decodes with our exported heads: its texts, its drafts and its acceptance are ours.

`make test-engines` makes vLLM's environment and runs these; elsewhere VLLM_PYTHON names a Python that has vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heads import DraftHeads, create_heads
from heads.formats.registry import find_format
from inference import Target
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.engines.chains import decode_chains, explain_differences

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
NUM_PROMPTS, MAX_NEW_TOKENS, DEPTH = 12, 64, 4
LEAST_STEPS = 150

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON names no Python with vLLM: run `make test-engines`"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(CHAT_TARGET, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(CHAT_TARGET)
    lines = (REPOSITORY / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    turns = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]
    return [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
        for turn in turns
    ]


def make_heads(name: str, target: Target) -> DraftHeads:
    """Trained heads of the repository, or the same with other settings, which then draft worse, but by the same rules
    everywhere."""
    if name in ("eagle", "eagle3"):
        heads: DraftHeads = DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / name, dtype=torch.float32)
        return heads.bind(target)
    trained = make_heads("eagle3", target)
    same = {"feature_layers": trained.config.feature_layers}
    if name == "parallel":  # the trained layer drafts the first token, and the masks what they happen to
        settings = {"draft_vocab_size": trained.config.draft_vocab_size, "num_depths": DEPTH, "num_layers": 1}
    else:
        settings = {"full vocabulary": {}, "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}}[name]
    heads = create_heads("parallel" if name == "parallel" else "eagle3", target, **same, **settings)
    state = heads.state_dict()
    kept = {key: x for key, x in trained.state_dict().items() if key in state and state[key].shape == x.shape}
    heads.load_state_dict(state | kept)
    return heads.eval()


def run_vllm(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "job.json", folder / "result.json"
    files[0].write_text(json.dumps(job), encoding="utf-8")
    worker = Path(__file__).with_name("vllm_worker.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    run = subprocess.run(
        [VLLM_PYTHON, str(worker), *map(str, files)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(files[1].read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("name", ["eagle3", "full vocabulary", "fc_norm", "norm_output", "eagle", "parallel"])
def test_vllm_drafts_as_we_do(name: str, target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    heads = make_heads(name, target)
    kind = str(heads.config.head_type)
    exported = find_format("vllm", kind).write(heads.config, heads.state_dict(), target)
    (tmp_path / "heads").mkdir()
    exported.save(tmp_path / "heads")
    result = run_vllm(
        {
            "target": str(CHAT_TARGET),
            "heads": str(tmp_path / "heads"),
            "method": "eagle" if kind == "eagle" else "eagle3",
            "options": {"parallel_drafting": True} if kind == "parallel" else {},
            "num_drafts": DEPTH,
            "prompts": prompts,
            "max_new_tokens": MAX_NEW_TOKENS,
            "max_length": 512,
        },
        tmp_path,
    )
    ours = decode_chains(target, heads, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    plain = decode_chains(target, None, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    assert ours.texts == plain.texts
    assert [text["tokens"] for text in result["texts"]] == ours.texts
    assert ours.num_steps >= LEAST_STEPS
    differences = explain_differences(target, heads, prompts, ours, [text["drafts"] for text in result["texts"]])
    print(f"{name}: {ours.num_steps} steps, {len(differences)} with other drafts", *differences, sep="\n")
    compare_acceptance(ours.stats.accepted_histogram, result["metrics"], has_ties=bool(differences))


def compare_acceptance(histogram: list[int], metrics: dict[str, Any], *, has_ties: bool) -> None:
    per_position = [sum(histogram[depth:]) for depth in range(1, DEPTH + 1)]
    theirs = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]
    print("accepted per position:", per_position, theirs)
    if not has_ties:
        assert theirs == per_position


def test_plain_vllm_writes_our_texts(target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    job = {"target": str(CHAT_TARGET), "heads": None, "method": None, "prompts": prompts}
    result = run_vllm({**job, "max_new_tokens": MAX_NEW_TOKENS, "max_length": 512}, tmp_path)
    plain = decode_chains(target, None, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    assert [text["tokens"] for text in result["texts"]] == plain.texts
