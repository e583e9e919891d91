"""The chat in a terminal: commands, comparison with plain decoding, Ctrl-C."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.inference import StepTokens
from draftsmith.scripts import generate
from draftsmith.scripts.chat import commands
from draftsmith.scripts.chat.arguments import GenerateArguments
from draftsmith.scripts.chat.comparison import Reply, compare_with_plain
from draftsmith.scripts.chat.printer import ReplyPrinter
from draftsmith.scripts.chat.session import ChatSession
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.processes import TORCHRUN, run_python

EAGLE3, MTP = (str(REPOSITORY / "examples" / "heads" / kind) for kind in ("eagle3", "mtp"))
Chat = Callable[..., tuple[list[str], list[str]]]


class Terminal:
    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Chat:
    """Types lines into a chat in this process; returns the lines of the replies, and the notes beside them."""

    def type_lines(*lines: str | type[BaseException], **options: Any) -> tuple[list[str], list[str]]:
        typed: Iterator[Any] = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
        options = {"target": str(CHAT_TARGET), "heads": EAGLE3, "max_new_tokens": 24} | options
        generate.run(GenerateArguments(dtype="float32", device="cpu", **options))
        captured = capsys.readouterr()
        return captured.out.splitlines(), captured.err.splitlines()

    return type_lines


def test_commands(chat: Chat) -> None:
    _, notes = chat(
        "/heads", "/tree", "/tree chain:2", "/temperature 0.5", f"/heads {MTP}", "/heads none", "/tree", "/help"
    )
    said = [note for note in notes if re.match(r"heads|tree|temperature", note)]
    assert said == [
        *(f"heads: {EAGLE3}", "tree: auto", "tree: chain:2", "temperature: 0.5", f"heads: {MTP}", "heads: none"),
        "tree: nothing is drafted",
    ]
    for name in commands.BY_NAME:
        assert any(note.startswith(f"/{name} ") for note in notes[-8:])


def test_commands_change_how_replies_are_decoded(chat: Chat) -> None:
    replies, notes = chat("Hi", "/new", "/tree chain:1", "Hi", "/new", "/heads none", "Hi")
    first, *others = (line for line in replies if line)
    assert set(others) == {first}, "drafts never change the text"
    lengths = [re.search(r"acceptance length (\S+)", note) for note in notes if "tokens/s" in note]
    assert float(lengths[0][1]) > float(lengths[1][1]) <= 2
    assert lengths[2] is None, "nothing is drafted in plain decoding"


@pytest.mark.parametrize(
    ("line", "words"), [("/tree oak", "tree is 'oak'"), ("/heads ./nowhere", "got ./nowhere: there is no such folder")]
)
def test_a_command_that_cannot_be_run_changes_nothing(chat: Chat, line: str, words: str) -> None:
    replies, notes = chat(line, "Hi", max_new_tokens=4)
    assert any(words in note for note in notes)
    assert len(replies) >= 1
    assert "acceptance length" in notes[-1]


def test_comparing(chat: Chat) -> None:
    """Also after another turn, whose prompt is partly in the cache."""
    _, notes = chat("Hi", "Why?", "/compare", "And then?", temperature=0.8)
    compared = next(place for place, note in enumerate(notes) if note.startswith("identical: the same "))
    assert re.search(r"plain decoding [\d.]+ tokens/s, with drafts [\d.]+ \([\d.]+ times\)", notes[compared])
    assert "(plain decoding, when last compared: " in notes[compared + 1]
    assert "when last compared" not in notes[compared - 1]


def test_texts_that_differ() -> None:
    args = GenerateArguments(target=str(CHAT_TARGET), heads=EAGLE3, dtype="float32", max_new_tokens=12, compare=True)
    session = ChatSession(args, generate.Console(), is_chat=True)
    session.reply("Tell me a story")
    reply, plain = session._last, session._plain
    assert plain is not None
    ids = list(reply.token_ids)
    other = Reply(reply.input_ids, [*ids[:5], ids[5] + 1, *ids[6:]], reply.options, reply.stats, True)
    found = compare_with_plain(other, plain, session.tokenizer)
    ours, theirs = (repr(session.tokenizer.decode([token])) for token in (ids[5] + 1, ids[5]))
    assert f"token 6 is the first that differs: {theirs} plainly, {ours} with drafts" in found.text
    assert len(re.findall(r"-\d+\.\d{4}", found.text)) == 2
    assert found.is_fault
    assert found.plain == session.tokenizer.decode(ids, skip_special_tokens=True)
    session.notes = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=400)
    session._last = other
    session.compare()
    assert session.notes.file.getvalue().startswith("\x1b[31mtoken 6")
    shorter = Reply(reply.input_ids, ids[:4], reply.options, reply.stats, True)
    assert "token 5 is the first that differs" in compare_with_plain(shorter, plain, session.tokenizer).text
    stopped = Reply(reply.input_ids, ids[:4], reply.options, reply.stats, False)
    assert compare_with_plain(stopped, plain, session.tokenizer).text.startswith("identical so far: the same 4 tokens")


@pytest.mark.slow
def test_two_processes_chat(small_chat: str) -> None:
    """Each line gets the reply of plain decoding."""
    words = ("chat", "--target", small_chat, "--ngrams", "--max_new_tokens", "12", "--compare", "--distributed")
    program = (*TORCHRUN, "2", "-m", "draftsmith.scripts.cli", *words, "--device", "cpu")
    output = run_python(*program, typed="Hi\nTell me more\n")
    assert len(re.findall(r"identical: the same \d+ tokens", output)) == 2, output


def test_ctrl_c_ends_the_reply_and_keeps_the_cache(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    add = ReplyPrinter.add
    steps: list[int] = []

    def interrupt(printer: ReplyPrinter, tokens: StepTokens) -> None:
        add(printer, tokens)
        steps.append(len(tokens))
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ReplyPrinter, "add", interrupt)
    before = signal.getsignal(signal.SIGINT)
    _, notes = chat("Tell me a story", "/compare", KeyboardInterrupt, "Why?", max_new_tokens=64)
    assert f"{sum(steps[:2])} tokens in" in notes[1]
    assert notes[2].startswith(f"identical so far: the same {sum(steps[:2])} tokens")
    assert len(steps) > 4, "the chat went on"
    assert not any("nothing to reuse" in note for note in notes)
    assert signal.getsignal(signal.SIGINT) is before
