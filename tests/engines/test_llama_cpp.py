"""llama.cpp's server decodes with our exported heads: its texts, and how much it drafts and accepts, are ours.

`make test-engines` builds the server and runs these; elsewhere LLAMA_SERVER names the program, and LLAMA_CPP the
sources, which have the converter for the target.
"""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.engines.chains import decode_chains
from tests.engines.environments.servers import running_server
from tests.heads.formats.test_llama_cpp_converter import CHECKOUT, convert, copy_target

SERVER = os.environ.get("LLAMA_SERVER", "")
NUM_PROMPTS, MAX_NEW_TOKENS, DEPTH = 12, 64, 4
LEAST_DRAFTED = 600

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (SERVER and CHECKOUT), reason="LLAMA_SERVER and LLAMA_CPP name no llama.cpp: run `make test-engines`"
    ),
    pytest.mark.timeout(1800),
]


@dataclass(frozen=True)
class Counts:
    """Of one text: its tokens, and how many were drafted and accepted."""

    tokens: list[int]
    drafted: int
    accepted: int


def command(target: Path, heads: Path) -> list[str]:
    """Starts a server that computes in float32."""
    words = f"-m {target} -md {heads} --spec-type draft-eagle3 --spec-draft-n-max {DEPTH} --spec-draft-p-min 0"
    words += " --cache-type-k f32 --cache-type-v f32 --spec-draft-type-k f32 --spec-draft-type-v f32 --flash-attn off"
    return [SERVER, *words.split(), *["--ctx-size", "512", "--parallel", "1", "--threads", "1", "--threads-draft", "1"]]


def complete(address: str, prompt: list[int]) -> Counts:
    request = {"prompt": prompt, "n_predict": MAX_NEW_TOKENS, "temperature": 0, "return_tokens": True}
    body = json.dumps({**request, "cache_prompt": False}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/completion", body, headers)) as answer:
        found = json.load(answer)
    timings = found["timings"]
    return Counts(found["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def count_as_the_server(text: list[int], drafts: list[list[int]], end: int) -> Counts:
    """Our chain by the server's rules: the last token before the limit is never drafted, and a token that ends the text
    counts as accepted in the last place of a draft only."""
    done, drafted, accepted = 1, 0, 0
    for draft in drafts:
        draft = draft[: MAX_NEW_TOKENS - done - 1]
        hits = 0
        while text[done + hits : done + hits + 1] == draft[hits : hits + 1] != []:
            if draft[hits] == end and hits + 1 < len(draft):
                break
            hits += 1
        drafted, accepted, done = drafted + len(draft), accepted + hits, done + hits + 1
    return Counts(text, drafted, accepted)


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


def test_the_server_drafts_as_we_do(target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    heads: DraftHeads = DraftHeads.from_pretrained(REPOSITORY / "examples/heads/eagle3", dtype=torch.float32)
    heads.bind(target)
    target_file = convert(copy_target(tmp_path / "target"), tmp_path / "target.gguf")
    known = find_format("gguf", heads.config.head_type).with_target_file(str(target_file))
    (tmp_path / "heads").mkdir()
    known.write(heads.config, heads.state_dict(), target).save(tmp_path / "heads")
    with running_server(command(target_file, tmp_path / "heads/eagle3.gguf"), tmp_path / "log", {}) as address:
        served = [complete(address, prompt) for prompt in prompts]

    ours = decode_chains(target, heads, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    plain = decode_chains(target, None, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    assert ours.texts == plain.texts
    end: Any = target.model.generation_config.eos_token_id  # type: ignore[union-attr]
    pairs = zip(ours.texts, ours.drafts, strict=True)
    assert served == [count_as_the_server(text, drafts, end) for text, drafts in pairs]
    drafted, accepted = sum(one.drafted for one in served), sum(one.accepted for one in served)
    print(f"llama.cpp accepted {accepted} of {drafted} drafts; {[(one.accepted, one.drafted) for one in served]}")
    assert drafted >= LEAST_DRAFTED
