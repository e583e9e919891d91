"""Batches: rows that end leave, prompts that begin alike are read once, a decoder goes on with what its cache holds."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.heads import create_heads
from draftsmith.inference import (
    Decoder,
    Drafter,
    DynamicTree,
    NgramDrafter,
    SmallModelDrafter,
    StagedDrafter,
    Target,
    chain,
    generate,
)
from draftsmith.inference import prefill as prompt_reading
from draftsmith.inference.cache.kv_cache import KVCache
from tests.lossless.near_tie import assert_same_text
from tests.params import slow_but
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target
from tests.watched_passes import watch_rows

TREE = DynamicTree(depth=3, top_k=3, num_nodes=10)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.9}


@cache
def model_of(family: str = "llama") -> PreTrainedModel:
    return tiny_target(family, initializer_range=0.3)


@cache
def target_of(family: str = "llama") -> Target:
    return Target(model_of(family))


@cache
def _text_of(family: str, prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> Tensor:
    return model_of(family).generate(torch.tensor([prompt]), **dict(options))[0]


def text_of(prompt: Tensor, family: str = "llama", **options: Any) -> Tensor:
    """transformers' own text of one prompt [L], kept for other drafters: greedy."""
    return _text_of(family, tuple(prompt.tolist()), tuple((GREEDY | options).items()))


@cache
def drafter_of(kind: str) -> Drafter | None:
    target = target_of()
    small = tiny_target("llama", seed=1, num_hidden_layers=2)
    makers: dict[str, Any] = {
        "none": lambda: None,
        "n-grams": NgramDrafter,
        "small": lambda: SmallModelDrafter(small),
        "staged": lambda: StagedDrafter(SmallModelDrafter(small)),
    }
    return makers[kind]() if kind in makers else create_heads(kind, target).bind(target)


# One of each sort of state; what every kind promises of its state is the contract's (`test_drafter_contract.py`).
DRAFTERS = ("none", "n-grams", "small", "staged", "eagle3", "hydra", "kangaroo")


def tree_of(kind: str) -> Any:
    return None if kind == "none" else chain(3) if kind == "staged" else TREE


ENDING = {**SAMPLED, "max_new_tokens": 40, "eos_token_id": [8, 21, 50, 61, 77, 100, 110, 120], "pad_token_id": 0}
ENDING_SEEDS = [3, 14, 15, 92, 65]


@cache
def ending_rows() -> list[tuple[Tensor, Tensor]]:
    """Prompts, and the texts that they get by themselves, which end at different places."""
    prompts = [random_prompt(length, seed=length)[0] for length in (4, 17, 11, 6, 9)]
    return [
        (prompt, generate(target_of(), None, prompt[None], seed=[seed], **ENDING).sequences[0])
        for prompt, seed in zip(prompts, ENDING_SEEDS, strict=True)
    ]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_rows_that_have_ended_cost_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at their own EOS; each gets the text it would get by itself, and the batch shrinks when they end."""
    prompts, alone = zip(*ending_rows(), strict=True)
    widths = watch_rows(monkeypatch)
    inputs = pad_prompts(prompts)
    drafter, tree = drafter_of(kind), tree_of(kind)
    output = generate(target_of(), drafter, **inputs, seed=ENDING_SEEDS, tree=tree, **ENDING).sequences
    for row, text in enumerate(alone):
        start = inputs["input_ids"].shape[1] - len(prompts[row])
        assert torch.equal(output[row, start:][: len(text)], text), f"row {row}"
        assert not output[row, start + len(text) :].any()
    assert len({len(text) - len(prompt) for text, prompt in zip(alone, prompts, strict=True)}) > 2
    assert widths[0] == 5
    assert sorted(widths, reverse=True) == widths
    assert len(set(widths)) > 2


@pytest.mark.parametrize(
    ("kind", "family"), [("none", "llama"), ("eagle3", "llama"), ("kangaroo", "llama"), ("n-grams", "gemma3")]
)
def test_what_prompts_share_is_read_once(kind: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reading, "PREFILL_CHUNK", 16)
    start = random_prompt(41, seed=5)[0]
    prompts = [torch.cat([start, random_prompt(length, seed=length)[0]]) for length in (3, 20, 1)]
    expected = [text_of(prompt, family) for prompt in prompts]
    widths = watch_rows(monkeypatch)
    inputs = pad_prompts(prompts)
    output = generate(target_of(family), drafter_of(kind), **inputs, tree=tree_of(kind), **GREEDY).sequences
    for row, text in enumerate(expected):
        assert torch.equal(output[row, inputs["input_ids"].shape[1] - len(prompts[row]) :], text)
    assert widths[:4] == [1, 1, 1, 3]


def test_a_prompt_that_is_read_at_once_reaches_the_drafter_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of recurrent layers. The target drafts for itself, so all drafts are accepted."""
    monkeypatch.setattr(prompt_reading, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(Target, "reads_prompts_whole", True)
    widths, extend = list[int](), SmallModelDrafter.extend

    def watch(*args: Any, **sizes: Any) -> Any:
        widths.append(args[3].shape[1])
        return extend(*args, **sizes)

    monkeypatch.setattr(SmallModelDrafter, "extend", watch)
    inputs = pad_prompts([random_prompt(length, seed=length)[0] for length in (30, 5)])
    output = generate(target_of(), SmallModelDrafter(model_of()), **inputs, tree=chain(3), **GREEDY)
    assert widths[:4] == [8, 8, 8, 6]
    assert output.stats.acceptance_length == 4


def test_several_sequences_of_a_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(60)
    alone = [generate(target_of(), None, prompt, seed=[seed], **SAMPLED).sequences[0] for seed in (4, 5, 6)]
    widths = watch_rows(monkeypatch)
    options = {**SAMPLED, "num_return_sequences": 3, "seed": [4, 5, 6]}
    output = generate(target_of(), drafter_of("eagle3"), prompt, **options).sequences
    assert torch.equal(output, torch.stack(alone))
    assert widths[:2] == [1, 3]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens of prompts each pass has read."""
    plain = KVCache.advance
    found: list[int] = []

    def advance(cache: KVCache, counts: Tensor) -> None:
        found.append(int(counts.sum()))
        plain(cache, counts)

    monkeypatch.setattr(KVCache, "advance", advance)
    return found


@pytest.mark.parametrize("kind", slow_but({"none", "n-grams", "small", "eagle3"}, DRAFTERS))
def test_a_conversation_goes_on(kind: str, read: list[int]) -> None:
    """Only new tokens are read: after each reply comes the next question."""
    decoder = Decoder(target_of(), drafter_of(kind), tree=tree_of(kind))
    text = random_prompt(30, seed=1)
    for turn in range(4):
        expected = text_of(text[0])[None]
        read.clear()
        output = decoder.generate(text, reuse_cache=True, **GREEDY).sequences
        assert_same_text(model_of(), expected, output)
        if turn:
            # The question, the last token, and at most a step that the drafter has not seen.
            assert sum(read) <= 7 + 1 + 4 + 1, read
        text = torch.cat([output, random_prompt(7, seed=turn)], dim=1)
    assert text.shape[1] < decoder._state.cache.capacity


def test_a_reused_cache_may_grow_and_be_cut() -> None:
    decoder = Decoder(target_of("mistral"), None)
    model = model_of("mistral")
    text = random_prompt(90)
    for length, new in ((90, 20), (40, 60), (101, 120), (10, 5), (60, 3)):
        options = {"max_new_tokens": new, "do_sample": False}
        prompt = text[:, :length]
        expected = model.generate(prompt, **options)
        output = decoder.generate(prompt, reuse_cache=True, **options).sequences
        assert_same_text(model, expected, output)
        text = output if output.shape[1] > text.shape[1] else text


def test_instructions_are_held_for_other_batches() -> None:
    """One row's beginning serves three rows, which serve two: some of them begin otherwise."""
    decoder = Decoder(target_of(), drafter_of("eagle3"), tree=TREE)
    start = random_prompt(40, seed=9)[0]
    decoder.generate(start[None], max_new_tokens=1, do_sample=False)
    for lengths in ((3, 9, 1), (2, 5), (4,)):
        prompts = [torch.cat([start, random_prompt(length, seed=length)[0]]) for length in lengths]
        if len(lengths) == 2:
            prompts[1] = random_prompt(20, seed=77)[0]
        expected = [text_of(prompt) for prompt in prompts]
        inputs = pad_prompts(prompts)
        output = decoder.generate(**inputs, reuse_cache=True, **GREEDY)
        for row, text in enumerate(expected):
            found = output.sequences[row, inputs["input_ids"].shape[1] - len(prompts[row]) :]
            assert_same_text(model_of(), text[None], found[None])


@pytest.mark.parametrize("kind", ["none", "small", "eagle3", "kangaroo"])
def test_rows_end_at_the_position_limit(kind: str) -> None:
    """256 positions: drafts run over the limit, texts do not; the other row goes on to its own end."""
    prompts = [random_prompt(length, seed=length)[0] for length in (249, 255, 232)]
    options = {"max_new_tokens": 20, "do_sample": False}
    inputs = pad_prompts(prompts)
    output = generate(target_of(), drafter_of(kind), **inputs, tree=tree_of(kind), **options).sequences
    for row, length in enumerate((7, 1, 20)):
        expected = text_of(prompts[row], max_new_tokens=length)
        found = output[row, 255 - len(prompts[row]) :]
        assert torch.equal(found[: len(expected)], expected)
        assert not found[len(expected) :].any()


def test_an_interrupted_stream_is_gone_on_with() -> None:
    decoder = Decoder(target_of(), drafter_of("eagle3"), tree=TREE)
    prompt = random_prompt(30)
    with decoder.stream(prompt, **GREEDY) as tokens:
        for _ in range(4):
            next(tokens)
        begun = tokens.output.sequences
    options = {**GREEDY, "max_new_tokens": 24 - (begun.shape[1] - 30)}
    rest = decoder.generate(begun, reuse_cache=True, **options)
    assert torch.equal(rest.sequences, model_of().generate(prompt, **GREEDY))
    assert rest.stats.num_target_forwards < 1 + rest.stats.num_new_tokens + 1
