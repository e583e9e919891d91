"""Batches: rows that end leave, prompts that begin alike are read once, a decoder goes on with what its cache holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    sequences: Tensor = model_of(family).generate(torch.tensor([prompt]), **dict(options))
    return sequences[0]


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


@pytest.mark.parametrize("has_negative_prompts", [False, True])
def test_guidance_is_each_rows_own(has_negative_prompts: bool) -> None:
    prompts = random_prompt(6, batch_size=3, seed=4)
    negative = random_prompt(4, batch_size=3, seed=5)

    def options(rows: slice) -> dict[str, Any]:
        more = {"negative_prompt_ids": negative[rows]} if has_negative_prompts else {}
        return {"max_new_tokens": 10, "do_sample": False, "guidance_scale": 1.7, **more}

    alone = [
        model_of().generate(prompts[row : row + 1], **options(slice(row, row + 1)))[0] for row in range(len(prompts))
    ]
    found = generate(target_of(), drafter_of("n-grams"), prompts, **options(slice(None))).sequences
    assert_same_text(model_of(), torch.stack(alone), found)


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in DRAFTERS), ("n-grams", "gemma3")])
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
    assert text.shape[1] < decoder._state.cache.capacity  # type: ignore[union-attr]


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


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_instructions_are_held_for_other_batches(kind: str) -> None:
    """One row's beginning serves three rows, which serve two: some of them begin otherwise."""
    decoder = Decoder(target_of(), drafter_of(kind), tree=tree_of(kind))
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


@pytest.mark.parametrize("kind", DRAFTERS)
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


def test_a_long_held_row_does_not_slow_down_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's text all but fills the positions, the other one is new: the rest is read in whole chunks."""
    monkeypatch.setattr(prompt_reading, "PREFILL_CHUNK", 64)
    decoder = Decoder(target_of(), drafter_of("eagle3"), tree=TREE)
    first = random_prompt(248, seed=1)
    first = decoder.generate(first, max_new_tokens=4, do_sample=False).sequences[0]
    prompts = [first, random_prompt(150, seed=2)[0]]
    expected = [model_of().generate(prompt[None], max_new_tokens=4, do_sample=False)[0] for prompt in prompts]
    output = decoder.generate(**pad_prompts(prompts), reuse_cache=True, max_new_tokens=4, do_sample=False)
    assert torch.equal(output.sequences[0], expected[0])
    assert torch.equal(output.sequences[1, 102:], expected[1])
    assert output.stats.num_target_forwards <= 3 + 4


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


def start_and_drop(decoder: Decoder, prompt: Tensor) -> None:
    stream = decoder.stream(prompt, **GREEDY)
    del stream


NOT_READ: dict[str, Callable[[Decoder, Tensor], Any]] = {
    "bad seed": lambda decoder, prompt: decoder.generate(prompt, seed="one", **SAMPLED),
    "seeds of other rows": lambda decoder, prompt: decoder.generate(prompt, seed=[1, 2], **SAMPLED),
    "bad seed of a stream": lambda decoder, prompt: decoder.stream(prompt, seed=[1, 2], **SAMPLED),
    "too long": lambda decoder, _: decoder.generate(random_prompt(400), **GREEDY),
    "an option": lambda decoder, prompt: decoder.generate(prompt, num_beams=2, **GREEDY),
    "an id": lambda decoder, prompt: decoder.generate(prompt + 1000, reuse_cache=True, **GREEDY),
    "on_step": lambda decoder, prompt: decoder.generate(prompt.repeat(2, 1), on_step=print, **GREEDY),
    "a stream of rows": lambda decoder, prompt: decoder.stream(prompt.repeat(2, 1), reuse_cache=True, **GREEDY),
    "closed": lambda decoder, prompt: decoder.stream(prompt, **GREEDY).close(),
    "closed, to reuse": lambda decoder, prompt: decoder.stream(prompt, reuse_cache=True, **GREEDY).close(),
    "another size, closed": lambda decoder, prompt: decoder.stream(prompt, max_new_tokens=300).close(),
    "dropped": start_and_drop,
}


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in NOT_READ.items()])
def test_calls_that_read_no_prompt_lose_no_text(call: Callable[[Decoder, Tensor], Any], read: list[int]) -> None:
    """They are refused, or their stream is not read."""
    decoder, prompt = Decoder(target_of(), drafter_of("eagle3"), tree=TREE), random_prompt(60)
    text = decoder.generate(prompt, **GREEDY).sequences
    with suppress(ValueError, TypeError):
        call(decoder, prompt)
    assert decoder.holds_text
    longer = torch.cat([text, random_prompt(3, seed=1)], dim=1)
    read.clear()
    output = decoder.generate(longer, reuse_cache=True, **GREEDY)
    assert torch.equal(output.sequences, model_of().generate(longer, **GREEDY))
    assert sum(read) <= 3 + 1 + 4 + 1


def test_a_drafter_that_cannot_copy_rows() -> None:
    """Its batches keep their rows; going on is refused."""

    class Fixed(NgramDrafter):
        can_copy_rows = False

    prompts = [random_prompt(length, seed=length)[0] for length in (40, 44)]
    expected = [text_of(prompt) for prompt in prompts]
    output = generate(target_of(), Fixed(), **pad_prompts(prompts), **GREEDY).sequences
    assert torch.equal(output[0, 4:], expected[0])
    assert torch.equal(output[1], expected[1])
    with pytest.raises(ValueError, match=r"reuse_cache needs a drafter .* Fixed cannot copy rows"):
        Decoder(target_of(), Fixed()).generate(prompts[0][None], reuse_cache=True, **GREEDY)
