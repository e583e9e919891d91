"""Turns a benchmark's runs into one row of numbers for each contender, and into a JSON file.

Acceptance length is tokens that verify steps emit / verify steps, as in `draftsmith.inference.stats`. The bonus token
counts; the prefill and its token do not. For transformers, whose steps are unknown, it is tokens / forward passes.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.inference import GenerationStats, Target
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.text_difference import find_difference
from draftsmith.scripts.measuring.measure import (
    COMPILED,
    PLAIN,
    TRANSFORMERS,
    WITHOUT_MODE,
    Batch,
    Contender,
    Prompt,
    Run,
    Settings,
    make_batches,
)
from draftsmith.scripts.measuring.table import POSITIONS, Row, describe_texts


def make_rows(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
    single_texts: Mapping[str, Sequence[list[int]]],
) -> list[Row]:
    """Rows in the contenders' order. single_texts: as `texts_of_references` gives them."""
    transformers = next((one for one in contenders if one.name == TRANSFORMERS and one.runs), None)
    references = transformers, find_fastest_plain(contenders)
    return [_make_row(contender, references, prompts, settings, target, single_texts) for contender in contenders]


def texts_of_references(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], settings: Settings
) -> dict[str, list[list[int]]]:
    """Each reference's text of each prompt decoded by itself: from the runs of single prompts, otherwise decoded now.

    At T = 0 the reference is transformers' `generate`. At T > 0 and in batch-invariant mode it is our plain decoding
    with the same seed: transformers draws other random numbers, and rounds in another way. So do compiled steps, which
    in that mode have a reference of their own.
    """
    found = {}
    for name in {_reference_name(one, settings) for one in contenders if one.runs}:
        reference = next(one for one in contenders if one.name == name)
        if settings.batch_size == 1:
            found[name] = [run.texts[0] for run in reference.runs[0]]
        else:
            found[name] = [reference.decode(Batch.of(prompt), settings).texts[0] for prompt in prompts]
    return found


def find_fastest_plain(contenders: Sequence[Contender]) -> Contender | None:
    """The faster of this library's plain decodings, eager or compiled."""
    plain = [one for one in contenders if one.name.startswith(PLAIN) and one.runs]
    return max(plain, key=lambda one: statistics.median(map(_speed, one.runs)), default=None)


def headline(rows: Sequence[Row]) -> list[str]:
    """Lines with the fastest drafter and its speed relative to transformers' `generate` and to the fastest plain
    decoding of this library. Empty without drafters."""
    drafting = [row for row in rows if row.tree and not row.problem and not row.name.endswith(WITHOUT_MODE)]
    if not drafting or not all(row.over_transformers and row.over_plain for row in drafting):
        return []
    best = max(drafting, key=lambda row: row.tokens_per_second)
    plain = max((row for row in rows if row.name.startswith(PLAIN)), key=lambda row: row.tokens_per_second)
    same = "" if best.num_identical is None else f", texts identical: {describe_texts(best)}"
    lines = [
        f"Fastest drafter: {best.label}, acceptance length {best.acceptance_length:.2f}{same}.",
        f"Its speed: {best.over_transformers:.2f} × transformers' generate, {best.over_plain:.2f} × the fastest plain "
        f"decoding of this library ({plain.name}).",
    ]
    if best.over_plain is not None and best.over_plain < 1:
        cost = best.acceptance_length / best.over_plain
        lines.append(
            f"Drafting is slower than plain decoding here: a step emits {best.acceptance_length:.2f} tokens and takes "
            f"as long as {cost:.2f} plain steps. Train the heads longer, draft less (--tree chain:2), or let --tree "
            "auto choose, which decodes plainly where that is faster."
        )
    return lines


def _reference_name(contender: Contender, settings: Settings) -> str:
    if settings.is_invariant and contender.is_compiled:
        return f"{PLAIN}{COMPILED}"
    return PLAIN if settings.is_sampled or settings.is_invariant else TRANSFORMERS


def _make_row(
    contender: Contender,
    references: tuple[Contender | None, Contender | None],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
    single_texts: Mapping[str, Sequence[list[int]]],
) -> Row:
    row = Row(contender.name, contender.tree, contender.problem, contender.warm_up_seconds)
    if contender.problem:
        return row
    speeds = [_speed(runs) for runs in contender.runs]
    row.num_new_tokens = sum(run.num_tokens for run in contender.runs[0])
    row.tokens_per_second = statistics.median(speeds)
    row.tokens_per_second_range = (min(speeds), max(speeds))
    row.over_transformers, row.over_transformers_quartiles = _ratio(contender, references[0])
    row.over_plain, _ = _ratio(contender, references[1])
    row.repeated_4grams = share_of_repeated_ngrams([text for run in contender.runs[0] for text in run.texts])
    _count_steps(row, contender)
    _compare_texts(row, contender, single_texts, prompts, settings, target)
    return row


def _speed(runs: Sequence[Run]) -> float:
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def _ratio(contender: Contender, reference: Contender | None) -> tuple[float | None, tuple[float, float] | None]:
    """Median and quartiles over (batch, repeat) of the ratio of tokens/s. The two runs of a ratio are seconds apart."""
    if reference is None:
        return None, None
    own, other = ([_speed([run]) for runs in one.runs for run in runs] for one in (contender, reference))
    return summarise([speed / baseline for speed, baseline in zip(own, other, strict=True)])


def share_of_repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of all n-grams that already occurred earlier in the same text.

    >>> share_of_repeated_ngrams([[1, 2, 1, 2, 1, 2, 3]])  # 1212 2121 1212 2123
    0.25
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    total = sum(map(len, grams))
    return 1 - sum(len(set(one)) for one in grams) / total if total else 0.0


def summarise(ratios: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median and the quartiles."""
    if len(ratios) == 1:
        return ratios[0], (ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (low, high)


def _count_steps(row: Row, contender: Contender) -> None:
    """Acceptance comes from all runs, the time of a step's parts from the profiled runs."""
    every = [run for runs in contender.runs for run in runs]
    own = [run.stats for run in every if run.stats is not None]
    if not own:
        row.acceptance_length = sum(run.num_tokens for run in every) / sum(run.num_forwards for run in every)
        return
    total = sum(own, GenerationStats())
    row.acceptance_length = total.acceptance_length
    row.acceptance_by_depth = total.acceptance_by_depth
    steps = [row_steps for stats in own for row_steps in stats.steps]
    row.acceptance_by_position = GenerationStats(steps=steps).acceptance_by_position(POSITIONS)
    row.accepted_histogram = total.accepted_histogram
    if not total.num_verify_steps:
        return
    row.nodes_per_step = 1 + total.num_drafted / total.num_verify_steps
    row.rows_per_step = total.num_verify_steps / total.num_verify_passes
    row.host_syncs_per_step = total.num_host_syncs / total.num_verify_passes
    stats = sum((run.stats for run in contender.profiled if run.stats is not None), GenerationStats())
    row.step_milliseconds = stats.split_step()
    row.prompt_milliseconds = 1000 * stats.seconds["prefill"] / len(contender.profiled)
    outside = row.step_milliseconds["step"] - row.step_milliseconds["draft"] - row.step_milliseconds["verify"]
    row.overhead_share = outside / row.step_milliseconds["step"]


def _compare_texts(
    row: Row,
    contender: Contender,
    single_texts: Mapping[str, Sequence[list[int]]],
    prompts: Sequence[Prompt],
    settings: Settings,
    target: Target,
) -> None:
    """Compares every row of every batch with the reference's text of its prompt. With plain decoding as the reference
    only our own contenders with exact acceptance are compared, because others give other texts."""
    is_ours = any(run.stats is not None for run in contender.runs[0])
    name = _reference_name(contender, settings)
    if name.startswith(PLAIN) and not (is_ours and contender.is_exact):
        return
    row.reference = name if settings.batch_size == 1 else f"{name}, batch 1"
    for place, batch in enumerate(make_batches(prompts, settings.batch_size)):
        row.num_compared += len(batch.prompts)
        for number, prompt in enumerate(batch.prompts):
            expected = single_texts[name][prompt.index]
            texts = [runs[place].texts[number] for runs in contender.runs]
            found = next((text for text in texts if text != expected), None)
            if found is not None:
                seed = [int(row_seeds(settings.seed + prompt.index, 1, "cpu"))]
                options = settings.generate_kwargs()
                difference = find_difference(target, prompt.input_ids, expected, found, seed=seed, **options)
                assert difference is not None
                row.differences.append((prompt.id, difference))
    row.num_identical = row.num_compared - len(row.differences)


def make_report(
    environment: dict[str, Any], rows: Sequence[Row], contenders: Sequence[Contender]
) -> dict[str, dict[str, Any] | list[Any]]:
    """The JSON of one combination of target, prompts, temperature and batch size: environment, rows, and every run for
    other statistics."""
    runs = {
        row.label: [[{"tokens": run.num_tokens, "seconds": run.seconds} for run in runs] for runs in contender.runs]
        for row, contender in zip(rows, contenders, strict=True)
    }
    return {"environment": environment, "rows": [asdict(row) for row in rows], "runs": runs}
