"""Lets the target write turns with any heads and tree, and finds what is wrong with turns.

A turn depends only on the target, its prompt and its seed, not on heads, tree or batch (`draftsmith.inference.noise`
keys the sampling by row seed and position). `turn_seed` seeds a turn by its place in the data, so the data do not
depend on the batch size, the number of processes or interruptions.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.inference import Decoder, GenerationStats


@dataclass(frozen=True)
class TurnSettings:
    """How to draw the tokens of a turn; temperature 0 = greedy, top_p 1 and top_k 0 = all tokens.

    `max_new_tokens` counts the token that ends the turn.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: give 0 for greedy, or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give the number of tokens to keep, or 0 for all")

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate`. All are given: what is missing is the target's generation config's."""
        is_drawn = self.temperature > 0
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": is_drawn,
            "temperature": self.temperature if is_drawn else None,
            "top_p": self.top_p if is_drawn else None,
            "top_k": self.top_k if is_drawn else None,
        }


def turn_seed(seed: int, name: str, turn: int) -> int:
    """Returns a turn's own seed (63 bits): a hash of the run's seed, the conversation's name and the turn's number."""
    digest = hashlib.sha256(f"{seed}\0{turn}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_looping(ids: Sequence[int], *, max_period: int = 32, min_repeats: int = 4, min_tokens: int = 24) -> bool:
    """Whether tokens end in a block of up to `max_period` tokens, repeated `min_repeats` times over `min_tokens`.

    Worked example: [7, 8] * 12 loops; [7, 8] * 11 is too short; thirty different tokens do not loop.
    """
    for period in range(1, max_period + 1):
        length = max(min_repeats * period, min_tokens)
        tail = ids[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def find_problem(
    token_ids: Sequence[int],
    stop_ids: Collection[int],
    special_ids: Collection[int],
    marks: Sequence[Sequence[int]] = (),
) -> str:
    """Returns why a turn is useless for training ("empty", "truncated", "looping", "special token inside"), or "".

    The decoded text may show more problems (`reply_sources.make_reply`).

    Args:
        special_ids: tokens that must not occur inside, except in `marks`.
        marks: allowed sequences of tokens, the longest first (`TurnTemplate.marks`).
    """
    is_ended = bool(token_ids) and token_ids[-1] in stop_ids
    ids = token_ids[:-1] if is_ended else token_ids
    if is_looping(ids):
        return "looping"
    if not is_ended:
        return "truncated"
    if not set(special_ids).isdisjoint(drop_marks(ids, marks)):
        return "special token inside"
    return "" if ids else "empty"


def drop_marks(token_ids: Sequence[int], marks: Sequence[Sequence[int]]) -> list[int]:
    """Removes the tokens that belong to a mark.

    Worked example: [1, 7, 8, 2, 7] with the marks [7, 8] and [2] becomes [1, 7].
    """
    ids, kept, place = list(token_ids), [], 0
    while place < len(ids):
        length = next((len(mark) for mark in marks if ids[place : place + len(mark)] == list(mark)), 0)
        kept += ids[place : place + 1] if not length else []
        place += length or 1
    return kept


def write_turns(
    decoder: Decoder,
    settings: TurnSettings,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Collection[int],
    seeds: Sequence[int],
    tokenizer: Any = None,
) -> tuple[list[list[int]], GenerationStats]:
    """Writes the turns after some prompts, all together; a drafter changes the speed and not the text.

    Args:
        prompts: token ids, each ending in the header of the turn to write.
        stop_ids: tokens that end a turn, at least one.
        seeds: one per prompt (`turn_seed`); not read at temperature 0.
        tokenizer: for stop strings of the target's generation config; a turn that they end gets the first of
            `stop_ids`.

    Returns:
        the new tokens of each prompt, up to the first one that ends a turn, and the statistics.
    """
    width, device = max(map(len, prompts)), decoder.target.device
    pads = [width - len(prompt) for prompt in prompts]
    input_ids = [[min(stop_ids)] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    output = decoder.generate(
        torch.tensor(input_ids, device=device),
        torch.tensor(mask, device=device),
        seed=list(seeds),
        eos_token_id=sorted(stop_ids),
        pad_token_id=min(stop_ids),
        tokenizer=tokenizer,
        **settings.generate_kwargs(),
    )
    rows = output.sequences[:, width:].tolist()
    if len(rows[0]) < settings.max_new_tokens:  # all rows have ended, the longest perhaps by a stop string
        rows = [[*ids, min(stop_ids)] for ids in rows]
    ends = [next((n for n, token in enumerate(ids, start=1) if token in stop_ids), len(ids)) for ids in rows]
    return [ids[:end] for ids, end in zip(rows, ends, strict=True)], output.stats
