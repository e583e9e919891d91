"""What a call holds at most: target, heads, one cache, the drafter's state, and the activations of one step."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.kernels.attention import LONG_PASS
from tests.memory_tracker import MemoryTracker, count_bytes
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target

FLOAT = 4  # bytes
WIDTH, HEADS, GROUPS, LAYERS, NODES = 32, 4, 2, 6, 32
CHUNK = LONG_PASS  # tokens of a prompt that are read at a time in these tests
WIDE_VOCAB = 4096  # logits outweigh all else of a verify step
WIDE_MLP = 256  # and it all else of a chunk of a prompt


@functools.cache
def target(vocab_size: int) -> Target:
    options = {"vocab_size": vocab_size, "max_position_embeddings": 1024, "intermediate_size": WIDE_MLP}
    return Target(tiny_target("llama", **options).requires_grad_(False))


@functools.cache
def heads(vocab_size: int) -> DraftHeads:
    made: Any = create_heads("eagle3", target(vocab_size), draft_vocab_size=64)
    made.fit_vocabulary(torch.arange(vocab_size))
    return made.eval().requires_grad_(False)


def new_decoder(vocab_size: int = 128) -> Decoder:
    return Decoder(target(vocab_size), heads(vocab_size), tree="dynamic")


def track(decoder: Decoder, call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes beyond the target, the heads and what the decoder held: at most, and after the call, when what it returned
    is dropped."""
    gc.collect()
    tracker = MemoryTracker()
    tracker.follow(decoder)
    before = tracker.live
    with tracker:
        call()
    gc.collect()
    return tracker.peak - before, tracker.live - before


def cache_bytes(batch: int, capacity: int) -> int:
    """Keys and values of all layers."""
    return LAYERS * 2 * batch * GROUPS * capacity * (WIDTH // HEADS) * FLOAT


def held_bytes(decoder: Decoder) -> int:
    """What a decoder keeps besides the target and the heads: its cache, and the drafter's state."""
    return count_bytes(decoder, besides=[decoder.target, decoder.drafter])


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.inference.prefill.PREFILL_CHUNK", CHUNK)


def test_prompts_need_the_activations_of_one_chunk() -> None:
    """Those of all chunks would be four times as much."""
    extras = []
    for num_chunks in (1, 4):
        decoder, prompt = new_decoder(), random_prompt(num_chunks * CHUNK, batch_size=2)
        peak, left = track(decoder, lambda: decoder.generate(prompt, max_new_tokens=3))  # noqa: B023
        assert left == pytest.approx(held_bytes(decoder), rel=0.01)
        capacity = decoder._state.cache.capacity
        assert cache_bytes(2, capacity) < left < 1.5 * cache_bytes(2, capacity), "one cache, and a state of one layer"
        extras.append(peak - left)
    assert extras[1] < 2 * extras[0]


@pytest.mark.parametrize("do_sample", slow_but({"sampled"}, {"greedy": False, "sampled": True}))
def test_a_step_holds_one_set_of_logits_however_many_steps_there_are(do_sample: bool) -> None:
    peaks = []
    for new in (3, 9):  # no more than one view of the cache, with a tree after it
        decoder, prompt = new_decoder(WIDE_VOCAB), random_prompt(8, batch_size=2)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": do_sample, "seed": 1}
        peak, left = track(decoder, lambda: decoder.generate(prompt, **options))  # noqa: B023
        peaks.append(peak)
    logits = FLOAT * 2 * NODES * WIDE_VOCAB
    assert left + logits < peaks[0] < left + 1.5 * logits
    assert peaks[1] <= peaks[0] + 1000


def interrupt_streams(decoder: Decoder) -> None:
    for _ in range(2):
        with decoder.stream(random_prompt(20), max_new_tokens=30) as stream:
            next(stream), next(stream)


def end_one_by_one(decoder: Decoder) -> None:
    rows = random_prompt(20, batch_size=3)
    ends = {tuple(row[:4].tolist()): 22 + 2 * place for place, row in enumerate(rows)}
    criteria = [lambda text, _: text.shape[1] >= ends[(*text[0, :4].tolist(),)]]
    decoder.generate(rows, max_new_tokens=30, stopping_criteria=criteria)


@pytest.mark.parametrize("call", [interrupt_streams, end_one_by_one])
def test_calls_leave_nothing_behind(call: Callable[[Decoder], None]) -> None:
    """Beyond the cache and the state that the first call has made."""
    decoder = new_decoder()
    call(decoder)
    _, left = track(decoder, lambda: call(decoder))
    assert left < 100  # a table of the heads


def test_another_batch_size_frees_the_old_cache_first() -> None:
    decoder = new_decoder()
    decoder.generate(random_prompt(300, batch_size=3), max_new_tokens=3)
    peak, left = track(decoder, lambda: decoder.generate(random_prompt(8), max_new_tokens=3))
    assert left < 0
    assert peak < cache_bytes(1, 256)
