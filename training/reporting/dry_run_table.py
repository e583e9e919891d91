"""What `--dry_run` shows in the terminal: tables where rich is installed, plain lines otherwise."""

from __future__ import annotations

import importlib.util
import sys

from training.reporting.dry_run import DryRun

_SIZES = ("memory of a process", "disk")


def show(found: DryRun) -> None:
    """Writes to the standard output."""
    rows = [
        (section, name, _readable(section, name, value))
        for section, figures in found.figures.items()
        for name, value in figures.items()
    ]
    verdict = f"{len(found.problems)} problems" if found.problems else "no problem found: start without --dry_run"
    if importlib.util.find_spec("rich") is None:
        lines = [f"{section}: {name}: {value}" for section, name, value in rows]
        lines += [f"ok: {line}" for line in found.passed] + [f"warning: {line}" for line in found.warnings]
        sys.stdout.write("\n".join([*lines, *(f"PROBLEM: {line}" for line in found.problems), verdict]) + "\n")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    last = ""
    for section, name, value in rows:
        if section != last and last:
            table.add_section()
        table.add_row("" if section == last else section, name, value)
        last = section
    console = Console()
    if rows:
        console.print(table)
    for style, title, lines in (
        ("green", "ok", found.passed),
        ("yellow", "warning", found.warnings),
        ("bold red", "PROBLEM", found.problems),
    ):
        for line in lines:
            console.print(f"[{style}]{title}[/]: {escape(line)}", highlight=False)
    console.print(f"[{'bold red' if found.problems else 'bold green'}]{verdict}[/]")


def _readable(section: str, name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if section in _SIZES and name != "checkpoints at once":
        return f"{value / 2**20:,.1f} MiB" if value < 2**30 else f"{value / 2**30:,.2f} GiB"
    if section == "time":
        return (
            f"{value:,.3g} s" if value < 120 else f"{value / 60:,.1f} min" if value < 7200 else f"{value / 3600:,.1f} h"
        )
    return f"{value:,}"
