"""Captured steps: the text of eager ones, from graphs that a tape stands for; and states that never move."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Decoder, DynamicTree, Target, chain
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.row_state import RowState
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.prefill import finish, prefill
from draftsmith.inference.request.row import Row
from draftsmith.inference.runners import cuda_graphs
from draftsmith.inference.runners.cuda_graphs import Graphs
from draftsmith.inference.state import DecodeState
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Step
from tests.heads.tiny_heads import tiny_heads
from tests.inference.runners.recorder import Recorded, Recorder, spoil
from tests.inference.runners.test_stand_in import DRAFTERS
from tests.lossless.restless import restless
from tests.params import slow_but
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}
ALL = {"draft", "root", "verify", "accept", "commit"}


def capture(decoder: Decoder) -> Recorded:
    """Gives a decoder graphs that a tape stands for."""
    recorded = Recorded(decoder)
    decoder.step.runner = replace(decoder.step.runner, view_multiple=64)  # so that short texts cross views
    return recorded


def target_for(name: str) -> Target:
    return Target(tiny_target("llama", num_hidden_layers=5 if name == "kangaroo-1" else 2))


# By default heads in the target's cache, and plain decoding. n-grams are below.
QUICK = {"kangaroo-0", "none"}


def long_prompts(batch_size: int) -> dict[str, Tensor]:
    """Some of them repeat themselves, so that n-grams are accepted. Texts cross the view of 64 slots."""
    return pad_prompts([random_prompt(6 + row, seed=row).repeat(1, 7 - row)[0] for row in range(batch_size)])


@pytest.mark.parametrize("name", slow_but(QUICK, list(DRAFTERS)))
def test_the_text_is_the_eager_text(name: str) -> None:
    """Three calls each; the last has no arguments that are new to a graph."""
    target = target_for(name)
    drafter = DRAFTERS[name](target)
    for tree, settings, batch_size in (("dynamic:3,2,6", GREEDY, 1), ([[0], [1], [0, 0], [0, 1]], SAMPLED, 4)):
        tree = None if drafter is None else tree
        settings = {"max_new_tokens": 30, **settings}
        decoder, eager = (Decoder(target, drafter, tree=tree) for _ in range(2))
        recorded = capture(decoder)
        prompts = long_prompts(batch_size)
        if batch_size > 1:  # the second row ends before the others
            settings["eos_token_id"] = int(eager.generate(**prompts, **settings).sequences[1, -20])
        expected = eager.generate(**prompts, **settings)
        num_graphs = []
        for _ in range(3):
            found = decoder.generate(**prompts, **settings)
            assert found.sequences.tolist() == expected.sequences.tolist()
            assert found.stats.accepted_histogram == expected.stats.accepted_histogram
            num_graphs.append(recorded.num_graphs)
        assert num_graphs[1] == num_graphs[2]
        assert recorded.num_replays > 20
        assert not recorded.eager
        assert recorded.used == ALL - {"draft" if drafter is None else "root"}


def test_every_depth_is_accepted_around_a_drafter_whose_state_moves(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(tiny_target("llama"))
    prompts = [random_prompt(50 + row, seed=row) for row in range(4)]
    expected = [Decoder(target).generate(prompt, max_new_tokens=40, **GREEDY).sequences[0] for prompt in prompts]
    scripted = ScriptedDrafter(expected, VOCAB_SIZE)
    assert not scripted.has_static_state
    decoder = Decoder(target, scripted, tree=DynamicTree(3, 3, 8))
    recorded = capture(decoder)
    with caplog.at_level(logging.WARNING):
        found = decoder.generate(**pad_prompts(prompts), max_new_tokens=40, **GREEDY)
    for row, text in enumerate(expected):
        assert found.sequences[row][3 - row :].tolist() == text.tolist()
    assert min(found.stats.accepted_histogram) > 0, "not every depth was reached"
    assert recorded.used == ALL - {"draft", "root"}
    assert not recorded.eager
    assert not caplog.messages


class HostReader(NgramDrafter):
    """Its state stays where it is, but it asks for a value."""

    def expand(self, state: Any, token_ids: Tensor, parents: Tensor, depth: int) -> DraftLogits:
        assert token_ids.max().item() < VOCAB_SIZE
        return super().expand(state, token_ids, parents, depth)


HOST_READERS: dict[str, Callable[[], Drafter]] = {
    "expand": HostReader,
    "staged": lambda: StagedDrafter(SmallModelDrafter(tiny_target("llama", seed=1))),
}


@pytest.mark.parametrize("name", HOST_READERS)
def test_a_drafter_that_reads_on_the_host_runs_eagerly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target, drafter, prompt = Target(tiny_target("llama")), HOST_READERS[name](), random_prompt(9).repeat(1, 3)
    decoder, eager = (Decoder(target, drafter, tree=chain(3)) for _ in range(2))
    recorded = capture(decoder)
    with caplog.at_level(logging.WARNING):
        found, expected = (one.generate(prompt, max_new_tokens=30, **GREEDY) for one in (decoder, eager))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.stats.accepted_histogram == expected.stats.accepted_histogram
    assert recorded.used >= {"verify", "accept", "commit"}
    assert recorded.eager == ({"draft"} if drafter.has_static_state else set())
    assert ["draft" in message and "CUDA graph" in message for message in caplog.messages] == [True] * len(
        recorded.eager
    )


@pytest.mark.parametrize("kind", slow_but({"mtp"}, ["mtp", "kangaroo", "block"]))
def test_trees_of_all_sizes_and_steps_without_the_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that wait for the drafter outlive the replays that made them; the drafter catches up now and then."""
    monkeypatch.setattr("draftsmith.inference.state.CATCH_UP", 5)
    target, prompt = Target(tiny_target("llama", num_hidden_layers=2)), random_prompt(9).repeat(1, 3)
    drafter = tiny_heads(kind, target)
    expected = Decoder(target).generate(prompt, max_new_tokens=70, **SAMPLED).sequences
    (eager, _), (decoder, planner) = (restless(target, drafter) for _ in range(2))
    recorded = capture(decoder)
    for _ in range(2):
        found, other = (one.generate(prompt, max_new_tokens=70, **SAMPLED) for one in (decoder, eager))
        assert found.sequences.tolist() == expected.tolist()
        assert found.stats.accepted_histogram == other.stats.accepted_histogram, "the drafts are others"
    assert None in planner.taken
    assert len(planner.taken) > 3
    assert recorded.num_replays > 50
    assert recorded.used >= ALL
    assert not recorded.eager


def test_conversations_streams_and_scores() -> None:
    target, prompt = Target(tiny_target("llama")), random_prompt(50)
    drafter = tiny_heads("mtp", target)
    decoder, eager = (Decoder(target, drafter, tree="dynamic:3,3,8") for _ in range(2))
    recorded = capture(decoder)
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for seed in range(3):
        first, second = (
            one.generate(prompt, reuse_cache=seed > 0, do_sample=True, seed=seed, **settings)
            for one in (decoder, eager)
        )
        assert first.sequences.tolist() == second.sequences.tolist()
        assert first.stats.accepted_histogram == second.stats.accepted_histogram
        for mine, theirs in ((first.scores, second.scores), (first.logits, second.logits)):
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other)
        prompt = torch.cat([first.sequences, random_prompt(3, seed=seed)], dim=1)
    streams = [list(one.stream(prompt, max_new_tokens=12, **GREEDY)) for one in (decoder, eager)]
    for mine, theirs in zip(*streams, strict=True):
        assert list(mine) == list(theirs)
        assert mine.probabilities == pytest.approx(theirs.probabilities)
    assert recorded.num_replays > 20
    assert not recorded.eager


def test_processors_that_read_the_text() -> None:
    """One of each kind: none of them reads a value on the host."""
    target, prompts = Target(tiny_target("llama")), long_prompts(2)
    decoder, eager = (Decoder(target, NgramDrafter(), tree=chain(2)) for _ in range(2))
    recorded = capture(decoder)
    settings: dict[str, Any] = {
        "max_new_tokens": 30,
        "no_repeat_ngram_size": 4,
        "bad_words_ids": [[3], [5, 7]],
        "min_new_tokens": 9,
        "eos_token_id": 2,
        **GREEDY,
    }
    for penalty in (1.3, 1.3, 1.1):
        expected, found = (one.generate(**prompts, repetition_penalty=penalty, **settings) for one in (eager, decoder))
        assert found.sequences.tolist() == expected.sequences.tolist()
    assert recorded.num_replays > 100
    assert not recorded.eager


def test_batch_invariant_steps() -> None:
    """In trees and beside other rows, the scores of plain decoding in this mode, bit by bit."""
    target = Target(tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=2))
    settings = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    prompts, plain = [random_prompt(50 + row, seed=row) for row in range(3)], Decoder(target, batch_invariant=True)
    expected = [plain.generate(prompt, **settings) for prompt in prompts]
    drafter = ScriptedDrafter([output.sequences[0] for output in expected], VOCAB_SIZE)
    decoder = Decoder(target, drafter, tree=DynamicTree(3, 3, 8), batch_invariant=True)
    recorded = capture(decoder)
    found = decoder.generate(**pad_prompts(prompts), **settings)
    assert sum(found.stats.accepted_histogram[1:]) > 0
    for row, alone in enumerate(expected):
        assert found.sequences[row, -16:].tolist() == alone.sequences[0, -16:].tolist()
        assert all(torch.equal(mine[row], theirs[0]) for mine, theirs in zip(found.logits, alone.logits, strict=True))
    assert recorded.num_replays > 5
    assert not recorded.eager


def test_another_threshold_takes_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_for("kangaroo-1")
    heads = tiny_heads("kangaroo", target)
    decoder, eager = (Decoder(target, heads, tree=chain(3)) for _ in range(2))
    recorded, call = capture(decoder), Step.__call__
    trees: list[list[Any]] = []

    def note(step: Step, *args: Any, **options: Any) -> Any:
        output = call(step, *args, **options)
        trees[-1].append(output.tree.token_ids.tolist())
        return output

    monkeypatch.setattr(Step, "__call__", note)
    for threshold in (None, 0.9, None):
        for one in (eager, decoder, decoder):
            assert one.drafter is not None
            one.drafter.config.confidence_threshold = threshold
            trees.append([])
            one.generate(random_prompt(9), max_new_tokens=20, **GREEDY)
        assert trees[-1] == trees[-2] == trees[-3]
    assert trees[0] == trees[-1] != trees[3]
    assert not recorded.eager


def test_another_batch_size_takes_other_graphs() -> None:
    target = Target(tiny_target("llama"))
    decoder = Decoder(target, tiny_heads("eagle3", target), tree=chain(2))
    recorded = capture(decoder)
    for batch_size in (1, 2, 1):
        prompts = long_prompts(batch_size)
        expected = Decoder(target).generate(**prompts, max_new_tokens=15, **SAMPLED).sequences
        assert decoder.generate(**prompts, max_new_tokens=15, **SAMPLED).sequences.tolist() == expected.tolist()
        entries = recorded.graphs["verify"].entries.values()
        assert {entry.result.logits.shape[0] for entry in entries if entry.is_captured} == {batch_size}


OTHER_LENGTHS = ["eagle3-0", "kangaroo-0", "small model", "medusa-0"]


@pytest.mark.parametrize("name", slow_but({"kangaroo-0"}, OTHER_LENGTHS))
def test_prompts_of_other_lengths_share_the_graphs(name: str) -> None:
    """Of a single token the drafter reads nothing before its first draft."""
    target = Target(tiny_target("llama"))
    decoder, eager = (Decoder(target, DRAFTERS[name](target), tree=chain(2)) for _ in range(2))
    recorded = capture(decoder)
    sizes = []
    for length in (20, 21, 1, 23, 24):
        prompt = random_prompt(length, seed=length)
        found, expected = (one.generate(prompt, max_new_tokens=24, **GREEDY) for one in (decoder, eager))
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert found.stats.accepted_histogram == expected.stats.accepted_histogram
        sizes.append(recorded.num_graphs)
    assert sizes[1] == sizes[4]
    assert not recorded.eager


# A state never moves.


def state_tensors(value: Any, besides: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a drafter's state with their places in it, but for those of an object that all states share."""
    if isinstance(value, Tensor):
        yield name, value
    elif value is not besides and not isinstance(value, torch.nn.Module):
        named = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).items()
        for key, part in enumerate(value) if isinstance(value, (tuple, list)) else named:
            yield from state_tensors(part, besides, f"{name}.{key}")


def lasting_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Those that a drafter's state has from one text to the next."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, KVCache):
        yield from lasting_tensors([value.lengths, *value._buffers], f"{name} cache")
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from lasting_tensors(part, f"{name} {place}")
    elif isinstance(value, RowState):
        for field in (*value.row_fields, *value.slot_fields, "cache"):
            yield from lasting_tensors(getattr(value, field, None), f"{name} {field}")


class Watch:
    """Before each draft, checks that a state lies where it lay, the drafter's too. What else there is in the drafter's
    state has come to lie elsewhere since the draft before, and is filled with nonsense: none of it may be read."""

    def __init__(self, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: dict[str, int] = {}
        self.num_checks = 0
        self._before: set[int] | None = None
        draft = step.runner.draft

        def check_and_draft(step: Step, state: DecodeState, *args: Any) -> Any:
            self.check(state)
            self.spoil(state)
            return draft(step, state, *args)

        monkeypatch.setattr(step, "runner", replace(step.runner, draft=check_and_draft))

    def check(self, state: DecodeState) -> None:
        tensors = {name: value for name, value in vars(state).items() if isinstance(value, Tensor)}
        tensors |= {f"cache {place}": buffer for place, buffer in enumerate(state.cache._buffers)}
        tensors |= dict(lasting_tensors(state.draft, "draft"))
        tensors |= {"lengths": state.cache.lengths, "texts": state.history.token_ids, "ends": state.history.lengths}
        for name, tensor in tensors.items():
            assert self.places.setdefault(name, tensor.data_ptr()) == tensor.data_ptr(), f"{name} has moved"
        assert {"tokens", "num_tokens", "pending_ids", "num_pending", "active", "cache 0"} <= set(self.places)
        self.num_checks += 1

    def spoil(self, state: DecodeState) -> None:
        found = [tensor for _, tensor in state_tensors(state.draft, state.cache)]
        if self._before is not None:
            spoil(tensor for tensor in found if tensor.data_ptr() not in self._before)
        self._before = {tensor.data_ptr() for tensor in found}


STATIC_DRAFTERS = [name for name in DRAFTERS if name != "none"]


@pytest.mark.parametrize("name", slow_but({"eagle3-0", "kangaroo-0", "ngrams"}, STATIC_DRAFTERS))
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_no_tensor_of_a_state_moves(name: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps and texts. Rows end at several steps; those of an eager decoder leave."""
    target, prompts = target_for(name), long_prompts(3)
    drafter = DRAFTERS[name](target)
    assert drafter.has_static_state
    eager, decoder = (Decoder(target, drafter, tree=[[0], [1], [0, 0]]) for _ in range(2))
    settings = {"max_new_tokens": 30, **SAMPLED}
    text = eager.generate(**prompts, **settings).sequences
    settings["eos_token_id"] = [int(text[1, -20]), int(text[2, -10])]
    expected = eager.generate(**prompts, **settings)
    if is_captured:
        capture(decoder)
    watch = Watch(decoder.step, monkeypatch)
    for _ in range(2):
        found = decoder.generate(**prompts, **settings)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert found.stats.accepted_histogram == expected.stats.accepted_histogram
    assert watch.num_checks > 20
    assert is_captured or drafter.can_copy_rows == (len(decoder._state.rows) < 3)


@pytest.mark.parametrize("name", slow_but({"eagle3-0", "kangaroo-0", "ngrams"}, STATIC_DRAFTERS))
def test_no_tensor_of_a_state_moves_when_rows_join(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's text is its own, whoever comes and goes."""
    target = target_for(name)
    decoder = Decoder(target, DRAFTERS[name](target), tree="dynamic:3,2,6")
    prompts, budgets = [random_prompt(5 + row, seed=row).repeat(1, 3)[0].tolist() for row in range(4)], (9, 24, 5, 22)
    rows = [Row(0, prompt, 0, budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    with target.without_autograd():
        states = [decoder.step.new_state(size, 64, 64) for size in (3, 1)]
        engine = Engine(decoder.step, states[0], PhaseClock(GenerationStats(), target.device), planner=decoder.planner)
        watch, joining = Watch(decoder.step, monkeypatch), list(rows)
        while joining or states[0].rows:
            if joining and len(states[0].rows) < 3:
                join(engine, states[1], joining.pop(0))
            engine.advance()
            states[0].rows = [] if all(row.is_finished for row in states[0].rows) else states[0].rows
    assert watch.num_checks > 10
    for row in rows:
        expected = Decoder(target).generate(torch.tensor([row.prompt]), max_new_tokens=len(row.new), seed=3).sequences
        assert expected[0].tolist() == row.text


def join(engine: Engine, state: DecodeState, row: Row) -> None:
    read = finish(prefill(state, engine.step, [row], GenerationStats()))
    sampler = Sampler(do_sample=False, row_seeds=row_seeds(0, 1, state.tokens.device), texts=state.history)
    row.emit(engine.step.first(state, read, sampler).emitted[0, :1].tolist())
    engine.add(state, sampler)


# Graphs of functions of their own.


def test_replays_read_and_write_the_same_memory() -> None:
    memory = torch.zeros(4)

    def add(values: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        memory.add_(values[0])
        return (memory * 2).sum() / 2, values[0]

    graphs = Graphs("add", Recorder)
    results = [graphs.run((), add, (torch.full((4,), float(number)),)) for number in range(1, 6)]
    assert memory.tolist() == [15.0] * 4
    assert [result[0].item() for result in results] == [4.0, *[60.0] * 4], "replays share their results"
    assert results[-1][1].tolist() == [5.0] * 4
    (entry,) = graphs.entries.values()
    assert entry.graph.num_replays == 4


def test_a_read_on_the_host_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """And what came before the read has not happened twice."""
    count, graphs = torch.zeros(()), Graphs("read", Recorder)

    def read(values: tuple[Tensor]) -> Tensor:
        count.add_(1)
        return values[0] if values[0].sum() > 0 else -values[0]

    for _ in range(4):  # the first run, the one that is captured, and two more
        assert graphs.run((), read, (torch.ones(3),)).tolist() == [1.0] * 3
    assert count == 4
    assert graphs.is_eager
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "read runs eagerly from now on, not as a CUDA graph: aten" in caplog.text


def test_too_many_settings_run_eagerly(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPH_LIMIT", 2)
    graphs = Graphs("double", Recorder)
    for size in range(1, 5):
        assert graphs.run((), lambda values: values * 2, torch.ones(size)).tolist() == [2.0] * size
    assert len(graphs.entries) == 2
    assert "make a new Decoder" in caplog.text


def test_graphs_need_a_gpu_and_exclude_compile() -> None:
    model = tiny_target("llama")
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        Decoder(model, graphs=True)
    with pytest.raises(ValueError, match="choose one of them"):
        Decoder(model, graphs=True, compile=True)
