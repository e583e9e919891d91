"""Steps without drafting: the drafter catches up in time, and drafts as if it had drafted all along."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Decoder, DynamicTree, Target, chain, generate
from draftsmith.inference import state as state_module
from draftsmith.inference.cache.kv_cache import KVCache
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.drafters.staged import StagedDrafter
from draftsmith.inference.engine import Engine
from draftsmith.inference.state import DecodeState
from draftsmith.inference.step import Step, StepOutput
from draftsmith.inference.trees.candidates import CandidateTrees
from draftsmith.inference.trees.token_tree import TokenTree
from tests.heads.tiny_heads import tiny_heads
from tests.inference.drafters.test_small_model import ScriptedChoice, rough_copy
from tests.memory_tracker import count_bytes
from tests.params import slow_but
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, target_of

DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{kind: lambda target, kind=kind: tiny_heads(kind, target) for kind in HEAD_TYPES},
    "ngram": lambda _: NgramDrafter(),
    "small model": lambda target: SmallModelDrafter(rough_copy(target.model)),
    "staged": lambda target: StagedDrafter(SmallModelDrafter(rough_copy(target.model))),
}
CATCH_UP = 16
PLAIN_STEPS = 2 * CATCH_UP + 7


@pytest.fixture(autouse=True)
def less_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter catches up after `CATCH_UP` tokens."""
    monkeypatch.setattr(state_module, "CATCH_UP", CATCH_UP)


def scripted(target: Target, drafter: Drafter, is_drafting: Sequence[bool] | None = None) -> Decoder:
    """A decoder that drafts in these steps, or in all."""
    tree: Any = chain(3) if drafter.drafts_chains_only else DynamicTree(3, 2, 6)
    decoder = Decoder(target, drafter, tree=tree if is_drafting is None else CandidateTrees([tree]))
    if is_drafting is not None:
        decoder.planner = ScriptedChoice(decoder.policy, is_drafting)
    return decoder


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[TokenTree]:
    """The trees that were drafted."""
    found: list[TokenTree] = []
    call = Step.__call__

    def note(step: Step, *args: Any, **options: Any) -> StepOutput:
        output = call(step, *args, **options)
        if output.policy is not None:
            found.append(output.tree)
        return output

    monkeypatch.setattr(Step, "__call__", note)
    return found


@pytest.mark.parametrize("longest", [CATCH_UP - 2, CATCH_UP + 1])
@pytest.mark.parametrize("name", slow_but({"eagle3", "kangaroo", "ngram", "small model"}, list(DRAFTERS)))
def test_after_plain_steps_it_drafts_what_it_would_draft_after_a_prompt(
    name: str, longest: int, trees: list[TokenTree]
) -> None:
    """A prompt is a full recompute. Two rows of two lengths, of which the drafter reads the plain steps in parts, with
    the prompts or after them."""
    target, num_new = target_of("llama", initializer_range=0.3), PLAIN_STEPS + 40
    drafter = DRAFTERS[name](target)
    prompts = [random_prompt(length, seed=length) for length in (longest, 9)]
    free = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    resumed = scripted(target, drafter, [*[False] * PLAIN_STEPS, *[True] * num_new])
    output = resumed.generate(**pad_prompts(prompts), **free, max_new_tokens=num_new)
    assert torch.equal(
        output.sequences, generate(target, None, **pad_prompts(prompts), **free, max_new_tokens=num_new).sequences
    )
    found = trees[:3]
    trees.clear()
    texts = [
        torch.cat([prompt[0], row[longest : longest + PLAIN_STEPS]])
        for prompt, row in zip(prompts, output.sequences, strict=True)
    ]
    scripted(target, drafter).generate(**pad_prompts(texts), **free, max_new_tokens=40)
    for one, other in zip(found, trees[:3], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=1e-4)
    assert len(found) == 3


@pytest.mark.parametrize("name", slow_but({"eagle3", "small model"}, list(DRAFTERS)))
def test_a_next_turn_goes_on_from_a_text_that_waited_whole(
    name: str, trees: list[TokenTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    advance = KVCache.advance
    monkeypatch.setattr(KVCache, "advance", lambda *given: (read.append(int(given[1].sum())), advance(*given)))
    target = target_of("llama", initializer_range=0.3)
    decoder = scripted(target, DRAFTERS[name](target), [*[False] * 3, True])
    free: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    text = decoder.generate(random_prompt(9), **free, max_new_tokens=4).sequences
    turn = torch.cat([text, random_prompt(5, seed=1)], dim=1)
    assert not trees
    decoder.generate(turn, **free, max_new_tokens=8, reuse_cache=True)
    assert read == [9, 5 + 2], "the question, the last token, and one whose feature was the newest"
    drafted, trees[:] = trees[:1], []
    scripted(target, DRAFTERS[name](target)).generate(turn, **free, max_new_tokens=8)
    assert drafted[0].token_ids.tolist() == trees[0].token_ids.tolist()
    torch.testing.assert_close(drafted[0].log_probs, trees[0].log_probs, atol=1e-4, rtol=1e-4)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DecodeState, int]]:
    """After each step, the state and how many tokens of a row wait for the drafter."""
    found: list[tuple[DecodeState, int]] = []
    emit = Engine.emit

    def note(engine: Engine, output: Any) -> Any:
        found.append((engine.state, int(engine.state.num_pending.max())))
        return emit(engine, output)

    monkeypatch.setattr(Engine, "emit", note)
    return found


@pytest.mark.parametrize("num_texts", slow_but({"2"}, {"2": 2, "12": 12}))
def test_what_waits_is_bounded(num_texts: int, states: list[tuple[DecodeState, int]]) -> None:
    target = target_of("llama")
    decoder = scripted(target, tiny_heads("eagle3", target), [False])
    held = set()
    for _ in range(num_texts):
        decoder.generate(random_prompt(5), max_new_tokens=180, do_sample=False, eos_token_id=None)
        held.add(count_bytes(decoder, besides=[target, decoder.drafter]))
    assert len(states) > 170 * num_texts
    assert len(held) == 1
    assert max(waiting for _, waiting in states) == CATCH_UP
    (state,) = {state for state, _ in states}
    assert state.pending_ids.shape[1] == CATCH_UP + 2 * decoder.step.path_width
    assert state.pending_features.shape[:2] == state.pending_ids.shape


def test_plain_decoding_holds_nothing_for_a_drafter(states: list[tuple[DecodeState, int]]) -> None:
    Decoder(target_of("llama")).generate(random_prompt(5), max_new_tokens=50, do_sample=False, eos_token_id=None)
    assert {waiting for _, waiting in states} == {0}
    assert states[-1][0].pending_features is None


@pytest.fixture
def eager_catching_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafter catches up after 4 tokens; notes how many waited then."""
    monkeypatch.setattr(state_module, "CATCH_UP", 4)
    waited: list[int] = []
    catch_up = DecodeState.catch_up

    def note(state: DecodeState, max_slots: int) -> None:
        waited.append(state.pending_bound)
        catch_up(state, max_slots)

    monkeypatch.setattr(DecodeState, "catch_up", note)
    return waited


@pytest.mark.parametrize("name", slow_but({"eagle3", "kangaroo", "staged"}, list(DRAFTERS)))
@pytest.mark.parametrize("can_leave", [True, False])
def test_texts_while_drafting_stops_and_goes_on(
    name: str, can_leave: bool, eager_catching_up: list[int], trees: list[TokenTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different times and leave, or stay without growing; then the next turn goes on from the cache."""
    target = target_of("gemma3", initializer_range=0.3)
    drafter = DRAFTERS[name](target)
    if not can_leave:
        monkeypatch.setattr(type(drafter), "can_copy_rows", False)
    prompts = [random_prompt(length, seed=length) for length in (4, 11, 7)]
    options: dict[str, Any] = {"do_sample": True, "seed": [1, 2, 3], "max_new_tokens": 60, "pad_token_id": 0}
    ends: dict[str, Any] = {"eos_token_id": list(range(2, VOCAB_SIZE, 30))}
    expected = generate(target, None, **pad_prompts(prompts), **options, **ends).sequences
    decoder = scripted(target, drafter, [True, *[False] * 7, True, *[False] * 12])
    assert torch.equal(decoder.generate(**pad_prompts(prompts), **options, **ends).sequences, expected)
    assert max(eager_catching_up) == 4
    assert len(eager_catching_up) > 3
    if can_leave:
        check_next_turn(decoder, target, [row[row > 0] for row in expected], options)


def check_next_turn(decoder: Decoder, target: Target, texts: list[Tensor], options: dict[str, Any]) -> None:
    """After a call that ended while tokens waited."""
    turns = pad_prompts([torch.cat([text, random_prompt(3, seed=1)[0]]) for text in texts])
    expected = generate(target, None, **turns, **options).sequences
    assert torch.equal(decoder.generate(**turns, **options, reuse_cache=True).sequences, expected)
