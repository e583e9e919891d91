"""The reports of bf16_divergence.py as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.benchmarks.render import Grid

NUM_SHOWN = 8  # divergences in full; all of them are in the JSON
LEGEND = """
Greedy decoding, batch 1. "Reference" is the plain decoding whose text is held fixed: where a decoding chooses another
token, that is one divergence, and it is called anew behind the text's own token, so every position is compared once.
Called anew, it reads as a prompt what was decoded token by token before; "first" counts only divergences before which
that had not happened, per token up to and including them. ± is the standard error of a count, its square root; where
nothing was counted, the rate is below 3 / tokens with a confidence of 95%.

A step is the distance of neighbouring numbers of the dtype at the size of the larger logit. "Lead changed" is by how
many steps the best token's lead over the runner-up differs between the text's pass and the decoding's own one, where
both choose the same token: what rounding does everywhere. "Rows equal" is the share of those positions at which all
logits are bitwise the same. Each divergence is judged by its two tokens' logits: "ahead" is how far the text's token
led in the pass that wrote the text, "behind" how far it trailed in the decoding's own pass. It is a near-tie if that is
together no more than a lead changes anywhere between the two plain decodings where they agree, or than the two steps
that the last rounding may make. The control has a fault on purpose: it reads drafts one position too far, as wrong code
might. tokens/pass are those of the target, prompts included.
"""


def render(reports: Sequence[dict[str, Any]]) -> str:
    """One section for each dtype and implementation of attention."""
    parts = ["# Divergences from plain greedy decoding", LEGEND.strip()]
    for report in reports:
        parts += _render_report(report)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _render_report(report: dict[str, Any]) -> list[str]:
    environment, rows = report["environment"], report["rows"]
    gpu = environment["gpu"] or environment["cpu"]
    flags = f" ({', '.join(environment['cpu_flags'])})" if not environment["gpu"] else ""
    parts = [
        f"## {environment['dtype']}, {environment['attention']}",
        f"```bash\n{environment['command']}\n```",
        f"{environment['target']}; {gpu}{flags}, {environment['threads']} threads, torch {environment['torch']}, "
        f"transformers {environment['transformers']}, commit {environment['commit']}; texts end at EOS or after "
        f"{environment['max_new_tokens']} tokens.",
        "\n".join(f"- {_describe_reference(one)}" for one in report["references"]),
    ]
    for reference in report["references"]:
        own = [row for row in rows if row["reference"] == reference["name"]]
        parts.append(_make_grid(reference["name"], own, environment["near_tie_steps"]).to_markdown())
    return [*parts, *_list_divergences(rows, environment)]


def _describe_reference(reference: dict[str, Any]) -> str:
    gaps = reference["gap_steps"]
    return (
        f"{reference['name']}: {reference['num_texts']} texts, {reference['num_tokens']:,} tokens, "
        f"{reference['repeated_4grams']:.0%} repeated 4-grams; the best token leads the runner-up by "
        f"{gaps['median']:,.0f} steps in the median, by {gaps['p10']:,.1f} at the 10th percentile and by "
        f"{gaps['p1']:,.1f} at the 1st; both are equal at {reference['equal_tops']} positions"
    )


def _make_grid(reference: str, rows: Iterable[dict[str, Any]], limit: float) -> Grid:
    columns = [
        f"against {reference}",
        "tokens",
        "divergences",
        "per 10,000",
        "first",
        "first per 10,000",
        f"near-ties (lead changed ≤ {limit:g} steps)",
        "tokens/pass",
        "rows equal",
        "lead changed: median / 99.9% / max",
    ]
    cells = []
    for row in rows:
        change = row["change_steps"]
        cells.append(
            [
                row["name"],
                f"{row['num_tokens']:,}",
                str(row["num_divergences"]),
                _describe_rate(row),
                str(row["num_first"]),
                f"{row['first_per_10000']:.1f}",
                f"{row['num_near_ties']}/{row['num_divergences']}",
                f"{row['tokens_per_pass']:.2f}",
                f"{row['equal_rows']:.1%}",
                f"{change['median']:.1f} / {change['p99.9']:.1f} / {change['max']:.1f}",
            ]
        )
    return Grid(f"Divergences from {reference}", columns, cells)


def _describe_rate(row: dict[str, Any]) -> str:
    if not row["num_divergences"]:
        return f"0 (< {3e4 / row['num_tokens']:.0f})"
    return f"{row['per_10000']:.1f} ± {row['standard_error']:.1f}"


def _list_divergences(rows: Sequence[dict[str, Any]], environment: dict[str, Any]) -> list[str]:
    """What all divergences have in common, the control, and the places where leads change most."""
    every = [(row, one) for row in rows for one in row["divergences"] if not row["is_faulty"]]
    faults = [one for row in rows for one in row["divergences"] if row["is_faulty"]]
    control = (
        f"With the fault of the control, {sum(not one['is_near_tie'] for one in faults)} of {len(faults)} divergences "
        f"are no near-ties: the lead changes by up to {max(map(_find_change, faults), default=0):.1f} steps."
    )
    if not every:
        return [f"No divergences. {control}"]
    num_for_text = sum(one["exact"][0] > one["exact"][1] for _, one in every)
    largest = max(_find_change(one) for _, one in every)
    far = [one for _, one in every if not one["is_near_tie"]]
    verdict = f"All {len(every)} divergences are near-ties"
    if far:
        verdict = f"**{len(far)} of {len(every)} divergences are no near-ties**"
    summary = (
        f"{verdict}: between the two passes a lead changes by at most {largest:.1f} steps. One pass in "
        f"{environment['higher_precision']} prefers the text's token in {num_for_text} of {len(every)}. {control}"
    )
    places: dict[tuple[Any, ...], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row, one in every:
        places.setdefault((row["reference"], one["prompt"], one["position"], one["other"]), []).append((row, one))
    widest = sorted(places.values(), key=lambda found: -max(_find_change(one) for _, one in found))
    cells = [_describe_place(found, environment["higher_precision"]) for found in widest[:NUM_SHOWN]]
    columns = [
        "place in the reference's text",
        "the text's token, the other",
        "logits, text's pass",
        "logits, own pass",
        f"logits, {environment['higher_precision']}",
        "ahead, steps",
        "behind, steps",
        "decodings",
    ]
    title = f"The {len(cells)} of {len(places)} places where a lead changes most"
    return [summary, Grid(title, columns, cells).to_markdown()]


def _find_change(divergence: dict[str, Any]) -> float:
    """From the lead of the text's token in its own pass to that of the other token, in steps."""
    return float(divergence["plain_gap"] + divergence["own_gap"])


def _describe_place(found: Sequence[tuple[dict[str, Any], dict[str, Any]]], precision: str) -> list[str]:
    """The decoding where it changes most there, and how many diverge alike."""
    row, one = max(found, key=lambda pair: _find_change(pair[1]))
    digits = 4 if precision == "float32" else 7
    logits = [" ".join(f"{value:.{digits}f}" for value in one[name]) for name in ("plain", "own", "exact")]
    tokens = ", ".join(json.dumps(text, ensure_ascii=False).replace("|", "\\|") for text in one["texts"])
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"{row['reference']}; {one['prompt']}, token {one['position']}",
        tokens,
        *logits,
        f"{one['plain_gap']:.1f}",
        f"{one['own_gap']:.1f}",
        f"{row['name']}{others}",
    ]
