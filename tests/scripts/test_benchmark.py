"""The benchmark's numbers against numbers worked out by hand, and a small run from prompts to files."""

from __future__ import annotations

import copy
import gzip
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from draftsmith.heads import create_heads
from draftsmith.inference import GenerationStats, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.text_difference import Difference
from draftsmith.scripts.measuring.contenders import OurDecoding, TransformersDecoding, make_contenders
from draftsmith.scripts.measuring.environment import describe_environment
from draftsmith.scripts.measuring.matrix import measure_with_progress, name_heads
from draftsmith.scripts.measuring.measure import (
    PLAIN,
    TRANSFORMERS,
    Batch,
    Contender,
    Prompt,
    Run,
    Settings,
    load_prompts,
)
from draftsmith.scripts.measuring.report import headline, make_report, make_rows, write_json
from draftsmith.scripts.measuring.table import make_grids
from draftsmith.scripts.measuring.texts import share_of_repeated_ngrams
from draftsmith.scripts.shared.model_loading import encode_messages, load_assistant
from tests.tiny_targets import random_prompt, tiny_target


@pytest.fixture(scope="module")
def target(chat_target: PreTrainedModel) -> Target:
    return Target(chat_target)


def prompt(index: int = 0) -> Prompt:
    return Prompt(f"p{index}", index, torch.tensor([[1, 50 + index, 60]]))


def stats_of(accepted: list[int], *, num_passes: int | None = None, **seconds: float) -> GenerationStats:
    """accepted: of each row's verify steps, one after the other, in as many passes or fewer."""
    passes = len(accepted) if num_passes is None else num_passes
    stats = GenerationStats(num_verify_passes=passes, num_host_syncs=passes, num_drafted=3 * len(accepted))
    for count in accepted:
        stats.count_step(count)
    stats.seconds |= seconds
    return stats


def contender(name: str, runs: list[list[Run]]) -> Contender:
    return Contender(name, runs=runs, profiled=[run for repeat in runs for run in repeat])


# What is measured.


def test_contenders_take_turns_in_rotating_order() -> None:
    calls: list[tuple[str, int | None]] = []

    def recording(name: str) -> Contender:
        def decode(batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
            calls.append((name, max_new_tokens))
            return Run([[1]], 1.0, 1)

        return Contender(name, decode=decode)

    contenders = [recording(name) for name in "ab"] + [Contender("c", problem="too deep")]
    prompts = [prompt(0), prompt(1), prompt(2)]
    assert measure_with_progress(contenders, prompts, Settings(max_new_tokens=100, repeats=2)) == prompts
    assert calls[:4] == [("a", 32)] * 2 + [("b", 32)] * 2, "warming up comes first and is short"
    assert [name for name, _ in calls[4:]] == ["a", "b", "b", "a", "a", "b"] + ["b", "a", "a", "b", "b", "a"]
    assert [len(runs) for runs in contenders[0].runs] == [3, 3]
    assert contenders[2].runs == []


def test_as_many_prompts_as_the_time_allows(capsys: pytest.CaptureFixture[str]) -> None:
    """Each contender and the plan are told in lines, on an error output that is no terminal."""

    def decode(batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
        return Run([[1] * 10], 1.0, 10)  # 10 tokens/s: a prompt takes both contenders 20 s

    contenders = [Contender("a", decode=decode), Contender("b", "chain:2", decode=decode)]
    prompts, settings = [prompt(index) for index in range(9)], Settings(max_new_tokens=100, repeats=2)
    assert measure_with_progress(contenders, prompts, settings, minutes=4.0) == prompts[:5]
    assert [len(runs) for runs in contenders[0].runs] == [5, 5]
    told = capsys.readouterr().err
    for words in ("1/2 a: about 10.0 tokens/s", "2/2 b, chain:2: about 10.0 tokens/s", "5 of 9 prompts", "--minutes 0"):
        assert words in told
    assert measure_with_progress(contenders, prompts, settings, minutes=1e-6) == prompts[:1]
    assert measure_with_progress(contenders, prompts, replace(settings, batch_size=2), minutes=4.0) == prompts[:4]


def test_a_repetition_penalty_changes_the_texts(target: Target, chat_tokenizer: Any) -> None:
    story = encode_messages(chat_tokenizer, [{"role": "user", "content": "Write a short story about a dog."}])
    batch = Batch.of(Prompt("", 0, story))
    for decode in (OurDecoding(target, None), TransformersDecoding(target)):
        text, other = (decode(batch, Settings(24, repetition_penalty=penalty)).texts[0] for penalty in (1.0, 3.0))
        assert share_of_repeated_ngrams([text], n=1) > share_of_repeated_ngrams([other], n=1)


def test_a_penalty_of_one_is_no_penalty_whatever_the_model_says(
    target: Target, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a penalty the model's own holds; it is recorded and told, and counts where texts differ."""
    story = encode_messages(chat_tokenizer, [{"role": "user", "content": "Write a short story about a dog."}])
    batch, decodings = Batch.of(Prompt("", 0, story)), (OurDecoding(target, None), TransformersDecoding(target))
    ways = [Settings(24), Settings(24, repetition_penalty=1.0)]
    plain = [decode(batch, ways[0]).texts for decode in decodings]
    config = copy.deepcopy(target.model.generation_config)
    config.repetition_penalty = 3.0
    monkeypatch.setattr(target.model, "generation_config", config)
    for decode, texts in zip(decodings, plain, strict=True):
        assert [decode(batch, settings).texts == texts for settings in ways] == [False, True]
    reports = [describe_environment(target, settings, target="t", num_prompts=1) for settings in ways]
    assert [one["generation_config"] for one in reports] == [{"repetition_penalty": 3.0}, {}]
    assert [one["repetition_penalty"] for one in reports] == [None, 1.0]
    text = plain[0][0]
    other = [*text[:-1], text[-2]]  # a token that the penalty holds back
    contenders = [
        contender(TRANSFORMERS, [[Run([text], 1.0, 24)]]),
        contender("mine", [[Run([other], 1.0, 24, stats_of([1], verify=0.1, total=0.2))]]),
    ]
    gaps = []
    for settings, environment in zip(ways, reports, strict=True):
        rows = make_rows(contenders, [Prompt("", 0, story)], settings, target)
        gaps.append(rows[1].differences[0][1].gap)
        notes = make_grids(rows, environment)[0].notes
        assert any("repetition_penalty 3.0" in note for note in notes) == (settings is ways[0])
    assert gaps[0] > gaps[1] > 0


@pytest.mark.parametrize("pad", ["none of its own", "an EOS"])
def test_stop_strings_of_the_model_end_texts_alike_in_batches_of_any_size(
    pad: str, target: Target, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories = [
        encode_messages(chat_tokenizer, [{"role": "user", "content": text}])
        for text in ("Write a short story about a dog.", "Why is the sky blue?")
    ]
    prompts = [Prompt("", index, story) for index, story in enumerate(stories)]
    settings = Settings(24, tokenizer=chat_tokenizer)
    decodings = OurDecoding(target, None), OurDecoding(target, NgramDrafter()), TransformersDecoding(target)
    plain, other = (decodings[0](Batch.of(prompt), settings).texts[0] for prompt in prompts)
    stop = chat_tokenizer.decode(plain[5:8])
    assert stop not in chat_tokenizer.decode(other)
    config = copy.deepcopy(target.model.generation_config)
    config.stop_strings = [stop]
    if pad == "an EOS":
        config.pad_token_id = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    monkeypatch.setattr(target.model, "generation_config", config)
    expected = [decodings[2](Batch.of(prompt), settings).texts[0] for prompt in prompts]
    assert expected[0] == plain[:8]
    assert expected[1] == other
    for decode in decodings:
        assert decode(Batch.of(*prompts), settings).texts == expected
        assert [decode(Batch.of(prompt), settings).texts[0] for prompt in prompts] == expected
    (report,) = [describe_environment(target, settings, target="t", num_prompts=1)]
    assert report["generation_config"] == {"stop_strings": [stop]}
    json.dumps(report)


def test_a_tree_too_deep_for_its_heads_is_reported_not_raised(target: Target) -> None:
    heads = create_heads("medusa", target, num_heads=2)
    contenders = make_contenders(target, {"two": heads}, ["chain:2", "chain:3"], Settings())
    problems = {(one.name, one.tree): one.problem for one in contenders if one.problem}
    assert list(problems) == [("two", "chain:3")]
    assert "3 levels deep, the drafter proposes at most 2" in problems["two", "chain:3"]
    with pytest.raises(ValueError, match="'dynamc', which is neither a file"):
        make_contenders(target, {"two": heads}, ["dynamc"], Settings())


def test_trees_that_a_report_could_not_tell_apart_are_refused(target: Target, tmp_path: Path) -> None:
    files = [tmp_path / folder / "chain.yaml" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("paths: [[0]]\n")
    for trees in (["dynamic", "dynamic"], [str(file) for file in files], ["chain", str(files[0])]):
        with pytest.raises(ValueError, match="--tree has the same tree twice, or two files with the same name"):
            make_contenders(target, {}, trees, Settings())
    contenders = make_contenders(target, {"h": NgramDrafter()}, [str(files[0]), "chain:2"], Settings())
    assert [one.tree for one in contenders if one.name == "h"] == ["chain", "chain:2"]


def test_compiled_heads_stand_beside_compiled_plain_decoding(target: Target) -> None:
    eager = make_contenders(target, {"h": NgramDrafter()}, ["chain"], Settings())
    assert [one.name for one in eager if one.is_compiled] == []
    both = make_contenders(target, {"h": NgramDrafter()}, ["chain"], Settings(), modes=(True,))
    assert [one.name for one in both if one.is_compiled] == [
        f"{TRANSFORMERS}, compiled",
        f"{PLAIN}, compiled",
        "h, compiled",
    ]
    assert {TRANSFORMERS, PLAIN} <= {one.name for one in both}


def test_ratios_are_to_the_fastest_plain_decoding(target: Target) -> None:
    text = [5, 6, 7, 8]
    seconds = {TRANSFORMERS: 4.0, PLAIN: 2.0, f"{PLAIN}, compiled": 1.0, "h, compiled": 0.5}
    stats = {"prefill": 0.0, "draft": 0.1, "verify": 0.1, "accept": 0.1, "commit": 0.1, "total": 0.4}
    contenders = [
        contender(name, [[Run([text], spent, 4, None if name == TRANSFORMERS else stats_of([1, 0], **stats))]])
        for name, spent in seconds.items()
    ]
    contenders[-1].tree = "chain"
    rows = make_rows(contenders, [prompt(0)], Settings(), target)
    assert [row.over_plain for row in rows] == [0.25, 0.5, 1.0, 2.0]
    first, second = headline(rows)
    assert first.startswith("Fastest drafter: h, compiled, chain, acceptance length 1.50, texts identical: 1/1")
    assert "8.00 × transformers' generate, 2.00 × the fastest plain decoding" in second
    assert "(plain decoding, compiled)" in second
    assert headline(rows[:-1]) == []
    rows[-1].over_plain = 0.5
    *_, advice = headline(rows)
    assert all(words in advice for words in ("3.00 plain steps", "--tree auto"))


def test_an_assistant_drafts_for_transformers(tmp_path: Path) -> None:
    model = tiny_target("llama")
    model.save_pretrained(tmp_path / "same")
    tiny_target("llama", vocab_size=64).save_pretrained(tmp_path / "smaller")
    target = Target(model)
    settings = Settings(max_new_tokens=12)
    one = Prompt("p", 0, random_prompt(5))

    def assisted(name: str) -> Contender:
        assistant = load_assistant(str(tmp_path / name), target)
        contenders = make_contenders(target, {}, ["chain"], settings, assistant=assistant)
        return next(one for one in contenders if one.name == "transformers assisted")

    decode = assisted("same").decode
    assert decode is not None
    run = decode(Batch.of(one), settings)
    expected = model.generate(one.input_ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    assert run.texts == [expected]
    assert run.num_forwards < len(expected), "the target drafts for itself: its own tokens are accepted"
    assert "the target has a vocabulary of 128 tokens, the assistant one of 64" in assisted("smaller").problem


def test_acceptance_rules_are_an_axis_of_sampled_decoding(target: Target) -> None:
    def make(temperature: float, *rules: str) -> dict[tuple[str, str], Contender]:
        settings, drafters = Settings(max_new_tokens=4, temperature=temperature), {"h": NgramDrafter()}
        every = make_contenders(target, drafters, ["chain:2", "dynamic"], settings, acceptance=rules)
        return {(one.name, one.tree): one for one in every if one.name.startswith("h")}

    made = make(1.0, "exact", "rejection", "typical")
    assert {name for name, _ in made} == {"h", "h, rejection", "h, typical"}
    assert {key: one.problem for key, one in made.items() if one.problem}.keys() == {("h, rejection", "dynamic")}
    assert "shape does not depend on what was drafted" in made["h, rejection", "dynamic"].problem
    assert {name for name, tree in made if made[name, tree].is_exact} == {"h"}
    assert {name for name, _ in make(1.0, "rejection")} == {"h, rejection"}
    assert {name for name, _ in make(0.0, "exact", "rejection")} == {"h"}


def test_prompts_of_both_formats_and_too_long_ones(
    target: Target, chat_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"id": "first", "turns": ["Hi there", "not this one"]},
        {"id": "long", "turns": ["word " * 900]},
        {"id": "second", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"id": "third", "turns": ["left out by num_prompts"]},
    ]
    path = tmp_path / "prompts.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    prompts, num_too_long = load_prompts(path, chat_tokenizer, target, num_prompts=2, max_new_tokens=200)
    assert [(one.id, one.index) for one in prompts] == [("first", 0), ("second", 1)]
    assert num_too_long == 1
    assert chat_tokenizer.decode(prompts[0].input_ids[0]).endswith("Hi there<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="no prompt that leaves room for 1024 tokens"):
        load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=1024)
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"id": "p7", "turns": ["Hi"], "tools": [{"name": "look"}]}))
    with pytest.raises(ValueError, match=r"tools\.jsonl: the prompt p7: .* tools"):
        load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=8)
    with path.open("a") as appended:
        appended.write('\n{"id": "p8", "turns": ["Hi"]}\n')
    prompts, num_too_long = load_prompts(path, chat_tokenizer, target, num_prompts=1, max_new_tokens=8)
    assert ([(one.id, one.index) for one in prompts], num_too_long) == ([("p8", 0)], 0)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "left out 1 prompts" in warning
    assert "p7" in warning


# What the numbers say.


def test_rows_by_hand(target: Target) -> None:
    """Two prompts, two repeats: generate takes 1 s for 4 tokens, plain decoding 2 s, the drafter 0.5 s and then 1 s."""
    text = [5, 6, 7, 8]
    seconds = {"prefill": 0.1, "draft": 0.2, "verify": 0.3, "accept": 0.05, "commit": 0.05, "total": 0.8}
    mine = [Run([text], spent, 2, stats_of([1, 0], **seconds)) for spent in (0.5, 1.0)]
    contenders = [
        contender(TRANSFORMERS, [[Run([text], 1.0, 4), Run([text], 1.0, 4)] for _ in range(2)]),
        contender(PLAIN, [[Run([text], 2.0, 4, stats_of([0, 0, 0], **seconds)) for _ in range(2)] for _ in range(2)]),
        contender("mine", [[run, run] for run in mine]),
        Contender("broken", problem="too deep"),
    ]
    generate, plain, row, broken = make_rows(contenders, [prompt(0), prompt(1)], Settings(), target)
    assert generate.tokens_per_second == 4.0
    assert (generate.over_transformers, plain.over_transformers) == (1.0, 0.5)
    assert (row.tokens_per_second, row.tokens_per_second_range) == (6.0, (4.0, 8.0))
    # Ratios of the four pairs: 2, 2, 1, 1.
    assert (row.over_transformers, row.over_transformers_quartiles, row.over_plain) == (1.5, (1.0, 2.0), 3.0)
    assert (generate.acceptance_length, plain.acceptance_length, row.acceptance_length) == (1.0, 1.0, 1.5)
    assert (row.accepted_histogram, row.acceptance_by_depth) == ([4, 4], [0.5])
    assert (row.num_identical, row.num_compared, row.reference) == (2, 2, TRANSFORMERS)
    # Each run: 0.7 s for two steps; 0.7 - 0.2 - 0.3 outside draft and verify.
    assert row.step_milliseconds == pytest.approx(
        {"step": 350, "draft": 100, "verify": 150, "accept": 25, "commit": 25, "other": 50}
    )
    assert row.prompt_milliseconds == pytest.approx(100)
    assert row.overhead_share == pytest.approx(0.2 / 0.7)
    # Two reads for two steps in each of the four runs.
    assert row.host_syncs_per_step == 1.0
    assert broken.problem == "too deep"
    assert broken.num_compared == 0


def test_repeated_4grams() -> None:
    assert share_of_repeated_ngrams([[1, 2, 1, 2, 1, 2, 3]]) == 0.25
    assert share_of_repeated_ngrams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 0.0, "other texts do not count"
    assert share_of_repeated_ngrams([[1, 2, 3]]) == 0.0


def test_another_text_in_any_repeat_is_counted_with_both_logits(target: Target, chat_tokenizer: Any) -> None:
    one = Prompt("sea", 0, encode_messages(chat_tokenizer, [{"role": "user", "content": "Tell me about the sea."}]))
    length = one.input_ids.shape[1]
    text = target.model.generate(one.input_ids, max_new_tokens=6, do_sample=False)[0, length:].tolist()
    wrong = [*text[:3], (text[3] + 1) % 4096, *text[4:]]
    contenders = [
        contender(TRANSFORMERS, [[Run([text], 1.0, 6)], [Run([text], 1.0, 6)]]),
        contender("mine", [[Run([one_text], 1.0, 6, stats_of([1], total=1.0))] for one_text in (text, wrong)]),
    ]
    row = make_rows(contenders, [one], replace(Settings(), repeats=2), target)[1]
    assert (row.num_identical, row.num_compared) == (0, 1)
    ((name, difference),) = row.differences
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*one.input_ids[0].tolist(), *text[:3]]])).logits[0, -1]
    assert (name, difference.place) == ("sea", 3)
    assert difference.gap == pytest.approx(float(logits[text[3]] - logits[wrong[3]]), rel=1e-4)
    assert difference.gap > 0, "the reference took the argmax"


def test_names_of_heads_are_short_and_distinct() -> None:
    assert name_heads(["a/heads/medusa", "b/heads/medusa", "b/heads/eagle3/"]) == {
        "a/heads/medusa": "a/heads/medusa",
        "b/heads/medusa": "b/heads/medusa",
        "eagle3": "b/heads/eagle3/",
    }
    with pytest.raises(ValueError, match="twice"):
        name_heads(["a", "a"])


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    rows = make_rows([contender(TRANSFORMERS, [[Run([[1, 2]], 1.0, 2)]])], [prompt()], Settings(), target)
    environment = describe_environment(target, Settings(), target="t", num_prompts=1)
    contenders = [contender(TRANSFORMERS, [[Run([[1, 2]], 1.0, 2)]])]
    report = make_report(environment, rows, contenders)
    write_json(path, [report])
    before = path.read_text()

    def fail(self: Path, *_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, [report])
    assert path.read_text() == before


def test_near_ties_faults_and_what_did_not_run_are_told(target: Target) -> None:
    """A near-tie is a note with the cure; a fault is a note of its own, in red."""
    text = [5, 6, 7, 8]
    contenders = [
        contender(TRANSFORMERS, [[Run([text], 1.0, 4)]]),
        contender("mine", [[Run([[5, 6, 7, 9]], 1.0, 4, stats_of([1], verify=0.1, total=0.2))]]),
        Contender("other", "chain:9", problem="the tree is 9 levels deep"),
    ]
    rows = make_rows(contenders, [prompt()], Settings(), target)
    fault = rows[1].faults[0][1]
    tie = Difference(1, (6, 7), (-1.25, -1.5), gap=-0.25, resolution=0.125, dtype="bfloat16")
    rows.insert(
        2, replace(rows[1], name="near", differences=[("p0", tie), ("p1", fault)], num_compared=3, num_identical=1)
    )
    environment = describe_environment(target, Settings(), target="t", num_prompts=1)
    grid = make_grids(rows, environment)[0]
    told = [line[grid.columns.index("same text")] for line in grid.cells]
    assert told == ["reference", "0/1, 1 fault", "1/3, 1 near-tie, 1 fault"]
    assert grid.notes[0] == "other, chain:9 did not run: the tree is 9 levels deep"
    assert all(number in grid.notes[1] for number in ("-1.2500", "-1.5000", "0.25", "0.12", "--dtype float32"))
    assert [note.partition(":")[0] for note in grid.faults] == ["mine", "near"]
    assert "token 4" in grid.faults[0]
    printed = io.StringIO()
    grid.print(Console(file=printed, force_terminal=True, width=400, color_system="standard"))
    red = [line for line in printed.getvalue().splitlines() if "\x1b[31m" in line]
    assert [line.partition("m")[2].partition(":")[0] for line in red] == ["mine", "near"]
    assert grid.faults[0] in grid.to_markdown()
