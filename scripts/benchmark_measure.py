"""Measuring side by side: every prompt goes through every contender in turn, in rotating order, in one process.

Legend: L prompt length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_loading import encode_messages, parse_tree
from torch import Tensor

from inference import Decoder, Drafter, DraftLogits, GenerationStats, Target
from inference.ngram import NgramDrafter
from inference.policy import resolve_policy
from training.synthesis import read_prompts

WARM_UP_TOKENS = 32
PROMPT_LOOKUP_TOKENS = 10  # as in transformers' documentation
# The two references, by name.
TRANSFORMERS, PLAIN = "transformers generate", "plain decoding"


@dataclass(frozen=True)
class Settings:
    """How everybody decodes. max_new_tokens: per prompt. temperature: 0 = greedy. seed: prompt i uses seed + i."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3

    @property
    def is_sampled(self) -> bool:
        return self.temperature > 0

    def generate_kwargs(self, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Keyword arguments of transformers' `generate`."""
        kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens or self.max_new_tokens, "do_sample": self.is_sampled}
        # All of the target's distribution, whatever its generation config says: the same for everybody.
        return {**kwargs, "temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.is_sampled else kwargs


@dataclass(frozen=True)
class Prompt:
    """input_ids: [1, L] int64. index: its place among the prompts, which its seed depends on."""

    id: str
    index: int
    input_ids: Tensor


@dataclass
class Run:
    """One prompt decoded once.

    Attributes:
        token_ids: the new tokens, EOS included.
        seconds: wall clock of the whole call, prefill included.
        num_forwards: forward passes of the target.
        stats: of our own decoder; None for transformers'.
        draft_forward_seconds: time inside the drafter, part of the draft phase; the rest of that phase grows the tree.
    """

    token_ids: list[int]
    seconds: float
    num_forwards: int
    stats: GenerationStats | None = None
    draft_forward_seconds: float = 0.0


@dataclass
class Contender:
    """One way to decode. problem: why it does not run, "" if it does."""

    name: str
    tree: str = ""
    decode: Callable[..., Run] | None = None
    problem: str = ""
    runs: list[list[Run]] = field(default_factory=list)  # [repeat][prompt]
    profiled: list[Run] = field(default_factory=list)  # where the phases' times come from


def load_prompts(
    path: Path, tokenizer: Any, target: Target, *, num_prompts: int | None, max_new_tokens: int
) -> tuple[list[Prompt], int]:
    """The first user turns of a file of prompts or conversations, and how many were left out for being too long."""
    prompts: list[Prompt] = []
    num_too_long = 0
    limit = target.max_length
    for conversation in read_prompts(path):
        if len(prompts) == num_prompts:
            break
        turn = conversation.turns[0]
        if tokenizer.chat_template:
            input_ids = encode_messages(tokenizer, [*conversation.messages, {"role": "user", "content": turn}])
        else:
            input_ids = tokenizer(turn, return_tensors="pt")["input_ids"]
        if limit is not None and input_ids.shape[1] + max_new_tokens > limit:
            num_too_long += 1
            continue
        prompts.append(Prompt(conversation.id, len(prompts), input_ids.to(target.device)))
    if not prompts:
        raise ValueError(
            f"{path} has no prompt that leaves room for {max_new_tokens} tokens; {num_too_long} are too long"
        )
    return prompts, num_too_long


def read_clock(device: torch.device) -> float:
    """Seconds, after everything sent to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class TransformersDecoding:
    """The target's own `generate`, with options of its own speculation."""

    def __init__(self, target: Target, **options: Any) -> None:
        self.target = target
        self.options = options

    @torch.inference_mode()
    def __call__(self, prompt: Prompt, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
        model, device = self.target.model, self.target.device
        torch.manual_seed(settings.seed + prompt.index)
        with _count_forwards(model) as num_forwards:
            start = read_clock(device)
            sequences = model.generate(
                prompt.input_ids,
                attention_mask=torch.ones_like(prompt.input_ids),
                **settings.generate_kwargs(max_new_tokens),
                **self.options,
            )
            seconds = read_clock(device) - start
        return Run(sequences[0, prompt.input_ids.shape[1] :].tolist(), seconds, len(num_forwards))


@contextmanager
def _count_forwards(model: Any) -> Iterator[list[None]]:
    """A list with one entry for each forward pass inside the block."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


class TimedDrafter:
    """A drafter that adds up its own time, so that growing the tree can be told from drafting."""

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter = drafter
        self.device = device
        self.feature_layers = drafter.feature_layers
        self.max_depth = drafter.max_depth
        self.seconds = 0.0
        self.is_synchronised = False

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any:
        return self.drafter.start(batch_size, max_length, num_scratch)

    def extend(self, *args: Any, **kwargs: Any) -> DraftLogits:
        return self._timed(self.drafter.extend, *args, **kwargs)

    def expand(self, *args: Any) -> DraftLogits:
        return self._timed(self.drafter.expand, *args)

    def _timed(self, call: Callable[..., DraftLogits], *args: Any, **kwargs: Any) -> DraftLogits:
        start = self._now()
        logits = call(*args, **kwargs)
        self.seconds += self._now() - start
        return logits

    def _now(self) -> float:
        return read_clock(self.device) if self.is_synchronised else time.perf_counter()


class OurDecoding:
    """A `Decoder`, kept from prompt to prompt."""

    def __init__(
        self, target: Target, drafter: Drafter | None, *, tree: str | None = None, is_coupled: bool = True
    ) -> None:
        self.drafter = TimedDrafter(drafter, target.device) if drafter is not None else None
        self.decoder = Decoder(target, self.drafter, tree=parse_tree(tree), is_coupled=is_coupled)

    def __call__(
        self,
        prompt: Prompt,
        settings: Settings,
        *,
        max_new_tokens: int | None = None,
        is_synchronised: bool = False,
    ) -> Run:
        device = self.decoder.target.device
        self.decoder.is_synchronised = is_synchronised
        if self.drafter is not None:
            self.drafter.seconds, self.drafter.is_synchronised = 0.0, is_synchronised
        seed = settings.seed + prompt.index if settings.is_sampled else None
        start = read_clock(device)
        output = self.decoder.generate(
            prompt.input_ids,
            torch.ones_like(prompt.input_ids),
            seed=seed,
            **settings.generate_kwargs(max_new_tokens),
        )
        seconds = read_clock(device) - start
        return Run(
            output.sequences[0, prompt.input_ids.shape[1] :].tolist(),
            seconds,
            output.stats.num_target_forwards,
            output.stats,
            self.drafter.seconds if self.drafter is not None else 0.0,
        )


def make_contenders(
    target: Target, heads: Mapping[str, Drafter], trees: Sequence[str], settings: Settings
) -> list[Contender]:
    """The baselines, then every set of heads with every tree; at temperature > 0 with and without coupled drafting.

    A tree that is too deep for a drafter makes a contender with a `problem`, not an error.

    Raises:
        ValueError: for what is no tree at all, and for two trees of one name.
    """
    for tree in trees:
        resolve_policy(parse_tree(tree), None)
    names = {tree: Path(tree).stem or tree for tree in trees}
    if len(set(names.values())) < len(trees):
        raise ValueError(
            f"--tree names one tree twice, or two files of one name: {', '.join(trees)}; reports could not tell them "
            "apart, so leave one out or rename a file"
        )
    contenders = [
        Contender(TRANSFORMERS, decode=TransformersDecoding(target)),
        Contender(
            "transformers prompt look-up",
            decode=TransformersDecoding(target, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        ),
        Contender(PLAIN, decode=OurDecoding(target, None)),
    ]
    drafters: list[tuple[str, Drafter, Sequence[str]]] = [("n-gram drafter", NgramDrafter(), trees[:1])]
    drafters += [(name, drafter, trees) for name, drafter in heads.items()]
    for name, drafter, own_trees in drafters:
        for tree in own_trees:
            for is_coupled in (True, False) if settings.is_sampled else (True,):
                contender = Contender(name if is_coupled else f"{name}, uncoupled", names[tree])
                try:
                    contender.decode = OurDecoding(target, drafter, tree=tree, is_coupled=is_coupled)
                except ValueError as error:
                    contender.problem = str(error)
                contenders.append(contender)
    return contenders


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    on_run: Callable[[], None] = lambda: None,
) -> None:
    """Fills in the contenders' runs. The order of the contenders moves on by one from prompt to prompt, so that a
    neighbour's load, a warm cache or a falling clock meets all of them alike. Warming up is not counted."""
    runnable = [contender for contender in contenders if not contender.problem]
    longest = max(prompts, key=lambda prompt: prompt.input_ids.shape[1])
    for contender in runnable:
        contender.decode(longest, settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))  # type: ignore[misc]
        contender.runs = [[] for _ in range(settings.repeats)]
    for repeat in range(settings.repeats):
        for prompt in prompts:
            first = (repeat * len(prompts) + prompt.index) % len(runnable)
            for contender in runnable[first:] + runnable[:first]:
                contender.runs[repeat].append(contender.decode(prompt, settings))  # type: ignore[misc]
                on_run()
    for contender in runnable:
        _profile(contender, prompts, settings)


def _profile(contender: Contender, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Where the phases' times come from: the runs themselves, but on an accelerator, whose work is only launched by
    then, one more round that waits at every phase boundary and counts for nothing else."""
    contender.profiled = [run for runs in contender.runs for run in runs]
    if isinstance(contender.decode, OurDecoding) and prompts[0].input_ids.is_cuda:
        contender.profiled = [contender.decode(prompt, settings, is_synchronised=True) for prompt in prompts]
