"""The protocol, without tensors: a target that is a function of the whole text, and drafts that are right at random."""

import random
import zlib
from collections.abc import Callable
from itertools import product

import pytest

from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.coordinator import Coordinator
from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from draftsmith.inference.distributed.timeline import Timeline, Verification
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


def make_drafter(number: int, acceptance: float) -> Callable[[DraftChain], int | None]:
    generator = random.Random(number)

    def draft(chain: DraftChain) -> int | None:
        if generator.random() < 0.1:
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
    assert not [number for number in range(0, 1200, 5) if texts_differ(number)]  # all settings and delays


def test_answers_overtake_each_other_and_come_too_late() -> None:
    stale = overtaken = wasted = 0
    for number in range(20):
        link = FakeLink(HashServer, 3, seed=number, most_delay=12)
        coordinator = Coordinator(link, lookahead=2, max_ahead=12, timeout=1.0)
        decode(coordinator, make_prompt(number), make_drafter(number, 0.9))
        stale, overtaken = stale + link.num_stale, overtaken + link.num_overtaken
        wasted += coordinator.timeline.num_wasted
    assert min(stale, overtaken, wasted) > 20


def test_one_coordinator_decodes_several_texts() -> None:
    """The answers of the text before come late."""
    link = FakeLink(HashServer, 3, most_delay=12)
    coordinator = Coordinator(link, lookahead=2, max_ahead=12, timeout=1.0)
    num_left = 0
    for number in range(20):
        prompt = make_prompt(number)
        chain = decode(coordinator, prompt, make_drafter(number, 0.7))
        assert chain.text[: len(prompt) + NUM_NEW] == plain(prompt)
        num_left += len(link.busy)
    assert num_left > 5


def test_the_next_token_is_always_on_its_way() -> None:
    """After every commit a server works on the next token: that is why decoding is never slower than plain."""
    for number, num_servers in product(range(20), (1, 2, 4)):
        link = FakeLink(HashServer, num_servers, seed=number)
        coordinator = Coordinator(link, lookahead=3, max_ahead=8, timeout=1.0)
        prompt, draft = make_prompt(number), make_drafter(number, 0.6)

        def checked(chain: DraftChain, draft: Callable[[DraftChain], int | None] = draft) -> int | None:
            works_on = [one for one in coordinator.timeline.verifications if one.received is None]  # noqa: B023
            at_work = [one for one in works_on if one.version == chain.version]
            assert any(one.start <= chain.root < one.start + one.num_asked for one in at_work)
            return draft(chain)

        decode(coordinator, prompt, checked)


def test_a_server_that_does_not_answer_is_named() -> None:
    class Deaf(FakeLink):
        def receive(self, seconds: float) -> None:
            return None

    coordinator = Coordinator(Deaf(HashServer, 2), lookahead=2, max_ahead=4, timeout=1.0)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\]"):
        decode(coordinator, [1], make_drafter(0, 0.5))


def test_the_lookahead_follows_the_measured_times() -> None:
    """4 drafts of a second fill 12 seconds for 3 servers."""
    coordinator = Coordinator(FakeLink(HashServer, 3), lookahead=None, max_ahead=16, timeout=1.0)
    assert coordinator.lookahead == 1
    coordinator._measure("draft", 1.0)
    coordinator._measure("verify", 12.0)
    assert coordinator.lookahead == 4


def test_the_worked_example_of_the_chain() -> None:
    chain = DraftChain([5, 6])
    chain.drafts += [7, 8, 9]
    assert chain.ask(keep=1) == Task(0, keep=1, start=1, token_ids=[6, 7, 8, 9])
    assert chain.take(Answer(0, 1, [7, 8, 1, 4])) == [7, 8, 1]
    assert (chain.text, chain.version, chain.drafts) == ([5, 6, 7, 8, 1], 1, [])
    assert chain.take(Answer(0, 5, [3])) == [], "a stale answer"


def test_the_worked_example_of_a_task() -> None:
    chain = DraftChain([*range(5)])  # a b c d e
    chain.ask(keep=4)
    chain.drafts += [5]
    chain.take(Answer(0, 4, [5]))
    chain.drafts += [6, 7]
    task = chain.ask(keep=4)
    assert task == Task(0, keep=4, start=5, token_ids=[4, 5, 6, 7])
    assert task.num_asked == 3


def test_answers_wait_for_those_before_them() -> None:
    chain = DraftChain([1])
    chain.ask(keep=0)
    chain.drafts += [2, 3]
    chain.ask(keep=1)
    assert chain.take(Answer(0, 1, [3, 4])) == []
    assert chain.take(Answer(0, 0, [2])) == [2, 3, 4]


def test_a_timeline_counts_what_was_dropped() -> None:
    tasks = [Verification(1, 0, 4, 1, 0.0, 1.5), Verification(2, 0, 5, 2, 1.0, 5.0), Verification(1, 0, 7, 1, 5.0, 7.0)]
    assert Timeline(verifications=tasks, rounds={0: 6}).num_wasted == 1
