"""Captured steps: the text of eager ones, from graphs whose memory never moves. A recorder stands for CUDA graphs, and
what a graph may overwrite is overwritten with nonsense."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Decoder, DynamicTree, Target, chain
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.execution import captured
from draftsmith.inference.execution.captured import CapturedCall, CapturedExecutor
from draftsmith.inference.execution.parts import Parts
from draftsmith.inference.execution.watched import storage_of
from draftsmith.inference.loop import DecodeLoop
from tests.heads.tiny_heads import tiny_heads
from tests.inference.execution.recorder import Recorder
from tests.inference.execution.test_stand_in import DRAFTERS
from tests.lossless.restless import restless
from tests.lossless.test_real_heads import TRAINED_KINDS, chat_heads, chat_prompts, chat_target
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}


class PoisoningExecutor(CapturedExecutor):
    """Spoils what nobody may read any more, and checks that a graph's memory stays where it is."""

    view_multiple = 64  # so that short texts cross views

    def __init__(self) -> None:
        super().__init__(Recorder)
        self.addresses: dict[int, list[int]] = {}

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().run(function, *args, **kwargs)
        for call in self.calls.values():
            if call.is_captured:
                own = [tensor.data_ptr() for tensor in (*call.inputs, *call.outputs)]
                assert self.addresses.setdefault(id(call), own) == own, "a graph's memory has moved"
                spoil(call.inputs)  # a replay has read them
        return result

    run_fixed = run

    def forget(self) -> None:
        super().forget()
        self.addresses.clear()  # a new call may have the id of an old one

    def spoil_outputs(self, *living: Any) -> None:
        """At the beginning of a step, except what these objects hold."""
        held = {storage_of(tensor) for one in living for tensor in Parts.of((one,)).tensors}
        for call in self.calls.values():
            spoil([tensor for tensor in call.outputs if storage_of(tensor) not in held])

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for call in self.calls.values() for t in (*call.inputs, *call.outputs))

    @property
    def num_replays(self) -> int:
        return sum(call.graph.num_replays for call in self.calls.values() if isinstance(call.graph, Recorder))


def spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else -(10**9))


@pytest.fixture(autouse=True)
def _spoiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DecodeLoop.draft

    def spoil_and_draft(loop: DecodeLoop) -> Any:
        executor, drafting = loop.step.executor, loop.batch.drafting
        if isinstance(executor, PoisoningExecutor):
            # The state and the newest slots are for this step. Slots that wait longer must be copies.
            executor.spoil_outputs(drafting.state, drafting._waiting[-1], loop.batch.cache)
        return draft(loop)

    monkeypatch.setattr(DecodeLoop, "draft", spoil_and_draft)


def capture(decoder: Decoder) -> PoisoningExecutor:
    """Gives a decoder graphs that a recorder stands for."""
    executor = decoder._step.executor = PoisoningExecutor()
    return executor


# By default heads in the target's cache, and plain decoding. Trained heads and n-grams are below.
QUICK = {"kangaroo-0", "none"}


def long_prompts(batch_size: int) -> dict[str, Tensor]:
    """Some of them repeat themselves, so that n-grams are accepted. Texts cross the view of 64 slots."""
    return pad_prompts([random_prompt(6 + row, seed=row).repeat(1, 7 - row)[0] for row in range(batch_size)])


@pytest.mark.parametrize("name", slow_but(QUICK, list(DRAFTERS)))
def test_the_text_is_the_eager_text(name: str) -> None:
    """Three calls each; the last has no arguments that are new to a graph."""
    target = Target(tiny_target("llama", num_hidden_layers=5 if name == "kangaroo-1" else 2))
    drafter = DRAFTERS[name](target)
    for tree, settings, batch_size in (("dynamic:3,2,6", GREEDY, 1), ([[0], [1], [0, 0], [0, 1]], SAMPLED, 4)):
        tree = None if drafter is None else tree
        settings = {"max_new_tokens": 30, **settings}
        decoder = Decoder(target, drafter, tree=tree)
        executor = capture(decoder)
        prompts = long_prompts(batch_size)
        eager = Decoder(target, drafter, tree=tree)
        if batch_size > 1:  # the second row ends before the others
            settings["eos_token_id"] = int(eager.generate(**prompts, **settings).sequences[1, -20])
        expected = eager.generate(**prompts, **settings)
        num_calls = []
        for _ in range(3):
            found = decoder.generate(**prompts, **settings)
            assert found.sequences.tolist() == expected.sequences.tolist()
            assert found.stats.accepted_histogram == expected.stats.accepted_histogram
            num_calls.append(len(executor.calls))
        assert num_calls[1] == num_calls[2]
        assert executor.num_replays > 20
        assert not executor._eager


@pytest.mark.parametrize("kind", slow_but({"eagle3"}, TRAINED_KINDS))
def test_trained_heads(kind: str) -> None:
    """Some of their drafts are accepted."""
    target = chat_target(torch.float32)
    heads, num_accepted = chat_heads(kind, target), 0
    decoder, eager = (Decoder(target, heads, tree="dynamic:3,4,12") for _ in range(2))
    executor = capture(decoder)
    for prompt, settings in zip(chat_prompts()[:2], (GREEDY, SAMPLED), strict=True):
        expected, found = (one.generate(prompt, max_new_tokens=40, **settings) for one in (eager, decoder))
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert found.stats.accepted_histogram == expected.stats.accepted_histogram
        num_accepted += sum(found.stats.accepted_histogram[1:])
    assert not executor._eager
    assert num_accepted > 0


def test_every_depth_is_accepted_and_what_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """The scripted drafter reads on the host; verification, acceptance and commits are captured around it."""
    target = Target(tiny_target("llama"))
    prompts = [random_prompt(50 + row, seed=row) for row in range(4)]
    expected = [Decoder(target).generate(prompt, max_new_tokens=40, **GREEDY).sequences[0] for prompt in prompts]
    scripted = ScriptedDrafter(expected, VOCAB_SIZE)
    decoder = Decoder(target, scripted, tree=DynamicTree(3, 3, 8))
    executor = capture(decoder)
    with caplog.at_level(logging.WARNING):
        found = decoder.generate(**pad_prompts(prompts), max_new_tokens=40, **GREEDY)
    for row, text in enumerate(expected):
        assert found.sequences[row][3 - row :].tolist() == text.tolist()
    assert min(found.stats.accepted_histogram) > 0, "not every depth was reached"
    assert executor._eager == {"_extend", "expand_level"}
    assert "expand_level runs eagerly from now on, not as a CUDA graph: aten" in caplog.text
    assert {"Target.verify", "_commit", "accept_exact"} <= set(executor._num_calls)


def test_a_drafter_that_reads_on_the_host_runs_eagerly() -> None:
    target = Target(tiny_target("llama"))
    drafter = StagedDrafter(SmallModelDrafter(tiny_target("llama", seed=1)))
    decoder, prompt = Decoder(target, drafter, tree=chain(3)), random_prompt(9)
    executor = capture(decoder)
    expected = Decoder(target).generate(prompt, max_new_tokens=12, **GREEDY).sequences
    assert decoder.generate(prompt, max_new_tokens=12, **GREEDY).sequences.tolist() == expected.tolist()
    assert executor._eager == {"_draft_ranks"}  # `_extend` reads nothing


@pytest.mark.parametrize("kind", slow_but({"mtp"}, ["mtp", "kangaroo", "block"]))
def test_trees_of_all_sizes_and_steps_without_the_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that wait for the drafter outlive the replays that made them; the drafter catches up now and then."""
    monkeypatch.setattr("draftsmith.inference.execution.drafting.CATCH_UP", 5)
    target, prompt = Target(tiny_target("llama", num_hidden_layers=2)), random_prompt(9).repeat(1, 3)
    drafter = MergedDrafter(tiny_heads(kind, target), NgramDrafter())
    expected = Decoder(target).generate(prompt, max_new_tokens=70, **SAMPLED).sequences
    (eager, _), (decoder, planner) = (restless(target, drafter) for _ in range(2))
    executor = capture(decoder)
    for _ in range(2):
        found, other = (one.generate(prompt, max_new_tokens=70, **SAMPLED) for one in (decoder, eager))
        assert found.sequences.tolist() == expected.tolist()
        assert found.stats.accepted_histogram == other.stats.accepted_histogram, "the drafts are others"
    assert None in planner.taken
    assert len(planner.taken) > 3
    assert executor.num_replays > 50
    assert not executor._eager


def test_conversations_streams_and_scores() -> None:
    target, prompt = Target(tiny_target("llama")), random_prompt(50)
    drafter = MergedDrafter(tiny_heads("mtp", target), NgramDrafter())
    decoder, eager = (Decoder(target, drafter, tree="dynamic:3,3,8") for _ in range(2))
    executor = capture(decoder)
    settings = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for seed in range(3):
        first, second = (
            one.generate(prompt, reuse_cache=seed > 0, do_sample=True, seed=seed, **settings)
            for one in (decoder, eager)
        )
        assert first.sequences.tolist() == second.sequences.tolist()
        assert first.stats.accepted_histogram == second.stats.accepted_histogram
        for mine, theirs in ((first.scores, second.scores), (first.logits, second.logits)):
            assert mine is not None
            assert theirs is not None
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other)
        prompt = torch.cat([first.sequences, random_prompt(3, seed=seed)], dim=1)
    streamed = [token for tokens in decoder.stream(prompt, max_new_tokens=20, **GREEDY) for token in tokens]
    expected = eager.generate(prompt, max_new_tokens=20, **GREEDY).sequences[0, prompt.shape[1] :]
    assert streamed == expected.tolist()
    assert executor.num_replays > 20


def test_processors_that_read_the_text() -> None:
    target, prompts = Target(tiny_target("llama")), long_prompts(2)
    decoder, eager = (Decoder(target, NgramDrafter(), tree=chain(2)) for _ in range(2))
    executor = capture(decoder)
    for penalty in (1.3, 1.3, 1.1):
        expected, found = (
            one.generate(**prompts, max_new_tokens=30, repetition_penalty=penalty, **GREEDY) for one in (eager, decoder)
        )
        assert found.sequences.tolist() == expected.sequences.tolist()
    assert executor.num_replays > 100
    assert not executor._eager


def test_batch_invariant_steps() -> None:
    """In trees and beside other rows, the scores of plain decoding in this mode, bit by bit."""
    target = Target(tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=2))
    settings = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    prompts, plain = [random_prompt(50 + row, seed=row) for row in range(3)], Decoder(target, batch_invariant=True)
    expected = [plain.generate(prompt, **settings) for prompt in prompts]
    drafter = ScriptedDrafter([output.sequences[0] for output in expected], VOCAB_SIZE)
    decoder = Decoder(target, drafter, tree=DynamicTree(3, 3, 8), batch_invariant=True)
    executor = capture(decoder)
    found = decoder.generate(**pad_prompts(prompts), **settings)
    assert sum(found.stats.accepted_histogram[1:]) > 0
    for row, alone in enumerate(expected):
        assert found.sequences[row, -16:].tolist() == alone.sequences[0, -16:].tolist()
        assert all(torch.equal(mine[row], theirs[0]) for mine, theirs in zip(found.logits, alone.logits, strict=True))
    assert executor.num_replays > 5
    assert executor._eager == {"_extend", "expand_level"}, "only the script reads on the host"


def test_another_batch_size_takes_other_graphs() -> None:
    target = Target(tiny_target("llama"))
    decoder = Decoder(target, tiny_heads("eagle3", target), tree=chain(2))
    executor = capture(decoder)
    for batch_size in (1, 2, 1):
        prompts = long_prompts(batch_size)
        expected = Decoder(target).generate(**prompts, max_new_tokens=15, **SAMPLED).sequences
        assert decoder.generate(**prompts, max_new_tokens=15, **SAMPLED).sequences.tolist() == expected.tolist()
        rows = {t.shape[0] for call in executor.calls.values() for t in call.outputs if t.dim() == 3}
        assert rows == {batch_size}, "graphs of an earlier cache are alive"


# The executor, with functions of its own.


@dataclass
class State:
    memory: Tensor
    total: Tensor
    count: int = 0
    history: list[Tensor] = field(default_factory=list)


def run_thrice(executor: CapturedExecutor, function: Callable[..., Any], *args: Any) -> Any:
    """The first run that is captured, and two more."""
    for _ in range(4):
        executor.run(function, *args)
    return executor.run(function, *args)


def call_of(executor: CapturedExecutor) -> CapturedCall:
    (call,) = executor.calls.values()
    return call


def new_state(value: float) -> State:
    return State(torch.full((4,), value), torch.zeros(()))


def add(state: State, values: Tensor) -> tuple[Tensor, Tensor]:
    """Writes in place, sets an attribute, and returns an argument."""
    state.memory.add_(values)
    state.total = state.total + values.sum()
    return state.memory.sum(), values


def test_state_results_and_attributes() -> None:
    executor, state, ones = PoisoningExecutor(), new_state(0.0), torch.ones(4)
    memory = state.memory
    for number in range(1, 7):
        total, values = executor.run(add, state, ones.clone())
        assert total == 4 * number == state.total
        assert values.tolist() == [1.0] * 4
        assert state.memory is memory
    assert ones.tolist() == [1.0] * 4
    assert memory.tolist() == [6.0] * 4
    assert call_of(executor).graph.num_replays == 4  # type: ignore[attr-defined]


def test_the_next_state_moves_into_the_home_of_the_last_one() -> None:
    executor, first = PoisoningExecutor(), new_state(0.0)
    run_thrice(executor, add, first, torch.ones(4))
    second, home = new_state(10.0), first.memory.data_ptr()
    executor.run(add, second, torch.ones(4))
    assert second.memory.data_ptr() == home
    assert second.memory.tolist() == [11.0] * 4
    # The first state is alive: it has moved out, and comes back.
    assert first.memory.tolist() == [5.0] * 4
    executor.run(add, first, torch.ones(4))
    assert (first.memory.tolist(), second.memory.tolist()) == ([6.0] * 4, [11.0] * 4)
    assert len(executor.calls) == 1


def test_other_numbers_and_shapes_are_other_graphs() -> None:
    def scale(values: Tensor, factor: float) -> Tensor:
        return values * factor

    executor = PoisoningExecutor()
    for factor, size in ((2.0, 3), (3.0, 3), (3.0, 5)):
        assert run_thrice(executor, scale, torch.ones(size), factor).tolist() == [factor] * size
    assert len(executor.calls) == 3


def read_item(values: Tensor) -> Tensor:
    return values * values[0].item()


def read_mask(values: Tensor) -> Tensor:
    return values[values > 0]


def append(state: State, values: Tensor) -> Tensor:
    state.history.append(values)
    return values + 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [(read_item, "_local_scalar_dense.* needs a value on the host"), (read_mask, "needs a value on the host")],
)
def test_a_read_on_the_host_is_not_captured(
    function: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = PoisoningExecutor()
    for _ in range(4):
        assert executor.run(function, torch.ones(3)).tolist() == [1.0] * 3
    assert executor._eager == {function.__qualname__}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not as a CUDA graph" in caplog.text


def test_a_list_that_grows_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    executor, state = PoisoningExecutor(), new_state(0.0)
    for number in range(3):
        executor.run(append, state, torch.ones(3))
        assert len(state.history) == number + 1
    assert "changes a list in place" in caplog.text


def test_an_object_with_slots_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(slots=True)
    class Slotted:
        total: Tensor

    def accumulate(state: Slotted, values: Tensor) -> Tensor:
        state.total = state.total + values
        return state.total

    executor, state = PoisoningExecutor(), Slotted(torch.zeros(1))
    for number in range(1, 5):
        assert executor.run(accumulate, state, torch.ones(1)).item() == number
    assert "leave __slots__ out" in caplog.text


def test_a_host_number_of_the_cache_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """It changes from step to step, and the graph would hold the first."""
    target, executor = Target(tiny_target("llama")), PoisoningExecutor()
    cache = target.new_cache(1, 64)

    def read_bound(cache: Any, values: Tensor) -> Tensor:
        return values + cache.length_bound

    for bound in range(4):
        cache.length_bound = bound
        assert executor.run(read_bound, cache, torch.zeros(1)).item() == bound
    assert "changes from step to step" in caplog.text


def test_a_capture_that_fails_leaves_the_function_eager(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Recorder):
        def capture(self, function: Callable[[], None]) -> None:
            super().capture(function)
            raise RuntimeError("operation not permitted when stream is capturing")

    executor, state = CapturedExecutor(Failing), new_state(0.0)
    for number in range(1, 6):
        assert executor.run(add, state, torch.ones(4))[0] == 4 * number
    assert "not permitted when stream is capturing" in caplog.text


def test_too_many_settings_run_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(captured, "GRAPH_LIMIT", 2)
    executor, state = PoisoningExecutor(), new_state(0.0)
    for size in range(1, 5):
        state.memory = torch.zeros(size)
        executor.run(add, state, torch.ones(size))
    assert len(executor.calls) == 2
    assert "make a new Decoder" in caplog.text


def test_graphs_need_a_gpu_and_exclude_compile() -> None:
    model = tiny_target("llama")
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        Decoder(model, graphs=True)
    with pytest.raises(ValueError, match="choose one of them"):
        Decoder(model, graphs=True, compile=True)


def test_poison_is_found() -> None:
    """A reader of what the next replay overwrites fails, as it would on a GPU."""
    executor = PoisoningExecutor()
    kept = [executor.run(torch.square, torch.full((2,), float(number))) for number in range(5)]
    assert [values[0].item() for values in kept[3:]] == [16.0, 16.0], "one tensor holds the results of both replays"
    executor.spoil_outputs()
    assert kept[3].isnan().all()


@pytest.mark.parametrize("name", slow_but({"eagle3-0", "kangaroo-0"}, ["eagle3-0", "kangaroo-0", "small model"]))
def test_prompts_of_other_lengths_share_the_graphs(name: str) -> None:
    target = Target(tiny_target("llama"))
    decoder = Decoder(target, DRAFTERS[name](target), tree=chain(2))
    executor = capture(decoder)
    sizes = []
    for length in (20, 21, 22, 23, 24):
        decoder.generate(random_prompt(length), max_new_tokens=12, **GREEDY)
        sizes.append((len(executor.calls), executor.num_bytes))
    assert sizes[3] == sizes[4], "memory has grown"
    assert sizes[1][0] == sizes[4][0]


def test_the_calls_of_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins of the right signatures; no graph is made."""
    calls: list[str] = []

    class Stream:
        device = torch.device("cuda:1")

        def __init__(self, device: torch.device) -> None:
            assert device == self.device

        def wait_stream(self, stream: Any) -> None:
            calls.append("own waits" if isinstance(stream, str) else "current waits")

    class Current(str):
        wait_stream = Stream.wait_stream

    @contextmanager
    def entered(name: str) -> Iterator[None]:
        calls.append(name)
        yield
        calls.append(f"end of {name}")

    signature = inspect.signature(torch.cuda.graph.__init__)

    def graph(*args: Any, **kwargs: Any) -> Any:
        assert signature.bind(None, *args, **kwargs).arguments["pool"] == "pool"
        return entered("capture")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current(device))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: entered("stream"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: calls.append("replay")))
    made = captured.cuda_graphs(torch.device("cuda:1"))()
    made.warm_up(lambda: calls.append("run"))
    made.capture(lambda: calls.append("run"))
    made.replay()
    assert calls[:5] == ["own waits", "stream", "run", "end of stream", "current waits"]
    assert calls[5:] == ["capture", "run", "end of capture", "replay"]
