"""Hostile input: a clear error or the right text, never a hang, and nothing stale for the next call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, LogitsProcessorList

from draftsmith.inference import Decoder
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
        (torch.tensor([[5, VOCAB_SIZE]]), None, "token 1 of row 0 is 128; .* 0 to 127"),
        (torch.tensor([[5, 6], [9, 500]]), torch.tensor([[1, 1], [0, 1]]), r"token 0 of row 1 is 500"),
        (torch.tensor([[5, 6]]), torch.tensor([[0, 0]]), "row 0 .* all padding"),
        (torch.tensor([[5.0, 6.0]]), None, r"input_ids is of dtype torch.float32"),
        (random_prompt(256), None, "256 tokens.*fewer than 256"),
    ],
)
def test_prompts_that_are_refused(inputs: Tensor, mask: Tensor | None, match: str) -> None:
    decoder = decoder_of("dynamic")
    decoder.generate(PROMPT, **GREEDY)
    with pytest.raises(ValueError, match=match):
        decoder.generate(inputs, mask, **GREEDY)
    check_next_call(decoder)


NO_TENSORS = [None, "hi", [[5, 6]], np.array([[5, 6]]), BatchEncoding({"input_ids": PROMPT}), BatchEncoding({})]


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
def test_ids_and_masks_that_are_no_tensors(value: Any) -> None:
    decoder = decoder_of("dynamic")
    expected = rf"is of type {type(value).__name__}; a tensor \[batch, length\] is expected: pass \*\*tokenizer\(text"
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(TypeError, match=f"^input_ids {expected}"):
            call(value, **GREEDY)
        if value is not None:
            with pytest.raises(TypeError, match=f"^attention_mask {expected}"):
                call(PROMPT, value, **GREEDY)
    check_next_call(decoder)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("do_sample", "begin", "is_last"), [(False, 0, False), (True, 4, False), (False, 4, True)])
def test_nan_logits(tree: str, do_sample: bool, begin: int, is_last: bool) -> None:
    """From the first pass on, or only from a later position on; keys and values of drafts spoil what is before them."""
    decoder = decoder_of(tree)
    count = r"\d+" if begin and not is_last and tree != "plain" else str(6 + begin)
    complaint = rf"follow the {count} tokens of row 0.*NaN"
    with nan_from(5 + begin, is_last=is_last), pytest.raises(ValueError, match=complaint):
        decoder.generate(PROMPT, max_new_tokens=12, do_sample=do_sample, seed=0)
    check_next_call(decoder)


class Forbid:
    """Forbids every token after texts of `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, float("-inf")) if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize(("do_sample", "length"), [(False, 6), (True, 9)])
def test_processors_that_forbid_everything(do_sample: bool, length: int) -> None:
    decoder = decoder_of("dynamic")
    processors = LogitsProcessorList([Forbid(length)])
    with pytest.raises(ValueError, match=f"follow the {length} tokens of row 0.*processors forbid"):
        decoder.generate(PROMPT, logits_processor=processors, max_new_tokens=12, do_sample=do_sample, seed=0)
    check_next_call(decoder)


def test_an_interrupt_within_a_pass() -> None:
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
