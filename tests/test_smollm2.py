"""SmolLM2-135M-Instruct, where it is installed: its texts in float32 are transformers', here and in llama.cpp; heads
train, and load."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, GenerationStats, Target
from draftsmith.inference.noise import gumbel_noise
from draftsmith.inference.request.chat_template import encode_prompt
from draftsmith.scripts.benchmarks.llama_cpp import write_heads, write_llama
from draftsmith.scripts.shared.model_loading import load_target
from tests.conftest import REPOSITORY
from tests.llama_cpp_server import start_server
from tests.mixed_drafter import MixedDrafter
from tests.scripted_drafter import ScriptedDrafter
from tests.training.runner import Runner, write_conversations

PLACE = Path(os.environ.get("DRAFTSMITH_SMOLLM2", REPOSITORY / "outputs" / "smollm2-135m"))
COMMITTED = sorted((REPOSITORY / "examples" / "heads").glob("smollm2-135m-*"))
QUESTIONS = (
    *("What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Write a line of Python."),
    *("Who wrote Hamlet?", "Count to ten.", "What do cats eat?", "Say hello in Spanish.", "How do birds fly?"),
    *("What is the sun?", "Tell me a joke.", "Give me a recipe for soup.", "What is a prime number?", "Describe rain."),
    *("How old is the Earth?", "What is love?", "Translate 'book' into German.", "Why do we sleep?", "Name a river."),
    "Write a haiku about snow.",
)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0}
NUM_TOKENS = 8

pytestmark = pytest.mark.skipif(
    not PLACE.is_dir(), reason=f"{PLACE} is absent: `make smollm2` makes it; DRAFTSMITH_SMOLLM2 names another folder"
)


class SharedNoise(LogitsProcessor):
    """Makes greedy decoding sample with row b's noise of seed b."""

    def __init__(self, num_padding: Tensor) -> None:
        self.num_padding = num_padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = input_ids.shape[1] - self.num_padding[:, None]
        noise = gumbel_noise(torch.arange(len(places)), places, scores.shape[1])[:, 0]
        return (scores / SAMPLED["temperature"]).log_softmax(-1) + noise


@pytest.fixture(scope="module")
def loaded() -> tuple[Target, Any]:
    return load_target(str(PLACE), dtype="float32")


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Target, Any]) -> list[list[int]]:
    """Without the chat template, whose system prompt would be most of the work."""
    return [loaded[1](text)["input_ids"] for text in QUESTIONS]


@pytest.fixture(scope="module")
def heads(loaded: tuple[Target, Any], tmp_path_factory: pytest.TempPathFactory) -> DraftHeads:
    """EAGLE-3 after three steps of training, from their folder."""
    folder = tmp_path_factory.mktemp("smollm2")
    train = Runner(PLACE, write_conversations(folder / "c.jsonl", count=8), folder / "heads")
    # llama.cpp has neither of the two norms.
    overrides = ["ttt_steps=2", "draft_vocab_size=4096", "fc_norm=false", "norm_output=false"]
    rows = {"max_steps": 3, "per_device_train_batch_size": 2, "num_eval_prompts": 0}
    train(head_overrides=overrides, **rows, target_dtype="float32")
    return DraftHeads.from_pretrained(folder / "heads", target=loaded[0], dtype=torch.float32)


def pad(tokenizer: Any, prompts: list[list[int]]) -> dict[str, Tensor]:
    return tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")


@pytest.fixture(scope="module")
def expected(
    request: pytest.FixtureRequest, loaded: tuple[Target, Any], prompts: list[list[int]]
) -> tuple[dict[str, Any], Tensor]:
    """How to decode, and transformers' replies [20, NUM_TOKENS]."""
    model: Any = loaded[0].model
    batch = pad(loaded[1], prompts)
    noise = [SharedNoise((batch["attention_mask"] == 0).sum(1))] if request.param else []
    texts = model.generate(**batch, max_new_tokens=NUM_TOKENS, do_sample=False, logits_processor=noise)
    return SAMPLED if request.param else {"do_sample": False}, texts[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("expected", "tree"),
    [(False, "dynamic:3,4,8"), (True, "chain:3")],
    indirect=["expected"],
    ids=["greedy", "sampled"],
)
def test_texts_are_those_of_transformers(
    tree: str,
    expected: tuple[dict[str, Any], Tensor],
    loaded: tuple[Target, Any],
    prompts: list[list[int]],
    heads: DraftHeads,
) -> None:
    """Of two prompts alone and of batches of four. True tokens stand among decoys and what the heads draft."""
    options, replies = expected
    target, tokenizer = loaded
    stats = GenerationStats()
    for rows in ((0,), (1,), *(range(first, first + 4) for first in range(0, 20, 4))):
        truth = [torch.cat([torch.tensor(prompts[row]), replies[row]]) for row in rows]
        scripted = ScriptedDrafter(truth, target.vocab_size, feature_layers=heads.feature_layers)
        decoder = Decoder(target, MixedDrafter(scripted, heads), tree=tree)
        batch = pad(tokenizer, [prompts[row] for row in rows])
        seed = {"seed": [*rows]} if options["do_sample"] else {}
        output = decoder.generate(**batch, max_new_tokens=NUM_TOKENS, **options, **seed)
        found = output.sequences[:, batch["input_ids"].shape[1] :]
        assert torch.equal(found, replies[list(rows), : found.shape[1]])
        assert (replies[list(rows), found.shape[1] :] == tokenizer.pad_token_id).all()
        stats += output.stats
    assert stats.acceptance_length > (1.1 if tree == "chain:3" else 1.5)  # a chain has the candidate of one of them


@pytest.mark.parametrize("place", COMMITTED, ids=lambda place: place.name)
def test_committed_heads(place: Path, loaded: tuple[Target, Any]) -> None:
    trained: DraftHeads = DraftHeads.from_pretrained(place, target=loaded[0], dtype=torch.float32)
    prompt = torch.tensor([encode_prompt(loaded[1], [{"role": "user", "content": QUESTIONS[0]}])])
    output = Decoder(loaded[0], trained, tree="chain:3").generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    model: Any = loaded[0].model
    assert torch.equal(output.sequences, model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False))
    assert output.stats.acceptance_length > 1.3


def test_a_chat_in_llama_cpp(loaded: tuple[Target, Any], heads: DraftHeads, tmp_path: Path) -> None:
    target, tokenizer = loaded
    place = tmp_path / "target.gguf"
    write_llama(place, target, tokenizer)
    try:
        server = start_server(place, write_heads(tmp_path, heads, target, place), depth=2)
        messages = [{"role": "user", "content": QUESTIONS[2]}]
        request = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = server.handle_chat_completions(request)
    finally:
        place.unlink()  # half a gigabyte, which pytest would keep
    prompt = torch.tensor([encode_prompt(tokenizer, messages)])
    ours = Decoder(target, heads, tree="chain:2").generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    text = tokenizer.decode(ours.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["timings"]["draft_n"] > 0
