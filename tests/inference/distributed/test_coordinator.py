"""The protocol, without tensors: a target that is a function of the whole text, and drafts that are right at random."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from itertools import product

import pytest

from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.coordinator import Coordinator
from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from tests.inference.distributed.fake_link import FakeLink

VOCABULARY = 50
NUM_NEW = 40


def next_token(text: list[int]) -> int:
    """The target's token after a text: any other text has another continuation."""
    return zlib.crc32(bytes(text)) % VOCABULARY


class HashServer:
    """Keeps the tokens as a cache would, so a wrong `keep` gives a wrong text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def begin(self, prompt: Prompt) -> None:
        self.tokens = list(prompt.token_ids)

    def answer(self, task: Task) -> Answer:
        assert task.keep <= min(task.start, len(self.tokens)), "the server does not hold what it should keep"
        self.tokens = self.tokens[: task.keep] + task.token_ids
        ends = range(task.start + 1, task.start + 1 + task.num_asked)
        return Answer(task.version, task.start, [next_token(self.tokens[:end]) for end in ends])


def make_prompt(number: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(VOCABULARY) for _ in range(1 + number % 7)]


def make_drafter(number: int, acceptance: float, *, stalls: float = 0.1) -> Callable[[DraftChain], int | None]:
    generator = random.Random(number)

    def draft(chain: DraftChain) -> int | None:
        if generator.random() < stalls:
            return None
        truth = next_token(chain.text + chain.drafts)
        return truth if generator.random() < acceptance else (truth + 1) % VOCABULARY

    return draft


def decode(coordinator: Coordinator, prompt: list[int], draft: Callable[[DraftChain], int | None]) -> DraftChain:
    """Decodes NUM_NEW tokens."""
    coordinator.begin(Prompt(prompt, prompt, NUM_NEW, None))
    chain = DraftChain(list(prompt))
    for _ in coordinator.run(chain, draft, len(prompt) + NUM_NEW + 10):
        if len(chain.text) >= len(prompt) + NUM_NEW:
            break
    return chain


def plain(prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NUM_NEW):
        text.append(next_token(text))
    return text


def texts_differ(number: int) -> bool:
    """Decodes one text, and compares. A text that never ends differs, too."""
    settings = list(product((1, 2, 3, 7), (None, 1, 3), (0.0, 0.5, 0.8, 0.95)))[number % 48]
    num_servers, lookahead, acceptance = settings
    link = FakeLink(HashServer, num_servers, seed=number, most_delay=number % 13)
    coordinator = Coordinator(link, lookahead=lookahead, max_ahead=1 + number % 16, timeout=1.0)
    prompt = make_prompt(number)
    try:
        chain = decode(coordinator, prompt, make_drafter(number, acceptance))
    except TimeoutError:
        return True
    return chain.text[: len(prompt) + NUM_NEW] != plain(prompt)


def test_texts_are_those_of_plain_decoding() -> None:
    assert not [number for number in range(96) if texts_differ(number)]


def test_a_server_that_does_not_answer_is_named() -> None:
    class Deaf(FakeLink):
        def receive(self, seconds: float) -> None:
            return None

    coordinator = Coordinator(Deaf(HashServer, 2), lookahead=2, max_ahead=4, timeout=1.0)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
        decode(coordinator, [1], make_drafter(0, 0.5))
