"""A target that writes conversations: what it writes, what is dropped, and going on after a kill."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.tiny_targets import tiny_target
from training.conversation_file import ConversationFile
from training.data import load_conversations
from training.synthesis import (
    ChatTemplate,
    Conversation,
    SynthesisArguments,
    Synthesizer,
    TurnWriter,
    is_looping,
    read_prompts,
)

USER_END = ASSISTANT_END = 2


def arguments(**changes: Any) -> SynthesisArguments:
    values = {"target": "t", "output": "o", "prompts": "p", "temperature": 0.0, "batch_size": 4, "max_new_tokens": 48}
    return SynthesisArguments(**{**values, **changes})


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer for `tiny_target`: 100 characters, a token each, and ChatML's signs."""
    characters = [chr(code) for code in range(32, 127)] + list("\näöüß")
    vocabulary = {token: index for index, token in enumerate(["<|pad|>", "<|im_start|>", "<|im_end|>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = AutoTokenizer.from_pretrained(CHAT_TARGET).chat_template
    return fast


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [
        "Hi",
        "What is the capital of France?",
        "Thanks, bye.",
        "Find me a bus to Oakland.",
        "Tell me a joke.",
        "Yes.",
    ]
    rows = [{"id": f"p{i}", "source": "test", "turns": [text, "And then?"]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def messages_of(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


# Writing turns


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_turns_are_those_of_plain_generate(family: str, letters: PreTrainedTokenizerFast) -> None:
    """Rows that leave the batch, a cache that grows and rounds change nothing: each row against `generate` alone."""
    model = tiny_target(family, vocab_size=len(letters))
    template = ChatTemplate(letters)
    prompts = ["Hi", "abcdefgh", "Yes? No.", "x" * 30, "Zz", "0123", "Q"]
    stop_ids = set(range(20, 26))  # some rows end early, some late, some never
    writer = TurnWriter(model, template, arguments(max_new_tokens=70))
    written = writer._write_batch([template.encode(prompt) for prompt in prompts], stop_ids)
    rounds = set()
    for prompt, tokens in zip(prompts, written, strict=True):
        ids = torch.tensor([template.encode(prompt)])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=70, do_sample=False,
            eos_token_id=sorted(stop_ids), pad_token_id=0,
        )  # fmt: skip
        expected = alone[0, ids.shape[1] :].tolist()
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == len(expected) or is_looping(tokens), "only loops are cut short"
        rounds.add(len(tokens) // 32)
    assert len(rounds) > 1, "rows must leave the batch at different times for this test to mean anything"


def test_order_and_batches_do_not_matter(chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    template = ChatTemplate(chat_tokenizer)
    prompts = [
        template.render_prompt([{"role": "user", "content": text}]) for text in ("Yes.", "Hi", "Thank you. " * 4)
    ]
    together = TurnWriter(chat_target, template, arguments()).write(prompts, {ASSISTANT_END})
    apart = TurnWriter(chat_target, template, arguments(batch_size=1)).write(prompts[::-1], {ASSISTANT_END})
    assert together == apart[::-1]


def test_bad_turns_are_told_from_good_ones(chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    writer = TurnWriter(chat_target, ChatTemplate(chat_tokenizer), arguments())
    yes = chat_tokenizer("Yes, of course.")["input_ids"]
    (line_break,) = chat_tokenizer("\n")["input_ids"]
    expected = {
        (*yes, 2): "",
        (*yes,): "truncated",
        (2,): "empty",
        (line_break, 2): "empty",
        (): "truncated",
        (*yes, 1, *yes, 2): "special token inside",
        (*yes, 0, 2): "special token inside",
        (*[7, 8] * 12, 2): "looping",
        (*[7, 8] * 12,): "looping",
    }
    assert {tokens: writer._judge(list(tokens), {2})[1] for tokens in expected} == expected
    assert writer._judge([*yes, 2], {2})[0] == "Yes, of course."


def test_prompts_without_room_are_dropped(chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    writer = TurnWriter(chat_target, ChatTemplate(chat_tokenizer), arguments(max_new_tokens=1020))
    assert writer.write(["Hi there, what a long prompt"], {2}) == [("", "prompt too long")]
    with pytest.raises(ValueError, match="target has 1024 positions"):
        TurnWriter(chat_target, ChatTemplate(chat_tokenizer), arguments(max_new_tokens=1024))


def test_loops() -> None:
    assert is_looping([7, 8] * 12)
    assert not is_looping([7, 8] * 11)
    assert not is_looping(list(range(30)))
    assert is_looping([1, 2, 3, *[5] * 24])
    assert not is_looping([*[5] * 24, 1])
    assert is_looping(list(range(32)) * 4)
    assert not is_looping(list(range(33)) * 4)


# The template


def test_the_template_is_found_by_rendering(chat_tokenizer: Any) -> None:
    template = ChatTemplate(chat_tokenizer)
    assert template.render_user_header([]) == "<|im_start|>user\n"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert template.render_user_header(turns) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\n"
    )
    assert template.find_turn_end("user") == template.find_turn_end("assistant") == 2


def test_templates_that_do_not_show_a_turns_end(chat_target: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="use --mode regenerate"):
        Synthesizer(chat_target, tokenizer, arguments(mode="self", prompts=None, num_conversations=1, temperature=1.0))
    assert Synthesizer(chat_target, tokenizer, arguments()).reply_ends == {2}, "the generation config's"
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="writes one turn's text 2 times"):
        ChatTemplate(tokenizer).render_user_header([])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(tokenizer)


# Conversations


def test_own_replies_stay_in_the_context(chat_target: PreTrainedModel, chat_tokenizer: Any, prompt_file: Path) -> None:
    args = arguments()
    synthesizer = Synthesizer(chat_target, chat_tokenizer, args)
    (window,) = synthesizer.synthesize([], read_prompts(prompt_file))
    assert len(window) + synthesizer.dropped.total() >= 6
    num_replies = 0
    for conversation in window:
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompt = chat_tokenizer.apply_chat_template(
                    conversation.messages[:index], add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                reply = chat_target.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
                text = chat_tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
                assert message["content"] == text
                num_replies += 1
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * (
            len(conversation.messages) // 2
        )
    assert num_replies > len(window), "some conversation must have a second turn for this test to mean anything"


def test_turns_and_prompts_are_limited(chat_target: PreTrainedModel, chat_tokenizer: Any, prompt_file: Path) -> None:
    args = arguments(num_conversations=5, batch_size=2, max_turns=1)
    windows = list(Synthesizer(chat_target, chat_tokenizer, args).synthesize([], read_prompts(prompt_file)))
    assert len(windows) == 2
    assert all(len(conversation.messages) == 2 for window in windows for conversation in window)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 2, 3]),
        ({"max_turns": 2}, [1, 2, 2]),
        ({"mode": "self", "prompts": None, "num_conversations": 4, "temperature": 1.0}, [1] * 8),
        ({"mode": "self", "prompts": None, "num_conversations": 4, "temperature": 1.0, "max_turns": 3}, [3] * 8),
    ],
)
def test_every_given_turn_is_answered_and_one_invented(
    changes: dict[str, Any],
    expected: list[int],
    chat_target: PreTrainedModel,
    chat_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TurnWriter, "write", lambda self, prompts, stop_ids: [("Yo", "")] * len(prompts))
    prompts = [Conversation(str(count), "test", turns=["Hi"] * count) for count in (1, 2, 3)]
    window = next(Synthesizer(chat_target, chat_tokenizer, arguments(**changes)).synthesize([], prompts))
    window.sort(key=lambda conversation: conversation.id)
    roles = [[role for role, _ in messages_of(conversation)] for conversation in window]
    assert roles == [["user", "assistant"] * count for count in expected]


def test_self_synthesis_writes_both_sides(
    chat_target: PreTrainedModel, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.synthesis._BATCHES_PER_WINDOW", 1)
    args = arguments(mode="self", prompts=None, num_conversations=8, temperature=0.8, max_turns=2, max_new_tokens=24)
    window = next(Synthesizer(chat_target, chat_tokenizer, args).synthesize([]))
    assert window
    for conversation in window:
        roles = [role for role, _ in messages_of(conversation)]
        assert roles in (["user", "assistant"], ["user", "assistant"] * 2)
        assert all(text.strip() and "<|im" not in text for _, text in messages_of(conversation))
    again = next(Synthesizer(chat_target, chat_tokenizer, args).synthesize([]))
    assert [messages_of(each) for each in again] == [messages_of(each) for each in window], "a seed is a seed"
    rows = [conversation.to_sharegpt() for conversation in window]
    resumed = next(Synthesizer(chat_target, chat_tokenizer, args).synthesize(rows))
    assert not {each.id for each in resumed} & {each.id for each in window}
    assert [messages_of(each) for each in resumed] != [messages_of(each) for each in window]


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["Hi", "Bye"]},
        {"conversations": [{"from": a, "value": b} for a, b in [("human", "Hi"), ("gpt", "Yo"), ("user", "Bye")]]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Bye"}]},
    ],
)
def test_prompts_are_read_in_every_form(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
    (conversation,) = read_prompts(path)
    assert conversation.turns == ["Hi", "Bye"]
    assert conversation.messages == []
    assert conversation.id == read_prompts(path)[0].id
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_bad_prompts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    path.write_text(json.dumps(system) + "\n" + '{"turns": [3]}\n')
    with pytest.raises(ValueError, match="line 2: the content of a user turn is int"):
        read_prompts(path)
    path.write_text(json.dumps(system) + "\n")
    assert read_prompts(path)[0].messages == system["messages"][:1]


def test_prompts_that_share_an_id_are_refused(tmp_path: Path) -> None:
    """A resumed run knows by the ids what is done."""
    path = tmp_path / "prompts.jsonl"
    system = {"role": "system", "content": "Be brief."}
    one = {"id": "a", "messages": [{"role": "user", "content": "Hi"}]}
    others = [
        {"id": "a", "turns": ["Bye"]},
        {"id": "a", "turns": ["Hi", "Bye"]},
        {**one, "messages": [system, *one["messages"]]},
    ]
    for other in others:
        path.write_text("".join(json.dumps(row) + "\n" for row in (one, {"turns": ["Bye"]}, other)))
        with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3: another prompt above has the id 'a'"):
            read_prompts(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in (one, {"id": "b", "turns": ["Hi"]}, one)))
    assert [conversation.id for conversation in read_prompts(path)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "name their file with --prompts"),
        ({"mode": "self"}, "leave one of the two out"),
        ({"mode": "self", "prompts": None}, "--num_conversations"),
        (
            {"mode": "self", "prompts": None, "num_conversations": 2},
            "--temperature is 0, at which --mode self writes one",
        ),
        ({"temperature": -0.1}, "--temperature is -0.1"),
        ({"top_p": 0.0}, "--top_p is 0.0"),
        ({"batch_size": 0}, "--batch_size is 0: give at least 1"),
        ({"num_conversations": -1}, "--num_conversations is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        arguments(**changes)
    assert message in str(error.value)


# The output


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_kill_at_any_byte_loses_no_whole_line(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / name
    file = ConversationFile(path)
    assert file.rows == []
    rows = [{"id": str(index), "text": "ü" * index} for index in range(3)]
    sizes = []
    for row in rows:
        file.append([row])
        # A line of which only the line break is missing is whole.
        sizes.append(path.stat().st_size - (not file.is_gzip))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        caplog.clear()
        # Of a torn gzip member, the lines that can be read are kept as well.
        at_least = sum(size >= end for end in sizes)
        kept = ConversationFile(path).rows
        assert kept == rows[: len(kept)]
        assert at_least <= len(kept) <= at_least + file.is_gzip
        if not file.is_gzip:
            is_torn = size not in (0, *sizes, *(end + 1 for end in sizes))
            assert ("cut off the last line" in caplog.text) == is_torn
        ConversationFile(path).append([{"id": "next"}])
        assert ConversationFile(path).rows == [*kept, {"id": "next"}]
        text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        assert [json.loads(line) for line in text.splitlines()] == [*kept, {"id": "next"}]
    assert [place.name for place in tmp_path.iterdir()] == [name]


def test_a_last_line_without_line_break_is_kept(tmp_path: Path) -> None:
    """Other programs, and people, write such files."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "1"}\n{"id": "2"}')
    file = ConversationFile(path)
    assert file.rows == [{"id": "1"}, {"id": "2"}]
    file.append([{"id": "3"}])
    assert path.read_text() == '{"id": "1"}\n{"id": "2"}\n{"id": "3"}\n'


def test_compact_keeps_the_lines(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path / "out.jsonl.gz")
    for index in range(20):
        file.append([{"id": str(index), "text": "the same text"}])
    size = file.path.stat().st_size
    file.compact()
    assert file.path.stat().st_size < size / 2
    assert len(ConversationFile(file.path).rows) == 20


def test_outputs_that_are_something_else_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("Dear diary\n{}\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        ConversationFile(path)
    packed = tmp_path / "out.jsonl.gz"
    packed.write_text("Dear diary\n")
    with pytest.raises(ValueError, match="is no gzip file"):
        ConversationFile(packed)
    assert path.read_text() == "Dear diary\n{}\n"
    assert packed.read_text() == "Dear diary\n"


OPTIONS = ("--target", str(CHAT_TARGET), "--dtype", "float32", "--device", "cpu", "--batch_size", "2")


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the program in this process; returns its output."""
    spec = importlib.util.spec_from_file_location("generate_data", REPOSITORY / "scripts" / "generate_data.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["generate_data.py", *OPTIONS, *options])
        assert script.main() == 0
        return capsys.readouterr().out

    return run


def test_a_killed_run_goes_on_where_it_stopped(
    tmp_path: Path, prompt_file: Path, run_script: Callable[..., str]
) -> None:
    output = tmp_path / "out.jsonl"
    options = ("--prompts", str(prompt_file), "--output", str(output), "--temperature", "0", "--max_new_tokens", "32")
    told = run_script(*options)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) >= 3
    assert f"{output}: 0 conversations were there, {len(lines)} were written" in told

    output.write_bytes(whole[: -len(lines[-1]) // 2])  # in the middle of the last line
    assert f"{len(lines) - 1} conversations were there, 1 were written" in run_script(*options)
    assert output.read_bytes() == whole
    assert len(load_conversations([str(output)])) == len(lines)

    with pytest.raises(SystemExit, match="leave --no_resume out"):
        run_script(*options, "--no_resume")
    assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl does not exist"),
        (["--prompts", "BAD"], "line 1: expected an object, got int"),
        (["--prompts", "GOOD", "--target", "NOWHERE"], "NOWHERE"),
        (["--prompts", "GOOD", "--output", "GOOD/out.jsonl"], "File exists"),
    ],
)
def test_wrong_files_end_it_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    prompt_file: Path,
    run_script: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong with the prompts is said before the target is loaded."""
    (tmp_path / "bad.jsonl").write_text("3\n")
    places = {"BAD": tmp_path / "bad.jsonl", "GOOD": prompt_file, "NOWHERE": tmp_path / "NOWHERE"}
    words = [str(places[word]) if word in places else word.replace("GOOD", str(prompt_file)) for word in options]
    if "--target" not in options:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded the target"))
    with pytest.raises(SystemExit) as exit_:
        run_script("--output", str(tmp_path / "out.jsonl"), *words)
    assert str(exit_.value.code).startswith("generate_data.py: ")
    assert message in str(exit_.value.code)


def test_self_mode_stops_at_the_number_asked_for(tmp_path: Path, run_script: Callable[..., str]) -> None:
    output = tmp_path / "self.jsonl.gz"
    for wanted in ("3", "5", "5"):
        run_script("--mode", "self", "--max_new_tokens", "24", "--output", str(output), "--num_conversations", wanted)
        rows = [json.loads(line) for line in gzip.decompress(output.read_bytes()).splitlines()]
        assert len(rows) == len({row["id"] for row in rows}) == int(wanted)


def test_the_program_finds_its_packages_without_being_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(REPOSITORY / "scripts" / "generate_data.py"), "--help"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--max_turns" in finished.stdout
