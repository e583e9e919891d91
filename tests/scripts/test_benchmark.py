"""The benchmark's numbers against numbers worked out by hand, and a small run from prompts to files."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.heads import create_heads
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Decoder, GenerationStats, NgramDrafter, Target
from draftsmith.inference.request.chat_template import encode_prompt
from draftsmith.scripts import benchmark
from draftsmith.scripts.benchmark import BenchmarkArguments
from draftsmith.scripts.measuring.contenders import AssistedDecoding, OurDecoding, make_contenders
from draftsmith.scripts.measuring.matrix import measure_with_progress
from draftsmith.scripts.measuring.measure import (
    PLAIN,
    TRANSFORMERS,
    WITHOUT_MODE,
    Batch,
    Contender,
    Prompt,
    Run,
    Settings,
    follow_turns,
    load_prompts,
)
from draftsmith.scripts.measuring.report import headline, make_rows, texts_of_references
from draftsmith.scripts.measuring.table import describe_texts
from draftsmith.scripts.shared.model_loading import encode_messages, load_assistant
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, tiny_target
from tests.training.conversation_cases import write


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
    chosen, _ = measure_with_progress(contenders, prompts, Settings(max_new_tokens=100, repeats=2))
    assert chosen == prompts
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
    assert measure_with_progress(contenders, prompts, settings, minutes=4.0) == (prompts[:5], settings)
    assert [len(runs) for runs in contenders[0].runs] == [5, 5]
    told = capsys.readouterr().err
    for words in ("1/2 a: about 10.0 tokens/s", "2/2 b, chain:2: about 10.0 tokens/s", "5 of 9 prompts", "--minutes 0"):
        assert words in told
    assert measure_with_progress(contenders, prompts, settings, minutes=0.5) == (
        prompts[:1],
        replace(settings, repeats=1),
    )
    assert measure_with_progress(contenders, prompts, replace(settings, batch_size=2), minutes=4.0)[0] == prompts[:4]


def test_what_cannot_be_compiled_in_the_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drafter is compiled in any case, and plain decoding with it; these take 100 s each."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def decode(batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
        now[0] += 50.0 if max_new_tokens is None else 0.0
        return Run([[1] * 10], 1.0, 10)

    names = (f"{TRANSFORMERS}, compiled", f"{PLAIN}, compiled", "heads", "other heads")
    contenders = [Contender(name, decode=decode, is_compiled=True) for name in names]
    settings = Settings(max_new_tokens=100, repeats=3)
    chosen, made = measure_with_progress(contenders, [prompt(0), prompt(1)], settings, minutes=4.0)
    assert [bool(contender.problem) for contender in contenders] == [True, False, False, True]
    assert "--minutes" in contenders[0].problem
    assert (len(chosen), made.repeats) == (1, 3)


def test_a_tree_too_deep_for_its_heads_is_reported_not_raised(target: Target) -> None:
    heads = create_heads("medusa", target, num_heads=2)
    contenders = make_contenders(target, {"two": heads}, ["chain:2", "chain:3"], Settings())
    problems = {(one.name, one.tree): one.problem for one in contenders if one.problem}
    assert list(problems) == [("two", "chain:3")]
    assert "3 levels deep, the drafter proposes at most 2" in problems["two", "chain:3"]
    with pytest.raises(ValueError, match="'dynamc', which is neither"):
        make_contenders(target, {"two": heads}, ["dynamc"], Settings())


def test_ratios_are_to_the_fastest_plain_decoding(target: Target) -> None:
    text = [5, 6, 7, 8]
    seconds = {TRANSFORMERS: 4.0, PLAIN: 2.0, f"{PLAIN}, compiled": 1.0, "h, compiled": 0.5}
    stats = {"prefill": 0.0, "draft": 0.1, "verify": 0.1, "accept": 0.1, "commit": 0.1, "total": 0.4}
    contenders = [
        contender(name, [[Run([text], spent, 4, None if name == TRANSFORMERS else stats_of([1, 0], **stats))]])
        for name, spent in seconds.items()
    ]
    contenders[-1].tree = "chain"
    rows = make_rows(contenders, [prompt(0)], Settings(), target, {TRANSFORMERS: [text]})
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
    assert "vocabulary of 128 tokens, the assistant one of 64" in assisted("smaller").problem


@pytest.mark.skipif(not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers has it from 5.24 on")
def test_exported_dflash_heads_draft_for_transformers(target: Target, tmp_path: Path) -> None:
    heads = tiny_heads("block", target, block_size=4)
    find_format("transformers", "block").write(heads.config, heads.state_dict(), target).save(tmp_path)
    decode = AssistedDecoding(target, load_assistant(str(tmp_path), target))
    assert decode.options["speculation_type"] == "dflash"
    one, settings = Prompt("p", 0, random_prompt(5)), Settings(max_new_tokens=12)
    expected = target.model.generate(one.input_ids, max_new_tokens=12, do_sample=False)[0, 5:].tolist()
    assert decode(Batch.of(one), settings).texts == [expected]


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


def test_prompts_of_both_formats_and_too_long_ones(target: Target, chat_tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"id": "first", "turns": ["Hi there", "not this one"]},
        {"id": "long", "turns": ["word " * 900]},
        {"id": "second", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {"id": "third", "turns": ["left out by num_prompts"]},
    ]
    path = Path(write(tmp_path / "prompts.jsonl.gz", rows))
    prompts, num_too_long = load_prompts(path, chat_tokenizer, target, num_prompts=2, max_new_tokens=200)
    assert [(one.id, one.index) for one in prompts] == [("first", 0), ("second", 1)]
    assert num_too_long == 1
    assert chat_tokenizer.decode(prompts[0].input_ids[0]).endswith("Hi there<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="room for 1024 tokens"):
        load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=1024)


def test_later_turns_follow_the_targets_own_replies(target: Target, chat_tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Hi there", "And then?"]},
        {"question_id": 82, "category": "math", "turns": ["Two and two"]},
    ]
    path = Path(write(tmp_path / "question.jsonl", rows))
    settings = Settings(max_new_tokens=8)
    prompts, _ = load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=8)
    assert [one.num_turns for one in prompts] == [2, 1]
    followed = follow_turns(prompts, chat_tokenizer, target, settings)
    assert [(one.id, one.turn, one.index) for one in followed] == [("81", 0, 0), ("81", 1, 1), ("82", 0, 2)]
    reply = Decoder(target, None).generate(prompts[0].input_ids, max_new_tokens=8).sequences[0]
    text = chat_tokenizer.decode(reply[prompts[0].input_ids.shape[1] :], skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": text}]
    messages.append({"role": "user", "content": "And then?"})
    assert followed[1].input_ids[0].tolist() == encode_prompt(chat_tokenizer, messages)
    prompts, _ = load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=8, max_turns=1)
    assert follow_turns(prompts, chat_tokenizer, target, settings) == prompts


def test_conversations_end_before_a_turn_that_cannot_be_read(
    target: Target, chat_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(write(tmp_path / "long.jsonl", [{"turns": ["Hi there", "word " * 1200, "And then?"]}]))
    prompts, _ = load_prompts(path, chat_tokenizer, target, num_prompts=None, max_new_tokens=8)
    assert follow_turns(prompts, chat_tokenizer, target, Settings(max_new_tokens=8)) == prompts
    assert "1 conversations end" in caplog.text
    assert "turn 2" in caplog.text


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
    generate, plain, row, broken = make_rows(
        contenders, [prompt(0), prompt(1)], Settings(), target, {TRANSFORMERS: [text, text]}
    )
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


def test_another_text_in_any_repeat_is_counted_with_both_logits(target: Target, chat_tokenizer: Any) -> None:
    one = Prompt("sea", 0, encode_messages(chat_tokenizer, [{"role": "user", "content": "Tell me about the sea."}]))
    length = one.input_ids.shape[1]
    text = target.model.generate(one.input_ids, max_new_tokens=6, do_sample=False)[0, length:].tolist()
    wrong = [*text[:3], (text[3] + 1) % 4096, *text[4:]]
    contenders = [
        contender(TRANSFORMERS, [[Run([text], 1.0, 6)], [Run([text], 1.0, 6)]]),
        contender("mine", [[Run([one_text], 1.0, 6, stats_of([1], total=1.0))] for one_text in (text, wrong)]),
    ]
    row = make_rows(contenders, [one], replace(Settings(), repeats=2), target, {TRANSFORMERS: [text]})[1]
    assert (row.num_identical, row.num_compared) == (0, 1)
    ((name, difference),) = row.differences
    with torch.inference_mode():
        logits = target.model(torch.tensor([[*one.input_ids[0].tolist(), *text[:3]]])).logits[0, -1]
    assert (name, difference.place) == ("sea", 3)
    assert difference.gap == pytest.approx(float(logits[text[3]] - logits[wrong[3]]), rel=1e-4)
    assert difference.gap > 0, "the reference took the argmax"


def test_batch_invariant_texts_are_compared_in_each_way_of_running(target: Target) -> None:
    """Compiled steps round otherwise: their text is that of compiled plain decoding."""
    eager, compiled, spent = [5, 6, 7, 8], [5, 6, 9, 9], stats_of([0], verify=1.0, total=1.0)
    texts = {PLAIN: eager, f"{PLAIN}, compiled": compiled, "h, compiled": compiled, "h": compiled}
    contenders = [
        replace(contender(name, [[Run([text], 1.0, 4, spent)]]), is_compiled=name.endswith("compiled"))
        for name, text in texts.items()
    ]
    settings = Settings(is_invariant=True)
    references = texts_of_references(contenders, [prompt(0)], settings)
    assert references == {PLAIN: [eager], f"{PLAIN}, compiled": [compiled]}
    rows = make_rows(contenders, [prompt(0)], settings, target.batch_invariant(), references)
    assert [describe_texts(row) for row in rows] == ["reference", "reference", "1/1", "0/1, 1 fault"]


def test_batch_invariant_decoding_is_measured_beside_decoding_without(target: Target) -> None:
    settings, heads = Settings(is_invariant=True), {"two": create_heads("medusa", target, num_heads=2)}
    made = make_contenders(target.batch_invariant(), heads, ["chain:2", "chain:3"], settings, without_mode=target)
    found = {one.label: one.decode.decoder.target for one in made if isinstance(one.decode, OurDecoding)}
    without = {label for label, own in found.items() if own is target}
    assert without == {
        f"{PLAIN}{WITHOUT_MODE}",
        f"n-gram drafter{WITHOUT_MODE}, chain:2",
        f"two{WITHOUT_MODE}, chain:2",
    }
    assert {label.replace(WITHOUT_MODE, "") for label in without} == found.keys() - without


# From the options to the files.


@pytest.fixture(scope="module")
def heads_path(small_chat: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("heads") / "untrained"
    create_heads("medusa", AutoModelForCausalLM.from_pretrained(small_chat).eval(), num_heads=2).save_pretrained(path)
    return path


def test_a_run_over_batch_sizes(small_chat: str, heads_path: Path, prompts: Path, tmp_path: Path) -> None:
    """Every row of every batch has the text that its prompt gets by itself; contenders without batches say so."""
    sizes, trees = [1, 2], ["chain:1", "dynamic:2,2,4"]
    files = {name: str(tmp_path / "out" / f"report.{name}") for name in ("json", "markdown")}
    args = BenchmarkArguments(
        target=small_chat,
        prompts=[str(prompts)],
        heads=[str(heads_path)],
        temperature=[0.0],
        batch_size=sizes,
        max_new_tokens=4,
        tree=trees,
        repeats=1,
        minutes=0.0,
        dtype="float32",
        device="cpu",
        compile=False,
        **files,
    )
    printed = io.StringIO()
    benchmark.run(args, Console(file=printed, width=150))
    reports = json.loads(Path(files["json"]).read_text())["reports"]
    for size, report in zip(sizes, reports, strict=True):
        environment, num_rows = report["environment"], 3 + -3 % size
        assert (environment["batch"], environment["num_prompts_again"]) == (size, -3 % size)
        assert (environment["dtype"], environment["num_prompts"]) == ("float32", 3)
        rows = {row["name"] + row["tree"]: row for row in report["rows"]}
        assert {TRANSFORMERS, PLAIN, "n-gram drafterchain:1", *(f"untrained{tree}" for tree in trees)} <= rows.keys()
        problem = rows["transformers prompt look-up"]["problem"]
        if size > 1:
            assert problem == f"transformers speculates only for single rows, and the batch has {size}"
            del rows["transformers prompt look-up"]
        for name, row in rows.items():
            is_ours = not name.startswith("transformers")
            assert row["num_identical"] == row["num_compared"] == num_rows, name
            assert row["host_syncs_per_step"] == (1.0 if is_ours else None)
            assert not is_ours or 1 <= row["rows_per_step"] <= size
            assert row["num_new_tokens"] <= 4 * num_rows
            assert min(row["tokens_per_second"], row["over_transformers"], row["warm_up_seconds"]) > 0
            if name in (TRANSFORMERS, PLAIN):
                assert row["acceptance_length"] == 1.0
    for text in ("of the first prompts; they count", "untrained, chain:1", "Fastest drafter: ", "Wrote "):
        assert text in printed.getvalue()
    page = Path(files["markdown"]).read_text()
    for text in ("× generate", "× fastest plain", "overhead", "untrained, chain:1"):
        assert f"| {text} |" in page
