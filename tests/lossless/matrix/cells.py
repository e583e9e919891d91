"""The combinations of the matrix."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tests.lossless.matrix.cases import Call, Case
from tests.lossless.matrix.covering import cover
from tests.lossless.matrix.drafters import DRAFTERS, POLICIES, TRAINED
from tests.lossless.matrix.references import CHAT, SAMPLING, Row, attentions_of, do_sample, target_of
from tests.tiny_targets import FAMILIES, RECURRENT_FAMILIES

BATCHES = (1, 2, 7, 32)
RECURRENT_BATCHES = (1, 2, 7)  # their steps take longest
NUM_SEEDS = 3  # of the targets' weights
LONG, SHORT = 64, 32  # new tokens of greedy and of sampled texts
# Prompts of 3 to 40 tokens: below and beyond the windows of 8 that some targets have.
ROWS = tuple(Row(3 + (11 * index) % 38, index) for index in range(max(BATCHES)))
AT_ONCE = 4  # rows that a server decodes together
SERVED = ("ngram", "small model", "eagle3", "mtp", "medusa")
WIDE_SAMPLING = ("greedy", "T=0.7")  # batches of 32 have only these: their references take longest


@dataclass(frozen=True)
class Cell:
    """part: "greedy" (the complete part), "pairs", "trained", "recurrent", "bfloat16" or "served"."""

    part: str
    batch: int
    case: Case

    @property
    def name(self) -> str:
        case = self.case
        return "/".join(
            (
                case.family,
                case.attention,
                case.drafter,
                str(case.policy),
                case.acceptance,
                case.sampling,
                f"batch {self.batch}",
                case.padding,
                f"chunk {case.prefill_chunk}",
                f"seed {case.seed}",
                *([] if case.dtype == torch.float32 else ["bfloat16"]),
            )
        )


def calls_of(batch: int, max_new_tokens: int, rows: tuple[Row, ...] = ROWS) -> tuple[Call, ...]:
    """A batch whose rows end by EOS, at different places, and by length; for batch 1 three texts in a row."""

    def place(share: float) -> int:
        return int(share * max_new_tokens)

    if batch == 1:
        ends = ((), ((0, place(0.6)),), ((0, place(0.9)),))
        return tuple(Call((row,), end, max_new_tokens) for row, end in zip(rows[:3], ends, strict=True))
    if batch == 2:
        return (Call(rows[1:3], ((0, place(0.7)),), max_new_tokens),)
    return (Call(rows[:batch], None, max_new_tokens),)


def greedy_cells() -> list[Cell]:
    """Complete: every target, policy and batch, with the scripted drafter."""
    return [
        Cell("greedy", batch, _case(batch, family=family, attention=attention, policy=policy))
        for family in FAMILIES
        for attention in attentions_of(family)
        for policy in POLICIES
        for batch in BATCHES
    ]


def _case(batch: int, **values: Any) -> Case:
    length = LONG if values.get("sampling", "greedy") == "greedy" else SHORT
    if values["policy"] == "none":
        values["drafter"] = "none"
    seed = seed_of(values["family"], values["attention"])
    return Case(calls=calls_of(batch, length), text_length=length, seed=seed, **values)


def recurrent_cells() -> list[Cell]:
    """Targets with recurrent layers and the scripted drafter: greedy text with every policy, sampled text with chains
    and trees."""
    samplings = [("greedy", POLICIES, RECURRENT_BATCHES), ("T=0.7", ("chain", "static", "dynamic"), (1, 7))]
    return [
        Cell(
            "recurrent",
            batch,
            _case(batch, family=family, attention=attentions_of(family)[0], policy=policy, sampling=sampling),
        )
        for family in RECURRENT_FAMILIES
        for sampling, policies, batches in samplings
        for policy in policies
        for batch in batches
    ]


def seed_of(family: str, attention: str) -> int:
    """The seed of a target's weights: one for all cells, so that cells share their reference texts."""
    if family in RECURRENT_FAMILIES:
        return 0
    return (FAMILIES.index(family) + ("sdpa", "eager").index(attention)) % NUM_SEEDS


FACTORS: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "attention": ("sdpa", "eager"),
    "drafter": DRAFTERS,
    "policy": tuple(policy for policy in POLICIES if policy != "none"),
    "acceptance": ("exact", "exact uncoupled", "rejection", "typical"),
    "sampling": tuple(SAMPLING),
    "batch": BATCHES,
    "padding": ("left", "right"),
    "prefill_chunk": (512, 16, 5),
}


def makes_sense(values: Mapping[str, Any]) -> bool:
    """Whether the library decodes this combination, and its text must equal plain decoding."""
    acceptance, sampling, policy = values["acceptance"], values["sampling"], values["policy"]
    if values["attention"] not in attentions_of(values["family"]):
        return False
    if values["drafter"] == "staged" and policy not in ("chain", "gamma"):
        return False
    if acceptance == "rejection" and policy not in ("chain", "static"):
        return False
    # Sampled, these rules draw from the right distribution, or the lossy one, but not the same text; greedy targets
    # have no noise to couple with.
    if do_sample(sampling) != acceptance.startswith("exact") and acceptance != "exact":
        return False
    return values["batch"] != max(BATCHES) or sampling in WIDE_SAMPLING


def pair_cells() -> list[Cell]:
    """Cells in which every two values of every two factors meet."""
    return [Cell("pairs", values["batch"], _case(**values)) for values in cover(FACTORS, makes_sense)]


def trained_cells() -> list[Cell]:
    """Committed heads on the embedded target."""
    rows = tuple(Row(index, index) for index in range(7))
    return [
        Cell(
            "trained",
            batch,
            Case(CHAT, calls_of(batch, 48, rows), drafter=kind, policy=policy, sampling=sampling, text_length=48),
        )
        for kind in TRAINED
        for policy in ("chain", "static", "dynamic", "auto")
        for sampling in ("greedy", "T=0.7")
        for batch in (1, 7)
    ]


def bfloat16_cells() -> list[Cell]:
    """The cells of the published parts in bfloat16, with targets that have a batch-invariant mode."""
    cells = [*greedy_cells(), *pair_cells(), *trained_cells()]
    return [
        Cell("bfloat16", cell.batch, replace(cell.case, dtype=torch.bfloat16))
        for cell in cells
        if _is_batch_invariant(*cell.case.source)
    ]


def served_cells() -> list[Cell]:
    """Rows that come to a server at random, in both dtypes."""
    return [
        Cell("served", AT_ONCE, Case(family, (), attentions_of(family)[0], drafter, policy, dtype=dtype))
        for family, drafters in {**dict.fromkeys(FAMILIES, SERVED), CHAT: TRAINED}.items()
        for drafter in drafters
        for policy in ("dynamic:3,2,6", "auto")
        for dtype in (torch.float32, torch.bfloat16)
        if dtype == torch.float32 or _is_batch_invariant(family, attentions_of(family)[0], 0)
    ]


@cache
def _is_batch_invariant(family: str, attention: str, seed: int) -> bool:
    try:
        target_of(family, attention, seed, torch.bfloat16)
    except ValueError:
        return False
    return True
