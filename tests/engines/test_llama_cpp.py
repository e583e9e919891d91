"""llama.cpp's server decodes with our exported heads: its texts, and how much it drafts and accepts, are ours."""

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Target
from draftsmith.scripts.benchmarks.llama_cpp import write_heads, write_llama
from tests.engines.chains import decode_chains, read_turns, write_texts
from tests.engines.learning import learn_by_heart, load_trained
from tests.llama_cpp_server import start_server

NUM_PROMPTS, MAX_NEW_TOKENS, DEPTH = 5, 48, 4
LEAST_DRAFTED, LEAST_ACCEPTED = 150, 10


@dataclass(frozen=True)
class Counts:
    """Of one text: its tokens, and how many were drafted and accepted."""

    tokens: list[int]
    drafted: int
    accepted: int


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
def prompts(chat_tokenizer: Any) -> list[list[int]]:
    turns = read_turns(NUM_PROMPTS)
    return [chat_tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]


def compare_with_the_server(
    heads: DraftHeads, prompts: list[list[int]], tokenizer: Any, folder: Path, *, method: str
) -> tuple[int, int]:
    """The numbers of drafted and accepted tokens of all texts, which are ours."""
    target, target_file = heads.target, folder / "target.gguf"
    write_llama(target_file, target, tokenizer)
    heads_file = write_heads(folder, heads, target, target_file)
    server = start_server(target_file, heads_file, depth=DEPTH, method=method)
    served = [complete(server.listening_address, prompt) for prompt in prompts]

    ours = decode_chains(target, heads, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    plain = decode_chains(target, None, prompts, depth=DEPTH, max_new_tokens=MAX_NEW_TOKENS)
    assert ours.texts == plain.texts
    end: Any = target.model.generation_config.eos_token_id
    pairs = zip(ours.texts, ours.drafts, strict=True)
    assert served == [count_as_the_server(text, drafts, end) for text, drafts in pairs]
    drafted, accepted = sum(one.drafted for one in served), sum(one.accepted for one in served)
    print(f"llama.cpp accepted {accepted} of {drafted} drafts; {[(one.accepted, one.drafted) for one in served]}")
    return drafted, accepted


def test_the_server_drafts_as_we_do(
    target: Target, chat_tokenizer: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    heads = load_trained("eagle3", target)
    drafted, _ = compare_with_the_server(heads, prompts, chat_tokenizer, tmp_path, method="EAGLE3")
    assert drafted >= LEAST_DRAFTED


@pytest.mark.parametrize("kind", ["block", "dflash2"])
def test_blocks(kind: str, target: Target, chat_tokenizer: Any, prompts: list[list[int]], tmp_path: Path) -> None:
    """Heads that know two of four texts by heart; llama.cpp fits 15 candidates into the width of this target."""
    settings = {"selector_top_k": 15, "selector_rank": 32} if kind == "dflash2" else {}
    heads = create_heads(kind, target, block_size=DEPTH + 1, num_layers=2, num_anchors=32, **settings)
    texts = write_texts(target, prompts[:4], MAX_NEW_TOKENS)
    learn_by_heart(heads, texts, num_steps=25)
    _, accepted = compare_with_the_server(heads, texts.prompts, chat_tokenizer, tmp_path, method="DFLASH")
    assert accepted >= LEAST_ACCEPTED
