"""What a compiled executor does where torch.compile fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen.cpp import CppScheduling

from draftsmith.inference import SmallModelDrafter
from draftsmith.inference.execution import compiled
from draftsmith.inference.execution.compiled import CompiledExecutor
from draftsmith.inference.kernels.attention import GROUPED, STOCK
from draftsmith.inference.targets.model_config import find_attention
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.tiny_multimodal import tiny_multimodal
from tests.tiny_targets import tiny_target


def add(values: Tensor) -> Tensor:
    values.add_(1)  # a failed try must not have run
    return values


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_graph_that_inductor_cannot_make_is_made_another_way(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And only once: later calls take that way at once."""
    tries = []

    def compile_badly(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        number = len(tries)
        tries.append(options)

        def run(*args: Any) -> Any:
            if number < failures:
                raise torch._dynamo.exc.BackendCompilerFailed(function, KeyError("buf7"), None)
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile_badly)
    executor = CompiledExecutor([nn.Linear(2, 2)])
    values = torch.zeros(3)
    for expected in (1.0, 2.0):
        assert executor.run_fixed(add, values).tolist() == [expected] * 3
    ways = ["without loops over loops", "without kernels of its own", "not at all"]
    assert len(caplog.messages) == failures
    for message, way in zip(caplog.messages, ways, strict=False):
        assert f"could not compile add as one graph, and now compiles it {way}" in message
        assert "buf7" in message
    assert all(options["fullgraph"] for options in tries)


def add_in_pieces(values: Tensor) -> Tensor:
    values.add_(1)
    torch._dynamo.graph_break()
    return values.mul_(2)


def test_a_piece_that_cannot_be_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces before it have run, and are not run again; neither in this call nor in the next one."""
    graphs = []

    def fail_at_second(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        if len(graphs) == 2:
            raise KeyError("buf7")
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, options=None, **kw: real(*args, backend=fail_at_second, **kw))
    executor, values = CompiledExecutor([nn.Linear(2, 2)]), torch.zeros(3)
    for expected in (2.0, 6.0):
        assert executor.run_fixed(add_in_pieces, values).tolist() == [expected] * 3
    assert len(graphs) == 2


def test_threads_may_compile_without_loops_over_loops() -> None:
    """Two calls overlap, and others go on as before: neither call leaves anything behind."""
    first, second = threading.Event(), threading.Event()

    def fuses() -> bool:
        no, one, names = (lambda *_: False), (lambda *_: 1), (lambda: {"a"})
        scheduler = SimpleNamespace(_can_fuse_horizontal_impl=no, _get_outer_loop_fusion_depth=one)
        node = SimpleNamespace(is_template=no, get_operation_names=names, ancestors={"a"})
        return bool(CppScheduling.can_fuse_vertical_outer_loop(scheduler, node, node))

    def enter_first() -> bool:
        first.set()
        second.wait()
        return fuses()

    def leave_last() -> bool:
        second.set()
        thread.join()
        return fuses()

    found: list[bool] = []
    assert fuses()
    thread = threading.Thread(target=lambda: found.append(compiled._fuse_less(enter_first)()))
    thread.start()
    first.wait()
    found.append(compiled._fuse_less(leave_last)())
    assert found == [False, False]
    assert fuses()


def test_the_attention_of_target_and_small_model_is_switched_while_functions_run() -> None:
    """That of language models only: an image encoder has a config of its own, and T5 attends with biases."""
    target, small, other = tiny_target("llama"), tiny_target("qwen2"), tiny_target("llama")
    multimodal, translating = tiny_multimodal("gemma3"), tiny_encoder_decoder("t5")
    executor = CompiledExecutor([target, SmallModelDrafter(small), multimodal, translating])
    switched = [model.config.get_text_config() for model in (target, small, multimodal)]
    kept = [other.config, multimodal.config.vision_config, translating.config]
    before = [config._attn_implementation for config in kept]
    with executor.active():
        assert [config._attn_implementation for config in switched] == [GROUPED] * 3
        assert [find_attention(model) for model in (target, small, multimodal)] == [STOCK] * 3
        assert [config._attn_implementation for config in kept] == before
    assert [config._attn_implementation for config in switched] == [STOCK] * 3
