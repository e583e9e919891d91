"""docs/lossless.md from the results of all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.lossless.matrix.drafters import DEPTH, POLICIES
from tests.lossless.matrix.results import DIFFERENT, NEAR_TIE, TOKENS_AT_LEAST, Result, sum_histograms

INTRODUCTION = """\
# The lossless matrix

Written by `make lossless` (`python -m tests.lossless.matrix`); every cell is in [lossless.json](lossless.json).

## What is compared

Every cell decodes with one combination of target, drafter, tree policy, acceptance rule, sampling settings, batch size,
padding side and prefill chunk, in float32, and compares the token ids of every row with a reference of that row alone:

- Greedy texts: transformers' own `generate` with batch 1, on the same model. A row has to stop where it stops there.
- Sampled texts (exact acceptance): plain decoding of this library with batch 1 and the row's seed. The text has to be
  the same whatever is drafted, coupled (drafts read the target's noise) or not.
- Rejection sampling, block verification and typical acceptance: greedy texts only, which have to be transformers'.
  Sampled, these rules are right in distribution (or lossy: typical) and not token for token; chi-square tests of
  their distributions are in tests/inference/acceptance/test_rejection.py and test_sampled_texts.py.

The targets are random models of each family (tests/tiny_targets.py): 6 layers, windows of 8 tokens where the family
has windows, weights so large that texts keep changing, drawn with one of three seeds (in the cells' names). Prompts
have 3 to 40 tokens, so they are below and beyond the windows. Rows of a batch have prompts of different lengths, end at
different steps (by EOS, as a step's last token or not, and by length), and draw with seeds of their own. One decoder
serves all calls of a cell.

Random heads accept almost nothing and test little. The scripted drafter (tests/scripted_drafter.py) knows the
reference and mixes its next token with decoys, at a rank that a schedule chooses, or leaves it out. What steps accept
is noted at their commits, and the run fails unless, on every target, each policy with greedy text accepted 0, 1, 2, 3
and 4 drafts in some step and went beyond a row's end, and unless these were accepted: every node of the chains and of
the static tree; of dynamic trees ("dynamic", "auto") the best and the second-best sibling at each depth, and each of
the four ranks somewhere. With each of the three trees some step has to move keys and values. The scripted drafter also
checks that it is handed the right tokens. "scripted + ..." merges it with another drafter, whose state then sees real
acceptances. "auto" and "gamma" take all their sizes in turn, and leave the drafter out now and then.

## How differences are judged

A difference is a bug until it is shown to be a near-tie, with its numbers, by a plain pass over the common prefix:

- in the logits: both tokens score within 1e-4 of the best one, with processors and noise applied where a text has
  them;
- in an expert router: an expert that is taken and one that is left score within 2e-5 of the spread of the scores (at
  least 1), and the same pass with that one choice made the other way says the other token.

Nothing else is excused; one such cell fails the run, and so does a drafter that refuses a target. Tokens from a
near-tie on are not counted as compared, and a whole run fails below {TOKENS:,} compared tokens.
"""

LEFT_OUT = """\
## What is left out

- Complete is greedy decoding with the scripted drafter: every target, attention, policy and batch. All other
  combinations are a pairwise covering design: every two values of every two axes meet in some cell, not every three.
- Batches of 32 with sampling at T=0.7 only, and no processors: their references take longest.
- Combinations that the library refuses by design are not in the design: staged drafters with trees, rejection
  with trees whose shape depends on the draft, block verification of anything but chains.
- bfloat16, float16, quantised weights, compiled steps and accelerators: their numbers are rounded differently, so
  near-ties fall otherwise. Other tests hold those.
- `tests/lossless/test_fuzz.py` draws combinations at random, trees and schedules included; its number of examples is
  the environment variable LOSSLESS_EXAMPLES.
"""


def render(results: Sequence[Result], gaps: Sequence[str], environment: Mapping[str, Any]) -> str:
    parts = [
        INTRODUCTION.format(TOKENS=TOKENS_AT_LEAST),
        _render_summary(results, gaps, environment),
        _render_greedy([result for result in results if result.part == "greedy"]),
        _render_pairs([result for result in results if result.part == "pairs"]),
        _render_trained([result for result in results if result.part == "trained"]),
        _render_notes(results, gaps),
        LEFT_OUT,
    ]
    return "\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---', *['---:' for _ in head[1:]]])} |"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _render_summary(results: Sequence[Result], gaps: Sequence[str], environment: Mapping[str, Any]) -> str:
    statuses = Counter(result.status for result in results)
    rows = [
        ("cells", f"{len(results):,}"),
        ("tokens compared", f"{sum(result.tokens for result in results):,}"),
        ("rows compared", f"{sum(result.rows for result in results):,}"),
        ("cells with another token", statuses[DIFFERENT]),
        ("rows that differ at a demonstrated near-tie", sum(len(result.ties) for result in results)),
        ("places that were to be reached and were not", len(gaps)),
        ("minutes of decoding", f"{sum(result.seconds for result in results) / 60:.1f}"),
        ("minutes of references", f"{sum(result.reference_seconds for result in results) / 60:.1f}"),
    ]
    ran_on = ", ".join(f"{name}: {value}" for name, value in environment.items())
    return f"## Result\n\n{table(('', 'number'), rows)}\n{ran_on}.\n"


def _sum_up(results: Sequence[Result]) -> str:
    """Tokens compared and tokens a step emits; what is wrong, if anything is."""
    if not results:
        return ""
    wrong = [result.status for result in results if result.status != "identical"]
    steps = sum(sum(result.accepted_histogram) for result in results)
    accepted = sum(sum_histograms(results)) and sum(n * a for a, n in enumerate(sum_histograms(results)))
    text = f"{sum(result.tokens for result in results):,} ({1 + accepted / max(steps, 1):.2f})"
    return text + "".join(f", {number} {status}" for status, number in Counter(wrong).items())


def _grid(
    results: Sequence[Result], row_of: Callable[[Result], str], column_of: Callable[[Result], str], corner: str
) -> str:
    columns = list(dict.fromkeys(map(column_of, results)))
    columns.sort(key=lambda name: POLICIES.index(name) if name in POLICIES else len(POLICIES))
    rows = dict.fromkeys(map(row_of, results))
    body = [
        [row, *(_sum_up([r for r in results if (row_of(r), column_of(r)) == (row, column)]) for column in columns)]
        for row in rows
    ]
    return table((corner, *columns), body)


def _render_greedy(results: Sequence[Result]) -> str:
    if not results:
        return ""
    batches = sorted({result.batch for result in results})
    grid = _grid(results, lambda r: f"{r.family}, {r.attention}", lambda r: r.policy, "target")
    reached = []
    for policy in POLICIES:
        own = [result for result in results if result.policy == policy]
        nodes = {tuple(path) for result in own for path in result.accepted}
        ranks = [sorted({path[-1] for path in nodes if len(path) == depth + 1}) for depth in range(DEPTH)]
        reached.append(
            (
                policy,
                " ".join(f"{steps:,}" for steps in sum_histograms(own)),
                ", ".join("".join(map(str, own_depth)) or "-" for own_depth in ranks),
                len(nodes),
                f"{sum(r.moved for r in own):,}",
                f"{sum(r.by_eos for r in own):,}",
                f"{sum(r.by_length for r in own):,}",
                f"{sum(r.eos_within_step for r in own):,}",
                f"{sum(r.trimmed for r in own):,}",
            )
        )
    head = (
        "policy",
        "steps that accepted 0, 1, 2, ... drafts",
        "ranks accepted at depth 1, 2, ...",
        "different nodes accepted",
        "steps that moved slots",
        "rows ended by EOS",
        "by length",
        "EOS within a step (batch 1)",
        "tokens trimmed",
    )
    return (
        "## Greedy text with the scripted drafter: complete\n\n"
        f"Every target and policy with batches of {', '.join(map(str, batches))}; tokens compared, and in brackets "
        'tokens emitted per row and step. "none" is plain decoding on this library\'s stack.\n\n'
        f"{grid}\nWhat was reached:\n\n{table(head, reached)}"
    )


def _render_pairs(results: Sequence[Result]) -> str:
    if not results:
        return ""
    grids = (
        ("drafter", lambda r: r.drafter, lambda r: r.policy, lambda r: r.drafter),
        ("target", lambda r: f"{r.family}, {r.attention}", lambda r: r.policy, lambda r: (r.family, r.attention)),
        ("sampling", lambda r: r.sampling, lambda r: r.acceptance, lambda r: r.sampling),
        (
            "batch",
            lambda r: f"{r.batch}, padded {r.padding}",
            lambda r: f"prefill chunk {r.prefill_chunk}",
            lambda r: (r.batch, r.padding, r.prefill_chunk),
        ),
    )
    text = "\n".join(_grid(sorted(results, key=order), row, column, corner) for corner, row, column, order in grids)
    return f"## All axes, pairwise\n\n{len(results)} cells, each in all of these tables.\n\n{text}"


def _render_trained(results: Sequence[Result]) -> str:
    if not results:
        return ""
    grid = _grid(results, lambda r: f"{r.drafter}, {r.sampling}", lambda r: r.policy, "heads")
    return (
        "## Trained heads on the embedded target\n\nexamples/heads on examples/chat-13m, batches of 1 and 7. "
        "`make lossless` also compares 20 prompts of 200 tokens for each kind and policy "
        f"(tests/lossless/test_real_heads.py).\n\n{grid}"
    )


def _render_notes(results: Sequence[Result], gaps: Sequence[str]) -> str:
    parts = []
    if ties := [f"- {result.name}: {tie}" for result in results if result.status == NEAR_TIE for tie in result.ties]:
        parts.append("## Near-ties\n\n" + "\n".join(ties) + "\n")
    if wrong := [f"- {result.name}: {result.reason}" for result in results if result.status == DIFFERENT]:
        parts.append("## Differences\n\n" + "\n".join(wrong) + "\n")
    if gaps:
        parts.append("## Not reached\n\n" + "\n".join(f"- {gap}" for gap in gaps) + "\n")
    return "\n".join(parts)
