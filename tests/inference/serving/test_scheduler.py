"""Rows of many requests in one batch: each gets its own text, whoever else is there."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draftsmith.inference import Drafter, NgramDrafter, SmallModelDrafter, StagedDrafter, Target
from draftsmith.inference import prefill as prompt_reading
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.planning.costs import StepCosts
from draftsmith.inference.planning.planner import Planner
from draftsmith.inference.serving.errors import RequestError
from draftsmith.inference.serving.lane import Lane
from draftsmith.inference.serving.scheduler import Limits, Scheduler
from draftsmith.inference.state import DecodeState
from draftsmith.inference.step import Step
from draftsmith.inference.trees.survival import Survival
from tests.heads.tiny_heads import tiny_heads
from tests.inference.serving.arrivals import SECONDS, Arrival, draw_arrivals, end, serve
from tests.inference.trees.test_batch_tree import trust_less
from tests.lossless.restless import RestlessPlanner
from tests.params import slow_but
from tests.tiny_targets import random_prompt, target_of, tiny_target

# The target itself as the small model: deep drafts are accepted.
DRAFTERS: dict[str, tuple[str, Callable[[Target], Drafter | None]]] = {
    "plain": ("gemma3", lambda _: None),
    "oracle": ("llama", lambda target: SmallModelDrafter(target)),
    "oracle-with-windows": ("gemma3", lambda target: SmallModelDrafter(target)),
    "ngrams": ("llama", lambda _: NgramDrafter()),
    "staged": ("llama", lambda target: StagedDrafter(SmallModelDrafter(target), num_guesses=2)),
    "eagle3": ("llama", lambda target: tiny_heads("eagle3", target)),
    "mtp": ("llama", lambda target: tiny_heads("mtp", target, share_block=False)),
    "kangaroo": ("gemma3", lambda target: tiny_heads("kangaroo", target, exit_layer=4)),
}
LIMITS = Limits(max_rows=3, max_length=200, max_waiting=20)


def greedy(target: Target, prompt: list[int], num_new: int, **settings: Any) -> Arrival:
    return Arrival(target, prompt, {"max_new_tokens": num_new, "do_sample": False}, **settings)


@pytest.fixture
def oracle() -> Iterator[Scheduler]:
    target = target_of("llama")
    scheduler = Scheduler(target, {"draft": SmallModelDrafter(target)}, limits=LIMITS)
    yield scheduler
    if scheduler.is_running:
        end(scheduler)


@pytest.mark.parametrize("name", slow_but({"plain", "oracle", "ngrams", "eagle3"}, list(DRAFTERS)))
def test_a_text_depends_on_nobody_else_in_the_batch(name: str) -> None:
    """Rows of all options arrive while others run; more than there is room for; their prompts begin alike or not."""
    family, make = DRAFTERS[name]
    target = target_of(family)
    drafter = make(target)
    tree = None if drafter is None else "chain:3" if name == "staged" else "dynamic"
    scheduler = Scheduler(target, {} if drafter is None else {"draft": drafter}, tree=tree, limits=LIMITS)
    arrivals = draw_arrivals(target, 12)
    for arrival in arrivals[4::5]:
        arrival.lane = ("none", None)
    serve(scheduler, arrivals)
    end(scheduler)
    for number, arrival in enumerate(arrivals):
        assert arrival.pieces[-1].error is None
        assert arrival.tokens == arrival.alone(), number
        ends = arrival.options.get("eos_token_id", [])
        assert arrival.text == "".join(f" {token}" for token in arrival.tokens if token not in ends)
    if "oracle" in name or name == "staged":
        rows = [one.row for one in arrivals if one.row is not None and one.lane[0] == "draft"]
        assert max(len(row.stats.accepted_per_depth) for row in rows) >= 3, "deep drafts were accepted"


def test_texts_of_a_batch_invariant_target_in_bfloat16() -> None:
    """Where other rows in a pass would change the rounding, and with it texts."""
    target = Target(tiny_target("llama", dtype=torch.bfloat16)).batch_invariant()
    scheduler = Scheduler(target, {"draft": SmallModelDrafter(target)}, limits=LIMITS)
    arrivals = draw_arrivals(target, 8)
    serve(scheduler, arrivals)
    end(scheduler)
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]


def set_costs(monkeypatch: pytest.MonkeyPatch, *, most_rows: int) -> None:
    """In batches up to `most_rows` rows drafting is worth it, in larger ones not."""

    def expect(costs: StepCosts) -> list[float]:
        _, num_rows = costs._at
        return [1.0, *[1.1 if num_rows <= most_rows else 99.0] * 6]

    monkeypatch.setattr(StepCosts, "expect", expect)


def test_the_planner_hears_of_every_row(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the places of rows that end: none of them holds up a batch."""
    set_costs(monkeypatch, most_rows=9)
    seen: list[tuple[int, int]] = []
    learn = Planner.learn

    def note(planner: Planner, policy: Any, counted: Any) -> None:
        (lane,) = (one for one in oracle._lanes.values() if one.planner is planner)
        seen.append((len(counted), len(lane.replies)))
        assert planner._is_served
        learn(planner, policy, counted)

    monkeypatch.setattr(Planner, "learn", note)
    arrivals = [greedy(oracle.target, [3 + n], 10 + 20 * n, lane=("draft", "auto")) for n in range(3)]
    serve(oracle, arrivals, num_first=3)
    assert all(counted == running for counted, running in seen)
    assert max(seen) == (3, 3)


def test_rows_draft_now_and_then(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lane of its own, for as long as there are few of them."""
    set_costs(monkeypatch, most_rows=2)
    arrivals = draw_arrivals(oracle.target, 6)
    for arrival in arrivals[1::2]:
        arrival.lane = ("draft", "auto")
    serve(oracle, arrivals)
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]


def test_a_batch_that_never_drafts_holds_no_more_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join and leave all the time. The drafter reads what waits for it, and its rows stay those of the batch."""
    target, held, beyond = target_of("llama", num_hidden_layers=2), [], []
    monkeypatch.setattr("draftsmith.inference.state.CATCH_UP", 16)
    set_costs(monkeypatch, most_rows=0)
    append = DecodeState.append

    def note(state: DecodeState, *args: Any) -> None:
        append(state, *args)
        if state.rows and state.drafter is not None:
            held.append(int(state.num_pending.max()))
            beyond.append(state.pending_bound - held[-1])

    monkeypatch.setattr(DecodeState, "append", note)
    scheduler = Scheduler(target, {"draft": tiny_heads("eagle3", target)}, tree="auto", limits=LIMITS)
    draws = random.Random(2)
    options = [{"max_new_tokens": draws.randrange(5, 90), "do_sample": bool(draws.randrange(2))} for _ in range(7)]
    arrivals = [Arrival(target, [3 + number], each, seed=number) for number, each in enumerate(options)]
    serve(scheduler, arrivals, num_first=3, chance=0.0)
    end(scheduler)
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]
    assert len(held) > 4 * 16
    assert max(held) == 16
    assert max(beyond) <= 0, "what rows that left had waiting"
    assert all(one.row is not None and not one.row.drafts for one in arrivals)


def test_a_row_without_a_lane_is_not_passed_for_ever(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes are busy for as long as others may pass; then one of them empties."""
    monkeypatch.setattr("draftsmith.inference.serving.scheduler.PATIENCE_SECONDS", 0.0)
    lanes = [("draft", None), ("none", None), ("draft", "chain:2"), *[("draft", None), ("none", None)] * 4]
    arrivals = [greedy(oracle.target, [number + 3], 8, lane=lane) for number, lane in enumerate(lanes)]
    serve(oracle, arrivals, num_first=len(arrivals))
    starts = [one.row.started for one in arrivals if one.row is not None and one.row.started is not None]
    assert starts[2] == min(starts[2:])
    assert len(oracle._lanes) == oracle.limits.max_lanes == 2
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]


def test_reports_tell_drafts_from_the_targets_own_tokens(oracle: Scheduler) -> None:
    arrival = greedy(oracle.target, [5, 6, 7], 20, num_top=3)
    serve(oracle, [arrival], num_first=1)
    first, *steps = arrival.pieces
    assert [token.depth for token in first.tokens] == [0]
    assert any(len(piece.tokens) > 2 for piece in steps)
    for piece in steps:
        depths = [token.depth for token in piece.tokens]
        assert depths == [*range(1, len(depths)), 0] or (piece.finish_reason and depths == [*range(1, len(depths) + 1)])
        for token in piece.tokens:
            assert (token.probability is None) == (token.depth == 0)
            assert token.probability is None or 0 < token.probability <= 1.0001
    with torch.no_grad():
        logits = oracle.target.model(torch.tensor([arrival.prompt + arrival.tokens])).logits[0, 2:-1]
    expected = logits.log_softmax(-1)
    tokens = [token for piece in arrival.pieces for token in piece.tokens]
    for token, scores in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(float(scores[token.id]), abs=1e-4)
        best = scores.topk(3)
        assert [number for number, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    stats = arrival.row.stats
    # The first token is the prompt's; the last step may be cut by the limit.
    assert 1 + sum((d + 1) * n for d, n in enumerate(stats.accepted_histogram)) >= 20
    assert stats.num_verify_steps == len(steps)


def test_long_prompts_are_read_between_the_steps_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_target("llama", max_position_embeddings=4 * PREFILL_CHUNK))
    drafter = SmallModelDrafter(target)
    limits = Limits(max_rows=2, max_length=3 * PREFILL_CHUNK, max_waiting=4)
    scheduler = Scheduler(target, {"draft": drafter}, tree="chain:1", limits=limits)
    long = random_prompt(2 * PREFILL_CHUNK + 9, seed=3)[0].tolist()
    arrivals = [greedy(target, [4, 5, 6], 30), greedy(target, long, 3)]
    events: list[str] = []
    read_chunk, advance = prompt_reading._read_rest, Lane.advance

    def note_chunks(*args: Any) -> Any:
        chunks = read_chunk(*args)
        while True:
            try:
                size = next(chunks)
            except StopIteration as done:
                return done.value
            events.append("chunk")
            yield size

    monkeypatch.setattr(prompt_reading, "_read_rest", note_chunks)
    monkeypatch.setattr(Lane, "advance", lambda self: (events.append("step"), advance(self))[1])
    serve(scheduler, arrivals, num_first=1)
    end(scheduler)
    monkeypatch.undo()
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]
    chunks = [place for place, event in enumerate(events) if event == "chunk"]
    assert len(chunks) == 4
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(chunks[1:])), events


def test_prompts_that_begin_alike_are_read_once(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a running row, and from a prompt whose row has left."""
    sizes: list[int] = []
    prefill = Target.prefill

    def note(self: Any, cache: Any, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(token_ids.shape[1])
        return prefill(self, cache, token_ids, *args, **kwargs)

    monkeypatch.setattr(Target, "prefill", note)
    common = random_prompt(50, seed=5)[0].tolist()
    arrivals = [greedy(oracle.target, [*common, *rest], 12) for rest in ([3, 4, 5], [6, 7, 8, 9], [3, 4, 5])]
    serve(oracle, arrivals[:2], num_first=1)
    serve(oracle, arrivals[2:], num_first=1)
    monkeypatch.undo()
    assert [one.tokens for one in arrivals] == [one.alone() for one in arrivals]
    assert sizes[0] == 53
    assert max(sizes[1:]) <= 6


def test_prompts_and_steps_run_in_the_runners_context(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is closed between them: other threads have passes, too."""
    open_contexts, seen = [0], set()

    @contextmanager
    def active(_: Step) -> Iterator[None]:
        open_contexts[0] += 1
        yield
        open_contexts[0] -= 1

    def note(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (seen.add((name, open_contexts[0])), run(*args, **kwargs))[1]

    for name in ("prefill", "verify"):
        monkeypatch.setattr(Target, name, note(name, getattr(Target, name)))
    monkeypatch.setattr(Step, "active", active)
    serve(oracle, [greedy(oracle.target, [4, 5, token], 12) for token in (6, 7)], num_first=1)
    assert seen == {("prefill", 1), ("verify", 1)}
    assert open_contexts == [0]


def test_cancelled_rows_leave_before_the_next_step(oracle: Scheduler) -> None:
    """One runs, one waits."""
    arrivals = [greedy(oracle.target, [number + 3], 150) for number in range(4)]
    done = threading.Event()

    def look() -> None:
        if len(arrivals[1].pieces) == 2:
            for number in (1, 3):
                arrivals[number].row.cancel()
        if all(arrivals[number].pieces and arrivals[number].pieces[-1].is_last for number in (0, 2)):
            done.set()

    oracle.start()
    oracle.submit([one.make_row(look) for one in arrivals], ("draft", None))
    assert done.wait(SECONDS)
    assert str(arrivals[1].pieces[-1].error) == "cancelled"
    assert len(arrivals[1].pieces) == 3
    assert not arrivals[3].tokens
    assert arrivals[0].tokens == arrivals[0].alone()
    assert arrivals[2].tokens == arrivals[2].alone()
    end(oracle)
    assert oracle.metrics.registry.get_sample_value("draftsmith:num_requests_running") == 0


def test_a_reply_is_counted_before_its_last_piece(oracle: Scheduler) -> None:
    """`vllm bench serve` reads /metrics as soon as the last reply has arrived."""
    names = (
        "draftsmith:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "draftsmith:request_queue_time_seconds_count",
        "draftsmith:e2e_request_latency_seconds_count",
    )
    arrival = greedy(oracle.target, [3], 9)
    counts: list[tuple[float | None, ...]] = []
    done = threading.Event()

    def look() -> None:
        counts.append(tuple(map(oracle.metrics.registry.get_sample_value, names)))
        if arrival.pieces[-1].is_last:
            done.set()

    oracle.start()
    oracle.submit([arrival.make_row(look)], ("draft", None))
    assert done.wait(SECONDS)
    assert counts[0] == (0, 0, 0, 0, 0)
    assert counts[-1] == (9, len(arrival.row.drafts), sum(step.num_accepted for step in arrival.row.drafts), 1, 1)
    assert counts[-1][2]


def test_a_failing_step_ends_its_rows_only(oracle: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    broken, fine, later = (
        greedy(oracle.target, [number + 3], 12, lane=(name, None))
        for number, name in enumerate(("draft", "none", "draft"))
    )
    advance = Lane.advance

    def fail(self: Lane) -> None:
        if self.step.drafter is not None:
            raise RuntimeError("no memory")
        advance(self)

    monkeypatch.setattr(Lane, "advance", fail)
    serve(oracle, [broken, fine], num_first=2)
    monkeypatch.undo()
    serve(oracle, [later], num_first=1)
    error = broken.pieces[-1].error
    assert error is not None
    assert (str(error), error.status) == ("internal error: see the server's log", 500)
    assert "no memory" in caplog.text
    assert [fine.tokens, later.tokens] == [fine.alone(), later.alone()]


def test_the_queue_is_bounded(oracle: Scheduler) -> None:
    """Free rows count."""
    oracle.start()
    rows = [greedy(oracle.target, [3], 2).make_row() for _ in range(LIMITS.max_rows + LIMITS.max_waiting + 1)]
    with pytest.raises(RequestError, match="queue is full") as caught:
        oracle.submit(rows, ("draft", None))
    oracle.submit(rows[1:], ("draft", None))
    assert caught.value.status == 429
    assert "Retry-After" in caught.value.headers


def test_stopping_lets_rows_end_for_a_while(oracle: Scheduler) -> None:
    """A short row ends; one that would go on gets an error; no new ones are taken."""
    started, ended = threading.Event(), threading.Event()
    short = greedy(oracle.target, [3], 20)
    oracle.start()
    oracle.submit([short.make_row(started.set)], ("draft", None))
    assert started.wait(SECONDS)
    oracle.stop(SECONDS)
    with pytest.raises(RequestError, match="shutting down"):
        oracle.submit([short.make_row()], ("draft", None))
    oracle.join(SECONDS)
    assert short.pieces[-1].finish_reason == "length"

    scheduler = Scheduler(oracle.target, {}, limits=LIMITS)
    long = greedy(oracle.target, [3], 190)
    scheduler.start()
    scheduler.submit([long.make_row(lambda: ended.set())], ("draft", None))
    assert ended.wait(SECONDS)
    end(scheduler)
    error = long.pieces[-1].error
    assert error is not None
    assert (str(error), error.status) == ("the server is shutting down", 503)


def test_what_cannot_be_served_is_refused() -> None:
    class Fixed(NgramDrafter):
        can_copy_rows = False

    with pytest.raises(ValueError, match="cannot copy rows"):
        Scheduler(target_of("llama"), {"draft": Fixed()}, limits=LIMITS)


def test_a_draft_is_as_long_as_the_rows_own_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows share a budget, and the first is trusted most."""
    predict = Survival.predict
    monkeypatch.setattr(Survival, "predict", lambda *args: trust_less(predict(*args)))
    monkeypatch.setattr("draftsmith.inference.decoder.Planner", lambda trees, *_, **__: RestlessPlanner(trees[-1:]))
    target = target_of("llama")
    scheduler = Scheduler(target, {"draft": SmallModelDrafter(target)}, tree="auto", limits=LIMITS)
    arrivals = [greedy(target, [5, 6, number], 12) for number in range(4)]
    serve(scheduler, arrivals)
    end(scheduler)
    drafts = [draft for arrival in arrivals if arrival.row is not None for draft in arrival.row.drafts]
    assert all(draft.num_accepted <= draft.depth <= draft.num_drafted for draft in drafts)
    assert len({draft.depth for draft in drafts}) > 1
