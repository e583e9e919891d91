"""Divergences are counted at every position of a text, found near-ties or not, and with the logits they came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.trees.token_tree import TokenTree
from scripts.benchmarks import bf16_divergence
from scripts.benchmarks.divergence_contenders import (
    FaultyTarget,
    OurGreedy,
    RecordingTarget,
    TransformersGreedy,
    check_decoded,
    make_transformers,
    walk,
)
from scripts.benchmarks.divergence_count import Decode, Decoded, Tally, count_divergences, find_gaps, find_step
from scripts.benchmarks.divergence_render import render
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

PROMPT = (7, 8)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
NUM_IDS = 12


def logits_of(tokens: list[int], runner_up: int = 0, lead: float = 8.0) -> torch.Tensor:
    rows = torch.zeros(len(tokens), NUM_IDS)
    rows[:, runner_up] = 16.0 - lead
    rows[torch.arange(len(tokens)), tokens] = 16.0
    return rows


def planted(faults: dict[int, tuple[int, float]], calls: list[tuple[int, int]] | None = None) -> Decode:
    """A decoding that writes TEXT but for the tokens of `faults`, whose lead over TEXT's is given, and nonsense behind
    a fault."""

    def decode(prefix: tuple[int, ...], max_new_tokens: int) -> Decoded:
        start = len(prefix) - len(PROMPT)
        assert list(prefix[len(PROMPT) :]) == TEXT[:start], "called with another text in front"
        if calls is not None:
            calls.append((start, max_new_tokens))
        tokens, rows = [], []
        for position in range(start, start + max_new_tokens):
            has_parted = any(start <= fault < position for fault in faults)
            token, lead = faults.get(position, (TEXT[position], 8.0))
            token = 11 if has_parted else token
            tokens.append(token)
            rows.append(logits_of([token], TEXT[position] if token != TEXT[position] else 0, lead))
        return check_decoded(tokens, torch.cat(rows), max_new_tokens)

    return decode


def count(decode: Decode, segment: int | None = None) -> Tally:
    tally = Tally()
    text = Decoded(TEXT, logits_of(TEXT, runner_up=10, lead=0.25), len(TEXT))
    count_divergences(tally, decode, "p", PROMPT, text, torch.bfloat16, segment=segment)
    return tally


def test_every_position_is_compared_once_behind_the_texts_own_tokens() -> None:
    calls: list[tuple[int, int]] = []
    tally = count(planted({2: (10, 0.125), 3: (10, 0.5), 9: (7, 2.0)}, calls))
    assert [(one.position, one.other, one.is_first) for one in tally.divergences] == [
        (2, 10, True),
        (3, 10, False),
        (9, 7, False),
    ]
    assert calls == [(0, 10), (3, 7), (4, 6)]  # the text ends with its last divergence
    assert tally.num_tokens == len(TEXT)
    assert tally.num_until_first == 3
    assert tally.per_10000 == 3000
    assert tally.first_per_10000 == pytest.approx(1e4 / 3)
    assert len(tally.changes) == 7


def test_gaps_are_in_steps_of_the_dtype() -> None:
    near, far = count(planted({2: (10, 0.125), 9: (7, 2.0)})).divergences
    assert near.step == 0.125  # bfloat16 from 16 to 32
    assert (near.plain, near.own) == ((16.0, 15.75), (15.875, 16.0))
    assert (near.plain_gap, near.own_gap) == (2.0, 1.0)
    assert (far.plain_gap, far.own_gap) == (128.0, 16.0)
    assert find_step(0.75, torch.float16) == 2.0**-11
    assert find_gaps([Decoded(TEXT, logits_of(TEXT, 10, 0.25), 1)], torch.bfloat16) == [2.0] * len(TEXT)


def test_without_faults_nothing_is_found_and_segments_are_new_calls() -> None:
    calls: list[tuple[int, int]] = []
    tally = count(planted({}, calls), segment=4)
    assert calls == [(0, 4), (4, 4), (8, 2)]
    assert not tally.divergences
    assert tally.num_tokens == tally.num_until_first == 10
    assert tally.num_equal_rows == 0  # the runner-up differs
    assert set(tally.changes) == {126.0}  # 2 steps ahead in the text's pass, 128 in its own


def test_a_decoding_that_stops_early_is_an_error() -> None:
    def stop(prefix: tuple[int, ...], max_new_tokens: int) -> Decoded:
        return Decoded(TEXT[:4], logits_of(TEXT[:4]), 1)

    with pytest.raises(RuntimeError, match="asked for 10 tokens behind 0, got 4"):
        count(stop)


def test_logits_that_did_not_choose_a_token_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not those that the tokens were chosen from"):
        check_decoded([1, 2], logits_of([1, 3]), 1)


def chain_of(tokens: list[int]) -> TokenTree:
    places = torch.arange(len(tokens))[None]
    return TokenTree(torch.tensor([tokens]), places - 1, places, torch.zeros(1, len(tokens)))


def test_walk_reads_the_rows_of_accepted_nodes() -> None:
    tree = TokenTree(
        *(torch.tensor([row]) for row in ([5, 6, 7, 8, 6], [-1, 0, 0, 2, -1], [0, 1, 1, 2, 0])), torch.zeros(1, 5)
    )
    logits = logits_of([7, 1, 8, 9, 2])
    assert torch.equal(walk(tree, logits), logits[[0, 2, 3]])
    assert torch.equal(walk(None, logits[:1]), logits[:1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_everybody_keeps_the_logits_of_its_own_passes(attention: str) -> None:
    """In float32 a tiny target's texts agree, and every kept row is that of a plain pass but for rounding."""
    model = tiny_target("llama", initializer_range=0.3, attn_implementation=attention)
    target = RecordingTarget(model)
    model.generation_config.eos_token_id = 0  # transformers 5.4.0 cannot look up prompts without one
    prompt = random_prompt(9)
    plain = TransformersGreedy(model)(tuple(prompt[0].tolist()), 24)
    full = model(torch.tensor([[*prompt[0].tolist(), *plain.token_ids]])).logits[0, 8:-1]
    assert (plain.num_passes, len(plain.token_ids)) == (24, 24)
    scripted = ScriptedDrafter([torch.tensor([*prompt[0].tolist(), *plain.token_ids])], VOCAB_SIZE)
    decodings = [one.decode for one in make_transformers(model, early_exit=2, segment=None)]
    decodings += [
        OurGreedy(target),
        *(OurGreedy(target, scripted, tree) for tree in ("chain", [[0], [1], [0, 0], [1, 0]])),
    ]
    for decode in decodings:
        run = decode(tuple(prompt[0].tolist()), 24)
        assert run.token_ids == plain.token_ids
        torch.testing.assert_close(run.logits.float(), full, atol=1e-4, rtol=0)
    assert run.num_passes < 24


def test_the_control_reads_its_drafts_at_wrong_places() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    prompt, tree = random_prompt(9), chain_of([5, 6, 7])
    logits = []
    for target in (RecordingTarget(model), FaultyTarget(model)):
        cache = target.new_cache(1, 16)
        target.prefill(cache, prompt, torch.tensor([prompt.shape[1]]))
        logits.append(target.verify(cache, tree).logits[0])
    torch.testing.assert_close(logits[0][0], logits[1][0])  # the root is no draft
    assert (logits[0] - logits[1]).abs().amax(dim=1)[1:].min() > 1e-2


def test_the_program_writes_what_it_counted(
    chat_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(args: object, dtype: str, attention: str) -> PreTrainedModel:
        model = tiny_target("llama", vocab_size=4096, dtype=getattr(torch, dtype), attn_implementation=attention)
        model.generation_config.eos_token_id = 2
        return model

    monkeypatch.setattr(bf16_divergence, "load_model", tiny)
    path, table = tmp_path / "out" / "counted.json", tmp_path / "out" / "counted.md"
    prompts = str(REPOSITORY / "examples" / "prompts.jsonl")
    words = ["--target", str(CHAT_TARGET), "--prompts", prompts, "--num_tokens", "12", "--max_new_tokens", "8"]
    words += ["--segment", "3", "--tree", "chain:2", "--json", str(path), "--markdown", str(table)]
    for dtype in ("float32", "bfloat16"):
        assert bf16_divergence.main([*words, "--dtype", dtype]) == 0
    reports = json.loads(path.read_text())["reports"]
    assert [one["environment"]["dtype"] for one in reports] == ["bfloat16", "float32"]
    bf16_divergence.keep_report(path, reports[1])
    assert json.loads(path.read_text())["reports"] == reports
    assert table.read_text() == render(reports)
    for report in reports:
        limit = report["environment"]["near_tie_steps"]
        names = {row["name"] for row in report["rows"]}
        assert {"plain decoding", "transformers generate", "n-grams, chain:2", "transformers prompt look-up"} < names
        for row in report["rows"]:
            assert row["num_tokens"] >= 12
            assert row["num_divergences"] == len(row["divergences"])
            for one in row["divergences"]:
                assert one["plain"][0] >= one["plain"][1]
                assert one["own"][0] <= one["own"][1]
                assert one["is_near_tie"] == (one["plain_gap"] + one["own_gap"] <= limit)
        assert [row["name"] for row in report["rows"] if row["is_faulty"]] == 2 * [
            "control: n-grams, chain:2, drafts one position too far"
        ]
    assert all(not row["num_divergences"] for row in reports[1]["rows"] if not row["is_faulty"])


def test_far_divergences_are_flagged() -> None:
    divergence = {"prompt": "p", "position": 3, "is_first": True, "token": 1, "other": 2, "plain": [20.0, 12.0]}
    divergence |= {"own": [12.0, 20.0], "step": 0.125, "texts": ["a", "|"], "exact": [20.1, 12.2], "plain_gap": 64.0}
    divergence |= {"own_gap": 64.0, "is_near_tie": False}
    row = {
        "name": "broken",
        "is_faulty": False,
        "reference": "plain",
        "num_tokens": 10,
        "num_divergences": 1,
        "per_10000": 1000.0,
    }
    row |= {
        "standard_error": 1000.0,
        "num_first": 1,
        "first_per_10000": 2500.0,
        "tokens_per_pass": 2.0,
        "equal_rows": 0.0,
        "is_faulty": False,
    }
    row |= {"change_steps": {"median": 0.0, "p99.9": 1.0, "max": 1.0}, "num_near_ties": 0, "divergences": [divergence]}
    reference = {"name": "plain", "num_texts": 1, "num_tokens": 10, "repeated_4grams": 0.0, "equal_tops": 0}
    reference |= {"gap_steps": {"median": 20.0, "p10": 5.0, "p1": 1.0}}
    environment = {
        "dtype": "bfloat16",
        "attention": "sdpa",
        "gpu": None,
        "cpu": "cpu",
        "cpu_flags": ["avx2"],
        "threads": 1,
    }
    environment |= {"torch": "2", "transformers": "5", "commit": "c", "max_new_tokens": 10, "near_tie_steps": 4.0}
    environment |= {"command": "python", "target": "t", "higher_precision": "float32"}
    text = render([{"environment": environment, "references": [reference], "rows": [row]}])
    assert "**1 of 1 divergences are no near-ties**" in text
    assert '"a", "\\|"' in text
    near = divergence | {"own": [20.0, 20.125], "plain_gap": 0.0, "own_gap": 1.0, "is_near_tie": True}
    rows = [row | {"divergences": [near]}, row | {"is_faulty": True}]
    text = render([{"environment": environment, "references": [reference], "rows": rows}])
    assert "All 1 divergences are near-ties: between the two passes a lead changes by at most 1.0 steps." in text
    assert "fault of the control, 1 of 1 divergences are no near-ties: the lead changes by up to 128.0 steps." in text


def test_the_limit_is_what_plain_decodings_differ_by() -> None:
    theirs, ours = (bf16_divergence.Reference(name, planted({})) for name in ("theirs", "ours"))
    theirs.tallies = {"ours": Tally(changes=[0.0, 1.0]), "drafted": Tally(changes=[9.0])}
    ours.tallies = {"theirs": Tally(changes=[0.5]), "drafted": Tally(changes=[9.0])}
    assert bf16_divergence.find_limit([theirs, ours]) == bf16_divergence.ROUNDING_STEPS
    ours.tallies["theirs"].changes.append(3.0)
    assert bf16_divergence.find_limit([theirs, ours]) == 3.0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--dtype", "int8"], "got --dtype int8"),
        (["--attention", "flash"], "got --attention flash"),
        (["--num_tokens", "0"], "at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(option: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=f"bf16_divergence.py: .*{words}"):
        bf16_divergence.main(["--target", str(CHAT_TARGET), "--prompts", "p.jsonl", *option])
