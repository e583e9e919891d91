"""What is replaced for the whole process while a thread needs it: threads that overlap leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.integrations import deepspeed as integration

from draftsmith.inference import Target
from draftsmith.inference.kernels.attention import GROUPED, STOCK, grouped_attention
from draftsmith.inference.runners.compiled import Compiler
from draftsmith.training.features.encoding import _single_texts, encode, recomputing_layers
from draftsmith.training.features.target_loading import loading_whole
from tests.inference.serving.arrivals import SECONDS
from tests.tiny_targets import random_prompt, target_of

PACKED = torch.tensor([[0, 1, 2, 0, 1]])


def overlap(enter: Callable[[], AbstractContextManager[Any]], look: Callable[[], Any]) -> list[Any]:
    """What is seen before, in one thread, then in another, there when the first has left, and when both have."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def see(thread: ThreadPoolExecutor, act: Callable[..., Any], *args: Any) -> Any:
            return thread.submit(lambda: (act(*args), look())[1]).result(SECONDS)

        first, second = enter(), enter()
        found = [look(), see(one, first.__enter__), see(other, second.__enter__)]
        see(one, first.__exit__, None, None, None)
        found.append(see(other, bool))
        see(other, second.__exit__, None, None, None)
    return [*found, look()]


def find_packed() -> Any:
    found = masking_utils.find_packed_sequence_indices(PACKED)
    return None if found is None else found.tolist()


def test_packed_texts_are_found_again() -> None:
    original = masking_utils.find_packed_sequence_indices
    found = overlap(_single_texts, find_packed)
    assert found == [[[0, 0, 0, 1, 1]], None, None, None, [[0, 0, 0, 1, 1]]]
    assert masking_utils.find_packed_sequence_indices is original


def test_other_threads_find_packed_texts_all_the_time() -> None:
    with _single_texts():
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(find_packed()))
        thread.start()
        thread.join(SECONDS)
        assert find_packed() is None
    assert seen == [[[0, 0, 0, 1, 1]]]


def test_passes_of_many_threads_leave_nothing_behind() -> None:
    target, original = target_of("llama"), masking_utils.find_packed_sequence_indices
    ids = random_prompt(9)
    expected = encode(target, ids, torch.ones_like(ids)).last_hidden
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(20):
            found = encode(target, ids, torch.ones_like(ids)).last_hidden
            wrong.extend([] if torch.allclose(found, expected, atol=1e-5) else [found])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert masking_utils.find_packed_sequence_indices is original
    assert target.model.config._attn_implementation == STOCK


def forwards(target: Target) -> list[bool]:
    return [hasattr(vars(layer).get("forward"), "func") for layer in target.model.model.layers]


@pytest.mark.parametrize("is_hooked", [False, True])
def test_layers_run_once_again(is_hooked: bool) -> None:
    target = target_of("llama", num_hidden_layers=2, initializer_range=0.1)
    layers = target.model.model.layers
    before = [layer.forward for layer in layers]
    if is_hooked:  # as by accelerate
        for layer, forward in zip(layers, before, strict=True):
            layer.forward = forward
    found = overlap(lambda: recomputing_layers(target), lambda: forwards(target))
    assert found == [[False] * 2, *[[True] * 2] * 3, [False] * 2]
    assert [layer.forward for layer in layers] == before
    assert ["forward" in vars(layer) for layer in layers] == [is_hooked] * 2
    for layer in layers:
        vars(layer).pop("forward", None)


def test_attention() -> None:
    config = target_of("llama", num_hidden_layers=1).model.config
    found = overlap(lambda: grouped_attention(config), lambda: config._attn_implementation)
    assert found == [STOCK, GROUPED, GROUPED, GROUPED, STOCK]


def test_settings_of_the_compiler() -> None:
    executor = Compiler([torch.nn.Linear(2, 2)])

    def look() -> Any:
        return torch._dynamo.config.recompile_limit, torch._inductor.config.freezing

    before, first, second, still, after = overlap(executor.active, look)
    assert first == second == still != before
    assert after == before


def test_models_that_are_loaded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        def is_zero3(self) -> bool:
            return True

    config = Config()
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setattr(integration, "_hf_deepspeed_config_weak_ref", None)
    integration.set_hf_deepspeed_config(config)
    assert overlap(loading_whole, integration.is_deepspeed_zero3_enabled) == [True, False, False, False, True]
