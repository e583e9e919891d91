"""The page of a diagnosis, for a terminal and as HTML."""

import textwrap
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from draftsmith.scripts.diagnosis.breakdown import Table
from draftsmith.scripts.diagnosis.checks import Case, Finding
from draftsmith.training.run.pace import CHAIN, EXPECTED

WIDTH = 100


def describe(case: Case, findings: list[Finding], tables: dict[str, Table]) -> dict[str, Any]:
    """What both pages show."""
    evidence, config = case.evidence, case.heads.config
    num_tokens = sum(len(text.ids) - text.prompt_length for text in evidence.texts)
    share, steps = evidence.agreement
    return {
        "title": f"{config.head_type} heads {case.heads_name} for {case.target_name}",
        "summary": [
            f"{evidence.greedy.acceptance_length:.2f} tokens a pass at T = 0, {evidence.sampled.acceptance_length:.2f} "
            f"at T = 1, in chains of {evidence.depth} ({len(evidence.texts)} prompts, {num_tokens} tokens)",
            *(
                [f"The decoder accepts what the training forward has right in {share:.0%} of {steps} steps"]
                * bool(steps)
            ),
        ],
        "findings": findings,
        "tables": tables,
        "speed": _describe_speed(case),
        "expected": _describe_expected(case),
    }


def _describe_speed(case: Case) -> list[str]:
    if case.speed is None:
        return []
    lines = [f"The default tree decodes {case.speed.auto:.2f} times as fast as plain decoding here"]
    costs = (f"{nodes} nodes {ratio:.2f}" for nodes, ratio in case.speed.costs)
    if case.speed.costs:
        lines.append("A step costs, in plain steps: " + ", ".join(costs))
        lines.append("A tree gains when it accepts more tokens a pass than its step costs, by their ratio")
    return lines


def _describe_expected(case: Case) -> list[str]:
    tokens = case.record.get("training", {}).get("tokens")
    known = (
        "How many tokens the heads have seen is not known"
        if tokens is None
        else f"These heads have seen {tokens:,} tokens"
    )
    bounds = [
        f"{most / 1e6:g} M: {least:g} to {high:g}" if least > 1 else f"{most / 1e6:g} M: below {high:g}"
        for most, least, high in EXPECTED[:-1]
    ]
    return [known, f"Usual in a chain of {CHAIN}, up to so many tokens: " + "; ".join(bounds)]


def render_text(page: dict[str, Any]) -> str:
    lines = [page["title"], *(f"  {line}" for line in page["summary"]), ""]
    for number, finding in enumerate(page["findings"], start=1):
        lines.append(f"{number}. {finding.fault}")
        lines += _wrap(finding.evidence, "   ", "   ")
        lines += [*_wrap(finding.cure, "   -> ", "      "), ""]
    if not page["findings"]:
        lines += ["Nothing wrong was found.", ""]
    for name, table in page["tables"].items():
        lines.append(f"right {name}:")
        lines += [f"  {group:<16} {share:>4.0%}  of {count:,}" for group, share, count in table]
    for title in ("speed", "expected"):
        if page[title]:
            lines += [f"{title}:", *(line for text in page[title] for line in _wrap(text, "  ", "    "))]
    return "\n".join(lines) + "\n"


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def render_html(page: dict[str, Any]) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page.html.jinja").render(**page)
