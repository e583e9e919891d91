"""Hostile input: a clear error or the right text, never a hang, and nothing stale for the next call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from draftsmith.inference import Decoder, SmallModelDrafter, chain, generate
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("llama", initializer_range=0.3)
PROMPT = random_prompt(6)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
TRUTH = MODEL.generate(PROMPT, **GREEDY)
TREES = {"plain": None, "dynamic": "dynamic"}
TEXT = MODEL.generate(PROMPT, max_new_tokens=40, do_sample=False)[0]


def scripted() -> ScriptedDrafter:
    return ScriptedDrafter([TEXT], VOCAB_SIZE, is_strict=False)  # other texts are drafted for, too


def decoder_of(tree: str) -> Decoder:
    return Decoder(MODEL, None if tree == "plain" else scripted(), tree=TREES[tree])


def check_next_call(decoder: Decoder) -> None:
    for reuse_cache in (True, False):
        assert torch.equal(decoder.generate(PROMPT, reuse_cache=reuse_cache, **GREEDY).sequences, TRUTH)


@contextmanager
def nan_from(position: int, *, is_last: bool = False, model: Any = MODEL) -> Iterator[None]:
    """Hidden states at this position and later are NaN, from the first layer on (so keys and values are, too), or
    only after the last layer."""

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        late = kwargs["position_ids"] >= position
        if is_last:
            output.last_hidden_state = output.last_hidden_state.masked_fill(late[..., None], float("nan"))
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden.masked_fill(late[..., None], float("nan"))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    place = model.model if is_last else model.model.layers[0]
    hook = place.register_forward_hook(spoil, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("inputs", "mask", "match"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, "empty"),
        (torch.zeros(0, 3, dtype=torch.long), None, "empty"),
        (torch.tensor([[5, VOCAB_SIZE]]), None, r"token 1 of row 0 is 128; this target has the ids 0 to 127"),
        (torch.tensor([[5, -100, 7]]), None, r"token 1 of row 0 is -100"),
        (torch.tensor([[5, 6], [9, 500]]), torch.tensor([[1, 1], [0, 1]]), r"token 0 of row 1 is 500"),
        (torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), "row 0 of the prompt is all padding"),
        (torch.tensor([5, 6]), None, r"input_ids has shape \(2,\)"),
        (torch.tensor([[5.0, 6.0]]), None, r"input_ids is of dtype torch.float32"),
        (torch.tensor([[5, 6]]), torch.tensor([[1, 1, 1]]), r"attention_mask has shape \(1, 3\)"),
        (random_prompt(256), None, "256 tokens.*fewer than 256"),
    ],
)
def test_prompts_that_are_refused(inputs: Tensor, mask: Tensor | None, match: str) -> None:
    decoder = decoder_of("dynamic")
    decoder.generate(PROMPT, **GREEDY)
    with pytest.raises(ValueError, match=match):
        decoder.generate(inputs, mask, **GREEDY)
    check_next_call(decoder)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("prompt", [[7], [3, 3, 3, 3], [3]], ids=["one token", "all EOS", "only EOS"])
def test_short_and_strange_prompts(tree: str, prompt: list[int]) -> None:
    inputs = torch.tensor([prompt])
    options = {**GREEDY, "eos_token_id": 3, "pad_token_id": 0}
    expected = MODEL.generate(inputs, **options)
    drafter = None if tree == "plain" else ScriptedDrafter([expected[0]], VOCAB_SIZE)
    assert torch.equal(generate(MODEL, drafter, inputs, tree=TREES[tree], **options).sequences, expected)


@pytest.mark.parametrize("tree", TREES)
def test_a_target_that_ends_at_once(tree: str) -> None:
    decoder = decoder_of(tree)
    output = decoder.generate(PROMPT, eos_token_id=int(TRUTH[0, 6]), pad_token_id=0, **GREEDY)
    assert torch.equal(output.sequences, TRUTH[:, :7])
    assert output.stats.num_target_forwards == 1
    assert output.stats.acceptance_length == 1.0
    check_next_call(decoder)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("limit", [{"max_new_tokens": 1}, {"max_length": 7}], ids=["new", "all"])
def test_budgets_of_one_token(tree: str, limit: dict[str, int]) -> None:
    decoder = decoder_of(tree)
    assert torch.equal(decoder.generate(PROMPT, do_sample=False, **limit).sequences, TRUTH[:, :7])
    check_next_call(decoder)


@pytest.mark.parametrize("tree", TREES)
def test_no_budget_at_all(tree: str) -> None:
    decoder = decoder_of(tree)
    with pytest.raises(ValueError, match="max_new_tokens"):
        decoder.generate(PROMPT, max_new_tokens=0)
    check_next_call(decoder)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("begin", "is_last"), [(0, False), (4, False), (4, True)])
def test_nan_logits(tree: str, do_sample: bool, begin: int, is_last: bool) -> None:
    """From the first pass on, or only from a later position on; keys and values of drafts spoil what is before them."""
    decoder = decoder_of(tree)
    count = r"\d+" if begin and not is_last and tree != "plain" else str(6 + begin)
    complaint = rf"no token can follow the {count} tokens of row 0.*NaN"
    with nan_from(5 + begin, is_last=is_last), pytest.raises(ValueError, match=complaint):
        decoder.generate(PROMPT, max_new_tokens=12, do_sample=do_sample, seed=0)
    check_next_call(decoder)


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_nan_logits_under_every_rule(acceptance: str) -> None:
    decoder = Decoder(MODEL, scripted(), tree=chain(3), acceptance=acceptance)

    with nan_from(9), pytest.raises(ValueError, match="no token can follow"):
        decoder.generate(PROMPT, max_new_tokens=12, do_sample=True, seed=0)


def test_a_small_model_that_overflowed_once_drafts_again() -> None:
    small = tiny_target("llama", initializer_range=0.3)
    decoder = Decoder(MODEL, SmallModelDrafter(small), tree=chain(3))
    lengths = []
    for overflows in (False, True, False):
        with nan_from(9 if overflows else 10**6, model=small):
            output = decoder.generate(PROMPT, **GREEDY)
        assert torch.equal(output.sequences, TRUTH)
        lengths.append(output.stats.acceptance_length)
    assert lengths[1] < lengths[0] == lengths[2] > 3


class Forbid:
    """Forbids every token after texts of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, float("-inf")) if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("length", [6, 9])
def test_processors_that_forbid_everything(tree: str, do_sample: bool, length: int) -> None:
    decoder = decoder_of(tree)
    processors = LogitsProcessorList([Forbid(length)])
    with pytest.raises(ValueError, match=rf"no token can follow the {length} tokens of row 0.*processors forbid"):
        decoder.generate(PROMPT, logits_processor=processors, max_new_tokens=12, do_sample=do_sample, seed=0)
    check_next_call(decoder)


def test_one_spoilt_row_of_a_batch_is_named() -> None:
    prompts = random_prompt(6, batch_size=3)

    def forbid(input_ids: Tensor, scores: Tensor) -> Tensor:
        hit = (input_ids[:, 0] == prompts[1, 0])[:, None]
        return scores.masked_fill(hit, float("-inf"))

    with pytest.raises(ValueError, match="tokens of row 1"):
        generate(MODEL, None, prompts, logits_processor=LogitsProcessorList([forbid]), **GREEDY)


def test_what_nobody_reads_is_no_error() -> None:
    """Behind an EOS within a step the scores may be anything. (Keys and values of drafts may not: a NaN among them
    reaches all nodes of its pass.)"""
    eos = int(TRUTH[0, 9])

    decoder = Decoder(MODEL, ScriptedDrafter([TRUTH[0]], VOCAB_SIZE, ranks=(0,)), tree=chain(6))
    with nan_from(9, is_last=True):
        output = decoder.generate(PROMPT, eos_token_id=eos, pad_token_id=0, **GREEDY)
    assert torch.equal(output.sequences, TRUTH[:, :10])


def test_an_interrupt_within_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the target runs."""
    decoder = decoder_of("dynamic")
    passes = 0

    def interrupt(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise KeyboardInterrupt

    hook = MODEL.model.layers[3].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(PROMPT, **GREEDY)
    finally:
        hook.remove()
    assert MODEL.config._attn_implementation == "sdpa"
    check_next_call(decoder)


def test_a_streamer_that_fails() -> None:
    class Broken:
        def put(self, value: Tensor) -> None:
            if value.numel() == 1:
                raise OSError("the pipe is closed")

        def end(self) -> None:
            ended.append(True)

    ended: list[bool] = []
    decoder = decoder_of("dynamic")
    with pytest.raises(OSError, match="pipe"):
        decoder.generate(PROMPT, streamer=Broken(), **GREEDY)
    assert ended == [True]
    check_next_call(decoder)
