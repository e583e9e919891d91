"""A matrix of measurements of one target: every file of prompts at every temperature and batch size."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from draftsmith.inference import Drafter, Target
from draftsmith.inference.request.model_settings import find_model_settings
from draftsmith.inference.targets.model_config import find_attention
from draftsmith.scripts.measuring.contenders import make_contenders
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.measure import (
    COMPILED,
    PLAIN,
    TRANSFORMERS,
    Batch,
    Contender,
    Prompt,
    Settings,
    count_prompts,
    follow_turns,
    load_prompts,
    make_batches,
    measure,
    warm_up,
)
from draftsmith.scripts.measuring.report import make_rows, texts_of_references
from draftsmith.scripts.measuring.table import Row
from draftsmith.scripts.shared.draft_vocabulary import DraftVocabulary
from draftsmith.scripts.shared.model_loading import load_assistant, load_drafter, load_target
from draftsmith.training.data.conversations import Place
from draftsmith.training.data.options import require_positive

SMALL_MODEL = "small model"
WARM_UP_SHARE = 2 / 3  # of --minutes: what can wait is not compiled after it
TOO_LONG = "compiling does not fit into --minutes (0 = no limit; --compile false compiles nothing)"
SMALL_BYTES = 10**9  # a pass over a larger model takes a CPU far longer than its dispatch


@dataclass(frozen=True)
class Subject:
    """A target with everything that is measured on it.

    Attributes:
        without_mode: the same target where `target` is in batch-invariant mode, otherwise None.
        drafters: heads by their short names and the small model.
        prompts: by file: the prompts, and the number of prompts that were too long.
        details: entries of a report's environment.
    """

    target: Target
    without_mode: Target | None
    tokenizer: Any
    drafters: dict[str, Drafter]
    assistant: PreTrainedModel | None
    prompts: dict[str, tuple[list[Prompt], int]]
    details: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One combination: its environment and a row for each contender. single_texts: of `texts_of_references`."""

    environment: dict[str, Any]
    rows: list[Row]
    contenders: list[Contender]
    prompts: list[Prompt]
    single_texts: dict[str, list[list[int]]]


def load_subject(
    name: str,
    *,
    heads: Sequence[str],
    prompts: Sequence[str],
    num_prompts: int | None,
    max_new_tokens: int,
    dtype: str,
    device: str | None,
    assistant: str | None = None,
    drafter_model: str | None = None,
    has_packed_weights: bool = False,
    is_invariant: bool = False,
    vocabulary: DraftVocabulary | None = None,
    max_turns: int | None = None,
) -> Subject:
    """Loads a target, its drafters and its prompts (options as in `draftsmith bench`).

    Raises:
        ValueError: heads or a drafter model do not fit the target.
    """
    target, tokenizer = load_target(name, dtype=dtype, device=device)
    if has_packed_weights:
        target = target.with_packed_weights()
    without_mode = target if is_invariant else None
    if is_invariant:
        target = target.batch_invariant()
    load = partial(load_drafter, target, tokenizer)
    drafters = {short: load(heads=path, vocabulary=vocabulary) for short, path in name_heads(heads).items()}
    if drafter_model is not None:
        drafters[SMALL_MODEL] = load(drafter_model=drafter_model)
    return Subject(
        target=target,
        without_mode=without_mode,
        tokenizer=tokenizer,
        drafters=drafters,
        assistant=load_assistant(assistant, target) if assistant is not None else None,
        prompts={
            path: load_prompts(
                Path(path),
                tokenizer,
                target,
                num_prompts=num_prompts,
                max_new_tokens=max_new_tokens,
                max_turns=max_turns,
            )
            for path in prompts
        },
        details={
            "target": name,
            "heads": list(heads),
            "draft_vocab_size": None if vocabulary is None else vocabulary.size,
            "assistant": assistant,
            "drafter_model": drafter_model,
            "has_chat_template": bool(tokenizer.chat_template),
        },
    )


def is_faster_compiled(target: Target) -> bool:
    """Whether a step is mostly dispatch, which compiling saves: true for small weights on a CPU. Not in batch-invariant
    mode, which some CPUs cannot compile."""
    is_free = target.device.type == "cpu" and not target.is_batch_invariant
    return is_free and target.model.get_memory_footprint() < SMALL_BYTES


def check_matrix(args: Any, *, counts: Sequence[str], lists: Sequence[str]) -> None:
    """Checks a program's options: `counts` are positive or None, `lists` have distinct values, prompts exist, and
    temperatures are not negative."""
    require_positive(args, counts)
    for name in lists:
        values = getattr(args, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"got --{name} {' '.join(map(str, values))}: give one or more, each once")
    for temperature in args.temperature:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"got --temperature {temperature}: give 0 for greedy decoding, or a positive number")
    for path in args.prompts:
        if not Path(path).is_file():
            raise ValueError(f"--prompts {path} does not exist: give a file of JSON lines")
        Place.find(path, option="--prompts")


def name_heads(paths: Sequence[str]) -> dict[str, str]:
    """Short, distinct names for heads: the ends of their paths.

    >>> name_heads(["a/heads/medusa", "b/heads/medusa", "b/heads/eagle3"])
    {'a/heads/medusa': 'a/heads/medusa', 'b/heads/medusa': 'b/heads/medusa', 'eagle3': 'b/heads/eagle3'}
    """
    if len(set(paths)) < len(paths):
        raise ValueError(f"--heads names the same heads twice: {', '.join(paths)}")

    def shorten(path: str) -> str:
        parts = path.rstrip("/").split("/")
        ends = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [other.rstrip("/") for other in paths if other != path]
        return next((end for end in ends if not any(f"/{other}".endswith(f"/{end}") for other in others)), path)

    return {shorten(path): path for path in paths}


def measure_combination(
    subject: Subject,
    path: str,
    settings: Settings,
    *,
    trees: Sequence[str],
    acceptance: Sequence[str],
    is_compiled: bool,
    minutes: float,
    known: tuple[list[Prompt], dict[str, list[list[int]]]] | None = None,
) -> Measured:
    """Measures all contenders, interleaved, on one file's prompts at one temperature and batch size.

    Args:
        is_compiled: heads run compiled, and the baselines both ways.
        minutes: as in `measure_with_progress`.
        known: prompts that are decoded again in another batch size, and their `single_texts`.
    """
    target, settings = subject.target, replace(settings, tokenizer=subject.tokenizer)
    if is_compiled:
        torch._dynamo.reset()  # graphs of earlier combinations would count towards torch's limit
    contenders = make_contenders(
        target,
        subject.drafters,
        trees,
        settings,
        is_compiled=is_compiled,
        acceptance=acceptance,
        assistant=subject.assistant,
        without_mode=subject.without_mode,
    )
    prompts, num_too_long = subject.prompts[path]
    if known is None:
        follow = partial(follow_turns, tokenizer=subject.tokenizer, target=target, settings=settings)
        prompts, settings = measure_with_progress(contenders, prompts, settings, minutes=minutes, follow=follow)
        single_texts = texts_of_references(contenders, prompts, settings)
    else:
        prompts, single_texts = known
        prompts, settings = measure_with_progress(contenders, prompts, settings)
    environment = describe_environment(
        target,
        settings,
        **subject.details,
        trees=list(trees),
        acceptance=list(acceptance),
        prompts=path,
        num_prompts=len(prompts),
        num_prompts_too_long=num_too_long,
        num_prompts_again=-len(prompts) % settings.batch_size,
    )
    rows = make_rows(contenders, prompts, settings, target, single_texts)
    return Measured(environment, rows, contenders, prompts, single_texts)


def describe_environment(target: Target, settings: Settings, /, **details: Any) -> dict[str, Any]:
    """Everything a reader needs to judge or to reproduce the numbers, with the settings and details.

    `generation_config` is what the target's generation config adds to the settings.
    """
    options = dict(vars(settings))
    del options["tokenizer"]
    return {
        **describe_machine(target.device),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": find_attention(target.backbone.causal_lm),
        "batch": options.pop("batch_size"),
        **describe_program(),
        **options,
        "generation_config": find_model_settings(target.model.generation_config, settings.generate_kwargs()),
        **details,
    }


def measure_with_progress(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    minutes: float = 0.0,
    follow: Callable[[Sequence[Prompt]], list[Prompt]] = list,
) -> tuple[list[Prompt], Settings]:
    """Warms up, then measures. The standard error gets a line for each contender as it is ready, the time that decoding
    will take, and a line for each repeat; a terminal also a bar.

    Args:
        minutes: all together. Heads after the first ones that take longer to compile are left out (they get a
            `problem`), then prompts, then repeats. 0 = no limit.
        follow: adds the later turns of the prompts' conversations (`follow_turns`).

    Returns:
        The prompts that were decoded, and the settings with the repeats that were made.
    """
    runnable = [contender for contender in contenders if not contender.problem]
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def note(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        def tell_time(seconds: float, num_prompts: int) -> str:
            num_batches = -(-num_prompts // settings.batch_size)
            return f"{seconds * settings.repeats * num_batches / 60:.1f} minutes"

        slow = "; compiling takes minutes" if any(one.is_compiled for one in runnable) else ""
        note(f"warming up {len(runnable)} ways to decode{slow}")
        task = progress.add_task("warming up")
        batches = make_batches(prompts, settings.batch_size)
        seconds = warm_up_all(runnable, batches, settings, note, limit=WARM_UP_SHARE * 60 * minutes)
        limit: float | None = None
        if minutes:
            limit = max(60 * minutes - (time.perf_counter() - start), (1 - WARM_UP_SHARE) * 60 * minutes)
            settings = replace(settings, repeats=min(settings.repeats, max(1, int(limit / max(seconds, 1e-3)))))
        num_all = sum(prompt.num_turns for prompt in prompts if prompt.turn == 0)
        turns = num_all / len(prompts)
        count = count_prompts(seconds * turns, len(prompts), settings, limit)
        chosen = follow(prompts[:count])
        runnable = [contender for contender in runnable if not contender.problem]
        num_runs = settings.repeats * len(make_batches(chosen, settings.batch_size)) * len(runnable)
        all_of_them = f"; --minutes 0 decodes all, in about {tell_time(seconds, num_all)}"
        note(
            f"decoding {len(chosen)} of {num_all} prompts × {settings.repeats} repeats: about "
            f"{tell_time(seconds, len(chosen))}{all_of_them if count < len(prompts) else ''}"
        )
        progress.reset(task, total=num_runs, description="decoding")
        measure(
            contenders,
            chosen,
            settings,
            on_run=lambda: progress.advance(task),
            on_repeat=lambda number: note(f"repeat {number} of {settings.repeats} is decoded"),
        )
    return chosen, settings


def warm_up_all(
    contenders: Sequence[Contender],
    batches: Sequence[Batch],
    settings: Settings,
    note: Callable[[str], None],
    *,
    limit: float,
) -> float:
    """Decodes once with each. After the first compiled one, those that might take longer to compile than the limit
    allows get a `problem`.

    Args:
        note: gets a line for each.
        limit: seconds; 0 = none.

    Returns:
        how many seconds all of them together need for a batch.
    """
    start, seconds, longest = time.perf_counter(), 0.0, 0.0
    for number, contender in enumerate(order_warm_ups(contenders), 1):
        place = f"{number}/{len(contenders)} {contender.label}"
        left = limit - (time.perf_counter() - start)
        # The first heads are compiled in any case, and plain decoding with them: one without the other would mislead.
        is_limited = limit > 0 and contender.is_compiled and longest > 0 and contender.name != f"{PLAIN}{COMPILED}"
        if is_limited and left < longest:
            contender.problem = TOO_LONG
            note(f"{place}: left out, {TOO_LONG}")
            continue
        speed = warm_up(contender, batches, settings)
        seconds += settings.batch_size * settings.max_new_tokens / speed
        if contender.is_compiled:
            longest = max(longest, contender.warm_up_seconds)
        note(f"{place}: about {speed:.1f} tokens/s, ready after {contender.warm_up_seconds:.0f} s")
    return seconds


def order_warm_ups(contenders: Sequence[Contender]) -> list[Contender]:
    """What is not compiled first. Then, as time may run out: drafters, plain decoding, transformers.

    >>> compiled = [Contender(name, is_compiled=True) for name in (TRANSFORMERS, PLAIN, "heads")]
    >>> [contender.name for contender in order_warm_ups([*compiled, Contender("n-grams")])]
    ['n-grams', 'heads', 'plain decoding', 'transformers generate']
    """

    def place(contender: Contender) -> int:
        baselines = [contender.name.startswith(name) for name in (PLAIN, TRANSFORMERS)]
        return contender.is_compiled and 1 + (baselines.index(True) + 1 if any(baselines) else 0)

    return sorted(contenders, key=place)
