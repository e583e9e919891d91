"""`draftsmith chat --distributed`: two processes, one program."""

import re

import pytest

from tests.processes import TORCHRUN, run_python


def launch(*words: str, typed: str = "") -> str:
    program = (*TORCHRUN, "2", "-m", "draftsmith.scripts.cli")
    return run_python(*program, *words, "--distributed", "--device", "cpu", typed=typed)


@pytest.mark.slow
def test_a_chat(small_chat: str) -> None:
    """Each line gets the reply of plain decoding."""
    words = ("chat", "--target", small_chat, "--ngrams", "--max_new_tokens", "12", "--compare")
    output = launch(*words, typed="Hi\nTell me more\n")
    assert len(re.findall(r"identical: the same \d+ tokens", output)) == 2, output
