"""One contender's numbers in a benchmark.

Acceptance length is counted as in `inference.stats`: tokens that verify steps emit / verify steps, the bonus token
included, the prefill and its token excluded. transformers does not tell its steps: there it is tokens / forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scripts.measuring.texts import Difference


@dataclass
class Row:
    """One contender's numbers; None where a number does not exist.

    Attributes:
        warm_up_seconds: spent before anything was measured, compiling included.
        tokens_per_second: new tokens of all rows / seconds of the whole calls, all prompts together; the median of the
            repeats.
        over_transformers, over_plain: ratio of tokens/s to transformers' eager `generate`, and to this library's plain
            decoding in its faster mode; taken for each batch and repeat, then the median; with the quartiles.
        acceptance_length, acceptance_by_depth, accepted_histogram, nodes_per_step: per row.
        rows_per_step: rows of the batch that had not ended, in an average verify pass.
        step_milliseconds: of a verify step of the whole batch, prefill excluded: draft (inside the drafter), grow (the
            tree and, when sampling, the noise), verify (the target's forward), accept, commit, other (the rest); `step`
            is their sum.
        overhead_share: the share of a step that is neither the target's forward nor the drafter's.
        host_syncs_per_step: how often the host waited to read a tensor (see `GenerationStats.num_host_syncs`).
        round_weight_bytes, round_flops: what a draft phase and a verify pass must read and multiply (see `roofline`).
        limit_milliseconds: the shortest time the hardware could do that in; roofline_share: that / the measured step.
        num_identical: rows whose text equals in every repeat what the reference writes for their prompt by itself.
        repeated_4grams: the share of 4-grams of the new text that stood there before: looping text flatters drafters.
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
