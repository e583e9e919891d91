"""Streams: tokens step by step, with for and async for, stopped, cancelled, from several threads."""

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, SmallModelDrafter, Target, TokenStream, generate, stream
from draftsmith.inference.streaming import token_stream
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

MODEL = tiny_target("llama", initializer_range=0.3)
PROMPT = random_prompt(6)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
TRUTH = MODEL.generate(PROMPT, **GREEDY)
NEW = TRUTH[0, 6:].tolist()


def scripted() -> ScriptedDrafter:
    return ScriptedDrafter([MODEL.generate(PROMPT, max_new_tokens=40, do_sample=False)[0]], VOCAB_SIZE)


def test_nothing_is_computed_ahead() -> None:
    tokens = stream(MODEL, None, PROMPT, **GREEDY)
    assert tokens.output.stats.num_target_forwards == 0
    next(tokens)
    assert tokens.output.stats.num_target_forwards == 1
    assert torch.equal(tokens.output.sequences, TRUTH[:, :7])
    next(tokens)
    assert tokens.output.stats.num_target_forwards == 2


def test_time_between_steps_is_not_counted() -> None:
    tokens = stream(MODEL, None, PROMPT, **GREEDY)
    next(tokens)
    before = tokens.output.stats.seconds["total"]
    gc.collect()
    assert tokens.output.stats.seconds["total"] == before


@pytest.mark.parametrize("how", ["close", "with", "drop", "never begun"])
def test_a_stream_that_is_left_frees_its_decoder(how: str) -> None:
    decoder = Decoder(MODEL, scripted())
    tokens = decoder.stream(PROMPT, **GREEDY)
    if how != "never begun":
        next(tokens)
    with pytest.raises(RuntimeError, match=r"close\(\) the stream"):
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


def test_a_stream_has_one_row() -> None:
    decoder = Decoder(MODEL, None)
    with pytest.raises(ValueError, match=r"a stream has one row.*num_return_sequences"):
        decoder.stream(PROMPT, max_new_tokens=1, num_return_sequences=2, do_sample=True)
    decoder.generate(PROMPT, max_new_tokens=1)


def test_async_streams_run_side_by_side() -> None:
    target = Target(MODEL)

    async def read() -> list[int]:
        return [token async for step in stream(target, scripted(), PROMPT, **GREEDY) for token in step]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*(read() for _ in range(3)))

    assert asyncio.run(read_all()) == [NEW] * 3


def test_async_steps_leave_no_workers_in_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[int] = []
    released: list[int] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stepped.append(threading.get_ident())
        return scores

    async def read() -> list[int]:
        tokens = Decoder(MODEL, None).stream(PROMPT, logits_processor=[note], **GREEDY)
        return [token async for step in tokens for token in step]

    monkeypatch.setattr(token_stream, "release_workers", lambda: released.append(threading.get_ident()))
    assert asyncio.run(read()) == NEW
    assert released[: len(stepped)] == stepped


@pytest.mark.parametrize("attempt", range(5))
def test_a_coroutine_may_drop_its_stream(attempt: int) -> None:
    """The thread that ran the step does not keep it alive."""
    decoder = Decoder(MODEL, None)

    async def read() -> torch.Tensor:
        async for step in decoder.stream(PROMPT, **GREEDY):
            assert step == NEW[:1]
            break
        return decoder.generate(PROMPT, **GREEDY).sequences

    gc.disable()
    try:
        assert torch.equal(asyncio.run(read()), TRUTH)
    finally:
        gc.enable()


def test_a_stream_dropped_within_a_step_ends_behind_it() -> None:
    """Neither waits: the loop that cancels goes on while the step runs."""
    decoder = Decoder(MODEL, None)
    begun, may_end = threading.Event(), threading.Event()

    def wait(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert may_end.wait(60)
        return scores

    async def cancel() -> None:
        async def read() -> None:
            async for _ in decoder.stream(PROMPT, logits_processor=[wait], **GREEDY):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RuntimeError, match="middle of another text"):
            decoder.generate(PROMPT, **GREEDY)
        may_end.set()

    asyncio.run(cancel())
    assert torch.equal(decoder.generate(PROMPT, **GREEDY).sequences, TRUTH)


def test_a_stream_may_be_closed_from_within_its_step() -> None:
    decoder = Decoder(MODEL, scripted())
    streams: list[TokenStream] = []

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 10:
            streams[0].close()
        return scores

    streams.append(decoder.stream(PROMPT, logits_processor=[close], **GREEDY))
    read = [token for step in streams[0] for token in step]
    assert read == NEW[: len(read)]
    assert 4 <= len(read) < 24
    assert torch.equal(decoder.generate(PROMPT, **GREEDY).sequences, TRUTH)


def test_a_stream_has_no_other_reader() -> None:
    with pytest.raises(ValueError, match="streamer is for generate"):
        stream(MODEL, None, PROMPT, **GREEDY, streamer=print)


@pytest.mark.parametrize("kind", [pytest.param("small", marks=pytest.mark.slow), "kangaroo"])
def test_threads_share_a_target_and_heads(kind: str) -> None:
    """Each with a decoder of its own; the model's attention is switched by both."""
    target = Target(MODEL)
    drafter: Any = SmallModelDrafter(MODEL) if kind == "small" else create_heads(kind, target)
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 14, 20)]
    expected = [MODEL.generate(prompt, **GREEDY) for prompt in prompts]
    found: dict[int, torch.Tensor] = {}

    def decode(number: int) -> None:
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
    assert not any(x.is_inference() for x in (output.sequences, *output.scores, *output.logits))
