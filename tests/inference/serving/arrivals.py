"""Rows that arrive while others run, and the texts that they get by themselves."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Target, generate
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.serving.reply import Piece, Reply, StopStrings
from draftsmith.inference.serving.scheduler import LaneName, Scheduler
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from tests.tiny_targets import random_prompt

SECONDS = 60  # nothing here takes so long, unless it hangs


class Words:
    """A tokenizer whose token 7 is " 7"."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {token}" for token in ids)


@dataclass
class Arrival:
    """A row to come."""

    target: Target
    prompt: list[int]
    options: dict[str, Any]
    seed: int = 0
    lane: LaneName = ("draft", None)
    num_top: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    row: Reply | None = None

    @property
    def tokens(self) -> list[int]:
        return [token.id for piece in self.pieces for token in piece.tokens]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def make_row(self, on_piece: Any = lambda: None) -> Reply:
        def take(piece: Piece) -> None:
            self.pieces.append(piece)
            on_piece()

        request = make_request(self.target, self.ids, None, **self.options)
        self.row = Reply(
            request,
            row_seeds(self.seed, 1, "cpu"),
            IncrementalDetokenizer(Words()),
            StopStrings(()),
            num_top=self.num_top,
            on_piece=take,
        )
        return self.row

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.prompt])

    def alone(self) -> list[int]:
        """What the row emits by itself, without a drafter."""
        sequences = generate(self.target, None, self.ids, seed=self.seed, **self.options).sequences
        return sequences[0, len(self.prompt) :].tolist()


def serve(scheduler: Scheduler, arrivals: Sequence[Arrival], *, num_first: int = 2, chance: float = 0.4) -> None:
    """Submits the first rows at once, and the others one by one when a piece has been emitted, at random; waits until
    all have ended. The scheduler is started, and runs on."""
    coming = list(arrivals[num_first:])
    draws, done = random.Random(0), threading.Event()

    def submit(arrival: Arrival) -> None:
        scheduler.submit([arrival.make_row(on_piece)], arrival.lane)

    def on_piece() -> None:  # in the engine's thread
        is_last = sum(bool(one.pieces) and one.pieces[-1].is_last for one in arrivals)
        if coming and (draws.random() < chance or is_last == len(arrivals) - len(coming)):
            submit(coming.pop(0))
        elif is_last == len(arrivals):
            done.set()

    if not scheduler.is_running:
        scheduler.start()
    for arrival in arrivals[:num_first]:
        submit(arrival)
    assert done.wait(SECONDS), "the rows did not end"


def draw_options(draws: random.Random, number: int) -> dict[str, Any]:
    """Options of one row: greedy and sampled, with and without processors that read the text."""
    options: dict[str, Any] = {"max_new_tokens": draws.choice([1, 6, 14, 22]), "do_sample": False}
    if number % 3 != 1:
        options |= {"do_sample": True, "temperature": draws.choice([0.7, 1.3]), "top_k": draws.choice([0, 12])}
        options |= {"top_p": draws.choice([1.0, 0.9])}
    if number % 4 == 2:
        options["repetition_penalty"] = 1.3
    if number % 5 == 3:
        options["eos_token_id"] = [draws.randrange(2, 128) for _ in range(20)]
    return options


def draw_arrivals(target: Target, count: int) -> list[Arrival]:
    """Rows of all options, whose prompts begin alike or not."""
    draws = random.Random(1)
    common = random_prompt(40, seed=9)[0].tolist()  # long enough to be reused
    arrivals = []
    for number in range(count):
        prompt = random_prompt(draws.choice([1, 3, 17]), seed=number)[0].tolist()
        prompt = [*common, *prompt] if number % 3 == 0 else prompt
        arrivals.append(Arrival(target, prompt, draw_options(draws, number), seed=number))
    return arrivals


def end(scheduler: Scheduler) -> None:
    scheduler.stop(0.0)
    scheduler.join(SECONDS)
    assert not scheduler.has_thread
