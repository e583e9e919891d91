"""What a call holds at most: target, heads, one cache, the drafter's state, and the activations of one step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads import DraftHeads, create_heads
from inference import Decoder, Target
from inference.streaming.token_stream import TokenStream
from inference.targets.attention import LONG_PASS
from tests.memory_tracker import MemoryTracker, count_bytes
from tests.tiny_targets import random_prompt, tiny_target

FLOAT = 4  # bytes
WIDTH, HEADS, GROUPS, LAYERS, NODES = 32, 4, 2, 6, 32
CHUNK = LONG_PASS  # tokens of a prompt that are read at a time in these tests
WIDE_VOCAB = 4096  # logits outweigh all else of a verify step
WIDE_MLP = 256  # and it all else of a chunk of a prompt


@functools.cache
def target(vocab_size: int) -> Target:
    model: PreTrainedModel = tiny_target(
        "llama", vocab_size=vocab_size, max_position_embeddings=1024, intermediate_size=WIDE_MLP
    )
    return Target(model.requires_grad_(False))


@functools.cache
def heads(vocab_size: int) -> DraftHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: DraftHeads = create_heads("eagle3", target(vocab_size), draft_vocab_size=64)
    made.fit_vocabulary(torch.arange(vocab_size))  # type: ignore[operator]
    return made.eval().requires_grad_(False)


@functools.cache
def num_states_kept() -> int:
    """Hidden states that transformers keeps for EAGLE-3's three: older releases keep those of all layers."""
    model: Any = target(128).model.base_model
    states = model(random_prompt(4), output_hidden_states=[1, 2, 3]).hidden_states
    return sum(state is not None for state in states)


def generate(decoder: Decoder, prompt: Tensor, new: int, **options: Any) -> Any:
    return decoder.generate(prompt, max_new_tokens=new, **options)


def track(decoder: Decoder, call: Callable[[], Any], *owners: Any) -> tuple[int, int]:
    """Bytes beyond what was alive before: at most, and behind it when what it returned is dropped."""
    gc.collect()
    tracker = MemoryTracker()
    tracker.follow(decoder.target.model, decoder.drafter, *owners)
    before = tracker.live
    with tracker:
        call()
    gc.collect()
    return tracker.peak - before, tracker.live - before


def cache_bytes(batch: int, capacity: int) -> int:
    """Keys and values of all layers; the rows' lengths and the slots' numbers."""
    head_dim = WIDTH // HEADS
    return LAYERS * 2 * batch * GROUPS * capacity * head_dim * FLOAT + 8 * (batch + capacity)


def state_bytes(batch: int, capacity: int, num_scratch: int) -> int:
    """EAGLE-3's own layer: keys and values; outputs and ancestors of the tree's rows; lengths, numbers of columns and
    rows, and three single numbers."""
    head_dim = WIDTH // HEADS
    rows = 1 + num_scratch
    planes = 2 * batch * GROUPS * (num_scratch + capacity + 1) * head_dim * FLOAT
    tree = batch * rows * (WIDTH * FLOAT + num_scratch)
    return planes + tree + 8 * (batch + num_scratch + capacity + batch + 3)


def held_bytes(decoder: Decoder, batch: int, rows_left: int | None = None) -> int:
    """What a decoder keeps: its cache, and the drafter's state of the rows that were the last to end."""
    assert decoder._cache is not None
    capacity, policy = decoder._cache.capacity, decoder._step.policy
    rows = batch if rows_left is None else rows_left
    held = cache_bytes(batch, capacity) + 8 * rows * (1 if policy is None else NODES)  # the last step's slots
    rotary = WIDTH // HEADS // 2 * FLOAT  # frequencies, a table that the heads keep
    return held if policy is None else held + rotary + state_bytes(rows, capacity, policy.num_scratch)


def chunk_bytes(batch: int, view: int, num_states: int) -> int:
    """A chunk of a prompt at its largest, in an MLP: the mask; what is gated, its gate and their product; the
    embeddings, the residual, the normed states and the states that the drafter asked for; rotary tables."""
    head_dim = WIDTH // HEADS
    return FLOAT * batch * CHUNK * (view + 3 * WIDE_MLP + (4 + num_states) * WIDTH + 2 * head_dim)


def verify_bytes(batch: int, vocab_size: int, *, do_sample: bool) -> float:
    """A verify step at its largest, in the acceptance: logits of all nodes; of the node that is walked on, the scores
    and their copies. Sampled: the noise of 7 depths, two copies more, and which of the scores are cut off."""
    rows = NODES + 2 + (7 + 2 + 1 / FLOAT if do_sample else 0)
    return FLOAT * batch * (rows * vocab_size + NODES * 3 * WIDTH)


def small_bytes(batch: int, length: int) -> int:
    """Token ids and numbers of 8 bytes: prompts as given, sorted, masked and padded; those of a chunk or a tree."""
    return 8 * batch * (6 * length + 8 * CHUNK) + CHUNK**2


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.prompts.PREFILL_CHUNK", CHUNK)


def test_storages_are_counted_once_and_to_their_end() -> None:
    weight = torch.ones(1000)
    with MemoryTracker() as tracker:
        a = torch.zeros(100)
        assert (tracker.live, tracker.peak) == (400, 400)
        b = a + 1
        c = a[:50].view(5, 10).t()  # a's storage
        del a
        assert (tracker.live, tracker.peak) == (800, 800)
        del b
        assert (tracker.live, tracker.peak) == (400, 800)
        del c
        assert (tracker.live, tracker.peak) == (0, 800)
        tracker.restart_peak()
        weight.mul_(2)  # was there before: seen when it is first used
        assert (tracker.live, tracker.peak) == (4000, 4000)
        # An operator composed of others: between them lies a product of 10 x 10.
        wide = weight.view(10, 100)
        product = torch.linalg.multi_dot([wide, wide.T, wide])
        assert (tracker.live, tracker.peak) == (8000, 8400)
        del wide, product
    weight + 1
    assert tracker.live == 4000
    del weight
    assert tracker.live == 0


def test_tensors_within_objects_are_found_once() -> None:
    layer = torch.nn.Linear(10, 10)
    assert count_bytes(layer) == 440
    assert count_bytes([layer, {"again": layer.weight[:5]}], layer) == 440
    assert count_bytes(layer, besides=[layer.bias]) == 400


@pytest.mark.parametrize(
    ("batch", "drafts"),
    [pytest.param(3, False, marks=pytest.mark.slow, id="plain"), pytest.param(2, True, id="eagle3")],
)
def test_prompts_need_the_activations_of_one_chunk(batch: int, drafts: bool) -> None:
    length, vocab_size = 3 * CHUNK, 128
    decoder = Decoder(target(vocab_size), heads(vocab_size) if drafts else None)
    peak, left = track(decoder, lambda: generate(decoder, random_prompt(length, batch_size=batch), 3))
    held = held_bytes(decoder, batch)
    assert left == held
    bound = held + chunk_bytes(batch, length, num_states_kept() if drafts else 0) + small_bytes(batch, length)
    assert held + 0.9 * (bound - held) <= peak <= bound


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_step_holds_one_set_of_logits_however_many_steps_there_are(do_sample: bool) -> None:
    batch, length = 2, 8
    prompt = random_prompt(length, batch_size=batch)
    peaks = []
    for new in (3, 9):  # no more than one view of the cache, with a tree behind it
        decoder = Decoder(target(WIDE_VOCAB), heads(WIDE_VOCAB))
        peak, left = track(decoder, lambda: generate(decoder, prompt, new, do_sample=do_sample, seed=1), prompt)  # noqa: B023
        peaks.append(peak)
    held = held_bytes(decoder, batch)
    assert left == held
    assert peaks[0] == peaks[1]
    bound = held + verify_bytes(batch, WIDE_VOCAB, do_sample=do_sample) + small_bytes(batch, length)
    assert held + 0.9 * (bound - held) <= peaks[0] <= bound


def interrupt_streams(decoder: Decoder) -> Any:
    for _ in range(3):
        with decoder.stream(random_prompt(20), max_new_tokens=30) as stream:
            next(stream), next(stream)
    return stream


def end_one_by_one(decoder: Decoder) -> Any:
    rows = random_prompt(20, batch_size=3)
    ends = {tuple(row[:4].tolist()): 22 + 2 * place for place, row in enumerate(rows)}
    return generate(
        decoder, rows, 30, stopping_criteria=[lambda text, _: text.shape[1] >= ends[(*text[0, :4].tolist(),)]]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "call", "rows_left"),
    [
        (2, lambda decoder: [generate(decoder, random_prompt(20, batch_size=2), 3) for _ in range(3)], 2),
        (1, interrupt_streams, 1),
        (3, end_one_by_one, 1),
    ],
    ids=["calls", "streams", "rows that end one by one"],
)
def test_calls_leave_the_cache_and_the_state_alone(batch: int, call: Callable[[Decoder], Any], rows_left: int) -> None:
    decoder = Decoder(target(128), heads(128))
    kept: list[Any] = []
    _, left = track(decoder, lambda: kept.append(call(decoder)))
    if isinstance(kept[0], TokenStream):  # the prompt as given, as read and as shown, its length and its last token
        size = 8 * (20 + 20 + 20 + 1 + 1)
    else:
        size = count_bytes(kept)
    assert left - size == held_bytes(decoder, batch, rows_left)


def test_another_batch_size_frees_the_old_cache_first() -> None:
    decoder = Decoder(target(128), heads(128))
    with MemoryTracker() as tracker:
        generate(decoder, random_prompt(300, batch_size=3), 3)
        gc.collect()
        old = held_bytes(decoder, 3)
        others = tracker.live - old
        tracker.restart_peak()
        generate(decoder, random_prompt(8), 3)
    assert tracker.peak - others < old + cache_bytes(1, 256)


def test_a_larger_cache_takes_the_place_of_the_old_one() -> None:
    """The old one goes as soon as it was copied, before the prompt's first chunk is read."""
    decoder = Decoder(target(128), heads(128))
    prompt = random_prompt(512)
    with MemoryTracker() as tracker:
        generate(decoder, prompt[:, :200], 3)
        gc.collect()
        old = held_bytes(decoder, 1)
        others = tracker.live - old
        tracker.restart_peak()
        generate(decoder, prompt, 3, reuse_cache=True)
    peak, new = tracker.peak - others, held_bytes(decoder, 1)
    activations = chunk_bytes(1, 576, num_states_kept()) + small_bytes(1, 512)
    assert old < activations  # the two caches together are not the peak
    assert new + activations - old < peak <= new + activations
