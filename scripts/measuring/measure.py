"""Measures contenders side by side: in one process, all contenders decode each batch in turn, in rotating order.

Legend: B rows of a batch, L prompt length (of a batch: the longest).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.inference import Decoder, GenerationStats, Target
from draftsmith.inference.request.chat_template import ConversationError, encode_prompt
from draftsmith.inference.runners.compiled import count_graphs
from draftsmith.training.synthesis.prompts import Conversation, encode_prompts, read_prompts, report_rejected

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 32
# The references, by name.
TRANSFORMERS, PLAIN = "transformers generate", "plain decoding"
COMPILED, WITHOUT_MODE = ", compiled", ", not batch-invariant"  # endings of names


@dataclass(frozen=True)
class Settings:
    """The settings of all contenders. max_new_tokens: per prompt. temperature: 0 = greedy. seed: of prompt 0; prompt i
    uses seed + i. batch_size: prompts decoded together. repetition_penalty: as in transformers; 1 = no penalty, None =
    as the target's generation config says. tokenizer: finds the stop strings of the target's generation config.
    is_invariant: the target is in batch-invariant mode, and so is the reference."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3
    batch_size: int = 1
    repetition_penalty: float | None = None
    tokenizer: Any = None
    is_invariant: bool = False

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0

    def generate_kwargs(self, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Keyword arguments of transformers' `generate`."""
        kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens or self.max_new_tokens, "do_sample": self.is_sampled}
        kwargs["tokenizer"] = self.tokenizer
        if self.repetition_penalty is not None:
            kwargs["repetition_penalty"] = self.repetition_penalty
        # Whatever the target's generation config says about these three.
        return {**kwargs, "temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.is_sampled else kwargs


@dataclass(frozen=True)
class Prompt:
    """input_ids: [1, L] int64. index: its place among the prompts; the seed depends on it. conversation: all of its
    user turns; `input_ids` are those up to `turn`."""

    id: str
    index: int
    input_ids: Tensor
    conversation: Conversation | None = None
    turn: int = 0

    @property
    def num_turns(self) -> int:
        """User turns of the whole conversation."""
        return 1 if self.conversation is None else len(self.conversation.given_turns())


@dataclass(frozen=True)
class Batch:
    """Prompts decoded together.

    Attributes:
        input_ids: [B, L] int64, left-padded; attention_mask: [B, L] int64, 0 on padding.
    """

    prompts: tuple[Prompt, ...]
    input_ids: Tensor
    attention_mask: Tensor

    @classmethod
    def of(cls, *prompts: Prompt) -> Batch:
        rows = [prompt.input_ids[0] for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        return cls(prompts, pad(rows), pad([torch.ones_like(row) for row in rows]))


def make_batches(prompts: Sequence[Prompt], batch_size: int) -> list[Batch]:
    """Batches in the prompts' order, all of the full size: the last batch is filled up with the first prompts.

    >>> prompts = [Prompt(str(i), i, torch.ones(1, 1, dtype=torch.long)) for i in range(3)]
    >>> [[prompt.index for prompt in batch.prompts] for batch in make_batches(prompts, 2)]
    [[0, 1], [2, 0]]
    """
    places = itertools.cycle(prompts)
    count = -(-len(prompts) // batch_size)
    return [Batch.of(*itertools.islice(places, batch_size)) for _ in range(count)]


@dataclass
class Run:
    """One batch decoded once.

    Attributes:
        texts: each row's new tokens, EOS included.
        seconds: wall clock of the whole call, prefill included.
        num_forwards: forward passes of the target, each counted once for every row that had not ended.
        stats: of our own decoder; None for transformers'.
    """

    texts: list[list[int]]
    seconds: float
    num_forwards: int
    stats: GenerationStats | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass
class Contender:
    """One way to decode.

    Attributes:
        problem: why it does not run; "" if it runs.
        is_exact: its text equals plain decoding's text with the same seed.
        is_compiled: it warms up on the shortest and the longest batch before it is measured.
        warm_up_seconds: duration of the warm-up, compiling included.
    """

    name: str
    tree: str = ""
    decode: Callable[..., Run] | None = None
    problem: str = ""
    is_compiled: bool = False
    is_exact: bool = True
    warm_up_seconds: float = 0.0
    runs: list[list[Run]] = field(default_factory=list)  # [repeat][batch]
    profiled: list[Run] = field(default_factory=list)  # the runs that give the times of the phases

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tree}" if self.tree else self.name


def load_prompts(
    path: Path,
    tokenizer: Any,
    target: Target,
    *,
    num_prompts: int | None,
    max_new_tokens: int,
    max_turns: int | None = None,
) -> tuple[list[Prompt], int]:
    """The first user turns of a file of prompts or conversations, and the number of turns that were too long.

    Prompts that the chat template rejects are left out, with a warning. `follow_turns` adds the later user turns, of
    which `max_turns` are kept.
    """
    prompts: list[Prompt] = []
    num_too_long = 0
    limit = target.max_length
    rejected: list[str] = []
    read = read_prompts(path, max_turns=max_turns if tokenizer.chat_template else 1)
    for conversation, ids in encode_prompts(read, tokenizer, rejected):
        if len(prompts) == num_prompts:
            break
        input_ids = torch.tensor([ids])
        if limit is not None and input_ids.shape[1] + max_new_tokens > limit:
            num_too_long += 1
            continue
        name = conversation.question_id or conversation.id
        prompts.append(Prompt(name, len(prompts), input_ids.to(target.device), conversation))
    report_rejected(path, rejected, num_left=len(prompts) + num_too_long)
    if not prompts:
        raise ValueError(
            f"{path} has no prompt that leaves room for {max_new_tokens} tokens; {num_too_long} are too long"
        )
    return prompts, num_too_long


def follow_turns(prompts: Sequence[Prompt], tokenizer: Any, target: Target, settings: Settings) -> list[Prompt]:
    """The prompts, each with one more for every later user turn of its conversation. The replies between them are plain
    decoding's, and so those of all exact contenders. A conversation ends before a turn that leaves no room for a reply,
    or that the chat template rejects; a warning tells of these."""
    found, problems = list[Prompt](), list[str]()
    decoder = Decoder(target, None, batch_invariant=False)
    for prompt in prompts:
        found.append(replace(prompt, index=len(found)))
        messages, *later = [[]] if prompt.conversation is None else prompt.conversation.given_turns()
        for turn in later if tokenizer.chat_template else ():
            last = found[-1]
            output = decoder.generate(last.input_ids, seed=settings.seed + last.index, **settings.generate_kwargs())
            reply = tokenizer.decode(output.sequences[0, last.input_ids.shape[1] :], skip_special_tokens=True)
            messages = [*messages, {"role": "assistant", "content": reply}, *turn]
            try:
                ids = encode_prompt(tokenizer, messages, tools=prompt.conversation.tools)
                if target.max_length is not None and len(ids) + settings.max_new_tokens > target.max_length:
                    raise ConversationError(f"{len(ids)} tokens leave no room for {settings.max_new_tokens} more")
            except ConversationError as error:
                problems.append(f"prompt {prompt.id}, turn {last.turn + 2}: {error}")
                break
            input_ids = torch.tensor([ids], device=target.device)
            found.append(Prompt(prompt.id, len(found), input_ids, prompt.conversation, last.turn + 1))
    if problems:
        logger.warning("%d conversations end before their last turn; the first: %s", len(problems), problems[0])
    return found


def warm_up(contender: Contender, batches: Sequence[Batch], settings: Settings) -> float:
    """Makes a contender ready to be measured, compiling included. Returns how many tokens/s it decodes of a short text
    after a long prompt."""
    shortest, *_, longest = sorted([*batches, *batches], key=lambda batch: batch.input_ids.shape[1])
    few = min(WARM_UP_TOKENS, settings.max_new_tokens)
    start = time.perf_counter()
    if contender.is_compiled:  # graphs depend on the length of the cache: compile all of them
        for batch in (shortest, longest):
            contender.decode(batch, settings)
    else:
        contender.decode(longest, settings, max_new_tokens=few)
    contender.warm_up_seconds = time.perf_counter() - start
    run = contender.decode(longest, settings, max_new_tokens=few)
    return run.num_tokens / run.seconds


def count_prompts(seconds: float, num_prompts: int, settings: Settings, limit: float | None) -> int:
    """How many of the prompts are decoded within a limit of seconds: whole batches, one at least.

    Args:
        seconds: that all contenders together take for a batch.
        limit: None = no limit.

    >>> count_prompts(10.0, 48, Settings(repeats=3), 120.0)
    4
    """
    if limit is None:
        return num_prompts
    return min(num_prompts, max(1, int(limit / (seconds * settings.repeats))) * settings.batch_size)


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    on_run: Callable[[], None] = lambda: None,
    on_repeat: Callable[[int], None] = lambda number: None,
) -> None:
    """Fills in the runs of contenders that have warmed up. The order of the contenders rotates from batch to batch, so
    that other load, warm caches and changing clock rates affect all contenders equally."""
    runnable = [contender for contender in contenders if not contender.problem]
    batches = make_batches(prompts, settings.batch_size)
    for contender in runnable:
        contender.runs = [[] for _ in range(settings.repeats)]
    for repeat in range(settings.repeats):
        for place, batch in enumerate(batches, repeat * len(batches)):
            first = place % len(runnable)
            for contender in runnable[first:] + runnable[:first]:
                contender.runs[repeat].append(decode_warm(contender, batch, settings))
                on_run()
        on_repeat(repeat + 1)
    for contender in runnable:
        _profile(contender, batches, settings)


def decode_warm(contender: Contender, batch: Batch, settings: Settings) -> Run:
    """A run that compiles nothing. A run that compiles counts as warm-up and is repeated."""
    while True:
        graphs, start = count_graphs(), time.perf_counter()
        run = contender.decode(batch, settings)
        if count_graphs() == graphs:
            return run
        contender.warm_up_seconds += time.perf_counter() - start


def _profile(contender: Contender, batches: Sequence[Batch], settings: Settings) -> None:
    """Chooses the runs that give the times of the phases. On a CPU these are the measured runs. On an accelerator a
    phase only launches work, so one more round waits at the end of every phase."""
    contender.profiled = [run for runs in contender.runs for run in runs]
    if contender.profiled[0].stats is not None and batches[0].input_ids.is_cuda:
        contender.profiled = [contender.decode(batch, settings, is_synchronised=True) for batch in batches]
