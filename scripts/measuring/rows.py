"""One contender's numbers in a benchmark.

Acceptance length: see `draftsmith.scripts.measuring.report`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftsmith.scripts.measuring.texts import Difference


@dataclass
class Row:
    """One contender's numbers; None = the number does not exist.

    Attributes:
        warm_up_seconds: duration of the warm-up, compiling included.
        tokens_per_second: new tokens of all rows / seconds of the whole calls, all prompts together; the median of the
            repeats.
        over_transformers, over_plain: ratio of tokens/s to transformers' eager `generate`, and to this library's
            fastest plain decoding: the median over batches and repeats, with the quartiles.
        acceptance_length, acceptance_by_depth, accepted_histogram, nodes_per_step: per row.
        rows_per_step: mean number of rows that have not ended in a verify pass.
        step_milliseconds: of a verify step of the whole batch, prefill excluded: draft (inside the drafter), grow (the
            tree and, when sampling, the noise), verify (the target's forward), accept, commit, other (the rest); `step`
            is their sum.
        prompt_milliseconds: to read a batch's prompts, the drafter's reading included.
        overhead_share: the share of a step that is neither the target's forward nor the drafter's.
        host_syncs_per_step: how often the host waited to read a tensor (see `GenerationStats.num_host_syncs`).
        round_weight_bytes, round_flops: the work of a draft phase and a verify pass (see `roofline`).
        limit_milliseconds: the shortest time in which the hardware can do this work.
        roofline_share: limit_milliseconds / the measured step.
        num_identical: rows whose text equals the reference's text of the prompt by itself, in every repeat.
        repeated_4grams: the share of the text's 4-grams that occurred earlier in the text. Looping text helps drafters.
    """

    name: str
    tree: str = ""
    problem: str = ""
    warm_up_seconds: float = 0.0
    num_new_tokens: int = 0
    tokens_per_second: float = 0.0
    tokens_per_second_range: tuple[float, float] = (0.0, 0.0)
    over_transformers: float | None = None
    over_transformers_quartiles: tuple[float, float] | None = None
    over_plain: float | None = None
    over_plain_quartiles: tuple[float, float] | None = None
    acceptance_length: float = 1.0
    acceptance_by_depth: list[float] = field(default_factory=list)
    accepted_histogram: list[int] = field(default_factory=list)
    nodes_per_step: float | None = None
    rows_per_step: float | None = None
    step_milliseconds: dict[str, float] | None = None
    prompt_milliseconds: float | None = None
    overhead_share: float | None = None
    host_syncs_per_step: float | None = None
    round_weight_bytes: float | None = None
    round_flops: float | None = None
    limit_milliseconds: float | None = None
    roofline_share: float | None = None
    reference: str | None = None
    num_identical: int | None = None
    num_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    repeated_4grams: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tree}" if self.tree else self.name
