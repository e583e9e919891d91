"""The terminal program: text appears whole, drafted tokens in colour, and options that cannot work say so."""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedModel

from draftsmith.inference import Decoder, NgramDrafter, StaticTree, StepTokens
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.scripts import generate
from draftsmith.scripts.chat.arguments import GenerateArguments
from draftsmith.scripts.chat.printer import ReplyPrinter
from draftsmith.scripts.chat.session import Conversation
from draftsmith.scripts.shared.model_loading import encode_messages
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.params import slow_but

ODD_TEXT = "Grüße, 日本語のテキスト 🙂👩‍👩‍👧 naïve\n\n  two spaces, ½ and \u0000 too"
REPEATING = "one two three four five six seven. one two three four five six seven. one two three"


def console(**options: Any) -> Console:
    return Console(file=io.StringIO(), highlight=False, width=80, **options)


def shown(place: Console) -> str:
    return place.file.getvalue()


def test_pieces_are_whole_characters_and_add_up(chat_tokenizer: Any) -> None:
    token_ids = chat_tokenizer(ODD_TEXT, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(chat_tokenizer)
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == ODD_TEXT


def test_markup_and_escape_sequences_are_only_text(chat_tokenizer: Any) -> None:
    text = "[red]x[/red] \x1b[31m"
    place = console()
    printer = ReplyPrinter(chat_tokenizer, place)
    printer.add(StepTokens(chat_tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert shown(place) == text.replace("\x1b", "␛")
    assert printer.text == text


def test_what_is_printed_is_what_was_decoded(chat_target: PreTrainedModel, chat_tokenizer: Any) -> None:
    input_ids = encode_messages(chat_tokenizer, [{"role": "user", "content": REPEATING}])
    place = console(force_terminal=True, color_system="standard")
    printer = ReplyPrinter(chat_tokenizer, place)
    decoder = Decoder(chat_target, NgramDrafter(), tree=StaticTree([[0], [0, 0], [0, 0, 0]]))
    stream = decoder.stream(input_ids, max_new_tokens=48, do_sample=False)
    for tokens in stream:
        printer.add(tokens)
    printer.finish()
    plain = chat_target.generate(input_ids, max_new_tokens=48, do_sample=False)
    assert printer.token_ids == plain[0, input_ids.shape[1] :].tolist()
    assert printer.text == chat_tokenizer.decode(printer.token_ids, skip_special_tokens=True)
    assert re.sub(r"\x1b\[\d+m", "", shown(place)) == printer.text + "\n"
    assert {"\x1b[32m", "\x1b[36m", "\x1b[34m"} <= set(re.findall(r"\x1b\[\d+m", shown(place)))


def test_a_chat_keeps_its_turns_and_raw_text_does_not(chat_tokenizer: Any) -> None:
    chat = Conversation(chat_tokenizer, system="Be kind.", is_raw=False)
    chat.ask("Hi")
    chat.answer("Hello")
    prompt = chat_tokenizer.decode(chat.ask("And you?")[0])
    assert [prompt.count(text) for text in ("Be kind.", "Hi", "Hello", "And you?")] == [1, 1, 1, 1]
    chat.reset()
    assert "Hello" not in chat_tokenizer.decode(chat.ask("Hi")[0])
    raw = Conversation(chat_tokenizer, system=None, is_raw=True)
    assert chat_tokenizer.decode(raw.ask("Once upon")[0]) == "Once upon"


@pytest.fixture
def run_program(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the program in this process on given standard input; returns what it printed."""

    def run_with(**options: Any) -> str:
        generate.run(GenerateArguments(target=str(CHAT_TARGET), dtype="float32", device="cpu", **options))
        return capsys.readouterr().out

    return run_with


def test_each_line_of_the_standard_input_is_a_prompt_of_its_own(
    run_program: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [run_program(prompt=prompt, max_new_tokens=6) for prompt in ("Hi", "Tell me a story")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nTell me a story\n"))
    assert run_program(max_new_tokens=6) == "".join(replies)
    assert "\x1b" not in replies[0], "no colour where there is no terminal"


DRAFTERS: dict[str, dict[str, Any]] = {
    "n-grams": {"ngrams": True},
    "model": {"drafter_model": str(CHAT_TARGET), "tree": "chain:3"},
    "staged": {"drafter_model": str(CHAT_TARGET), "tree": "chain", "staged": True},
    "heads": {"heads": str(REPOSITORY / "examples" / "heads" / "eagle3")},
}


@pytest.mark.parametrize("name", slow_but({"staged", "heads"}, list(DRAFTERS)))
def test_any_drafter_leaves_the_text_as_it_is(name: str, run_program: Callable[..., str]) -> None:
    plain = run_program(prompt=REPEATING, max_new_tokens=24)
    assert run_program(prompt=REPEATING, max_new_tokens=24, **DRAFTERS[name]) == plain
