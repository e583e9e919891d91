"""Streams: tokens step by step, stopped, from several threads."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, Target, chain, generate, stream
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("llama", initializer_range=0.3)
PROMPT = random_prompt(6)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
TRUTH = MODEL.generate(PROMPT, **GREEDY)
NEW = TRUTH[0, 6:].tolist()


def scripted() -> ScriptedDrafter:
    return ScriptedDrafter([MODEL.generate(PROMPT, max_new_tokens=40, do_sample=False)[0]], VOCAB_SIZE)


def test_tokens_come_step_by_step() -> None:
    tokens = stream(MODEL, scripted(), PROMPT, tree=chain(3), **GREEDY)
    steps = list(tokens)
    assert [token for step in steps for token in step] == NEW
    assert max(map(len, steps)) > 1
    assert torch.equal(tokens.output.sequences, TRUTH)
    assert tokens.output.stats.num_new_tokens == 24
    assert list(tokens) == []


def test_nothing_is_computed_ahead() -> None:
    tokens = stream(MODEL, None, PROMPT, **GREEDY)
    assert tokens.output.stats.num_target_forwards == 0
    next(tokens)
    assert tokens.output.stats.num_target_forwards == 1
    assert torch.equal(tokens.output.sequences, TRUTH[:, :7])
    next(tokens)
    assert tokens.output.stats.num_target_forwards == 2


@pytest.mark.parametrize("how", ["close", "with", "drop", "never begun"])
def test_a_stream_that_is_left_frees_its_decoder(how: str) -> None:
    decoder = Decoder(MODEL, scripted())
    tokens = decoder.stream(PROMPT, **GREEDY)
    if how != "never begun":
        next(tokens)
    with pytest.raises(RuntimeError, match=r"close\(\) the stream, or make another Decoder"):
        decoder.generate(PROMPT, **GREEDY)
    if how == "with":
        with tokens:
            pass
    elif how == "drop":
        del tokens
        gc.collect()
    else:
        tokens.close()
        tokens.close()
        assert list(tokens) == []
    assert torch.equal(decoder.generate(PROMPT, **GREEDY).sequences, TRUTH)


def test_threads_share_a_target_and_heads() -> None:
    """Each with a decoder of its own; the model's attention is switched by both."""
    target = Target(MODEL)
    drafter = create_heads("kangaroo", target)
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 14, 20)]
    expected = [MODEL.generate(prompt, **GREEDY) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}

    def decode(number: int) -> None:
        for _ in range(2):
            # The model itself: every thread binds the heads to a target of its own.
            found[number] = generate(MODEL, drafter, prompts[number], **GREEDY).sequences

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in enumerate(expected):
        assert torch.equal(found[number], text)
    assert MODEL.config._attn_implementation == "sdpa"


def test_outputs_are_usual_tensors() -> None:
    """Decoding runs in inference mode; what it returns may be trained on."""
    target, drafter = Target(MODEL), scripted()
    modes: list[bool] = []
    hook = MODEL.model.layers[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    for _ in stream(target, None, PROMPT, **GREEDY):
        assert not torch.is_inference_mode_enabled()
    output = generate(
        target, drafter, PROMPT, return_dict_in_generate=True, output_scores=True, output_logits=True, **GREEDY
    )
    hook.remove()
    assert len(modes) == 24 + output.stats.num_target_forwards
    assert all(modes)
    assert output.scores is not None
    assert output.logits is not None
    assert not any(x.is_inference() for x in (output.sequences, *output.scores, *output.logits))
