"""Messages between rank 0 and the target servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.distributed.processor_json import decode_processors, encode_processors
from draftsmith.inference.request.request import Request
from draftsmith.inference.request.text_processors import read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.targets.target import Target


@dataclass(frozen=True)
class Greeting:
    """What a server says first: its model."""

    model: str
    num_layers: int
    vocab_size: int
    dtype: str

    @classmethod
    def of_target(cls, target: Target) -> Greeting:
        dtype = str(target.dtype).removeprefix("torch.")
        return cls(type(target.model).__name__, target.num_layers, target.vocab_size, dtype)


@dataclass(frozen=True)
class Prompt:
    """Begins a text: the server reads the prompt. There is no answer.

    Attributes:
        token_ids: the prompt; shown: the same as processors see it, padding on the left included.
        max_new: the most new tokens.
        row_seed: of the noise; None = greedy.
        processors: transformers' logits processors, as `encode_processors` writes them.
        feature_layers: hidden states that answers contain.
    """

    token_ids: list[int]
    shown: list[int]
    max_new: int
    row_seed: int | None
    processors: str = "[]"
    feature_layers: list[int] = field(default_factory=list)

    @classmethod
    def of_request(cls, request: Request, row_seed: int | None, feature_layers: Sequence[int]) -> Prompt:
        """The prompt of a request of one row."""
        return cls(
            request.prompts[0],
            request.rows[0].padded,
            max(1, request.rows[0].budget),
            row_seed,
            encode_processors(request.processors),
            list(feature_layers),
        )

    @property
    def num_hidden(self) -> int:
        """Padding before the prompt, which only processors see."""
        return len(self.shown) - len(self.token_ids)

    def make_sampler(self, target: Target, capacity: int) -> Sampler:
        """How the target picks its tokens, on rank 0 and on servers; the texts that processors read have room for
        `capacity` tokens and the padding."""
        shown = torch.tensor([self.shown], device=target.device)
        texts = TokenHistory.of_prompts(shown, [self.max_new], self.num_hidden + capacity)
        processors = read_processors(decode_processors(self.processors, target.device), texts, target.vocab_size)
        seeds = None if self.row_seed is None else torch.tensor([self.row_seed], device=target.device)
        return Sampler(processors, do_sample=seeds is not None, row_seeds=seeds, texts=texts)


@dataclass(frozen=True)
class Task:
    """Asks for the target's next token after every position from `start` on.

    Worked example, the server holds the 7 tokens a b c d x y z, and the text is a b c d e f with the drafts g h:

        Task(version, keep=4, start=5, token_ids=[e, f, g, h])    cut to 4 tokens; which tokens follow f, g and h?

    Attributes:
        keep: the length to which the server cuts its cache.
        token_ids: all tokens from position `keep` on.
    """

    version: int
    keep: int
    start: int
    token_ids: list[int]

    @property
    def num_asked(self) -> int:
        return self.keep + len(self.token_ids) - self.start


@dataclass(frozen=True)
class Answer:
    """The target's next token after each position from `start` on.

    Attributes:
        features: [n, F] the target's features of these positions, on the host, or None.
    """

    version: int
    start: int
    token_ids: list[int]
    features: Tensor | None = None
