"""What a change made of the speed: one benchmark at several commits, in turns, on the machine as it is.

    python scripts/compare_commits.py 1a2b3c4 5d6e7f8 --repeats 3 -- --target examples/chat-13m --threads 1 --compile \\
        --heads examples/heads/eagle3 --prompts examples/prompts.jsonl --dtype bfloat16 --tree dynamic:4,4,16

What stands behind `--` goes to each commit's own scripts/benchmark.py; heads, targets and prompts that paths name are
those of the working tree, so that only the code differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATH_OPTIONS = ("--target", "--heads", "--prompts", "--assistant")  # written in full: benchmark.py takes beginnings too
OWN_OPTIONS = ("--json", "--plot", "--markdown")
PHASES = ("draft", "verify", "accept", "commit")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, benchmark = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs="+", help="Two or more commits, oldest first.")
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each commit, in turns.")
    parser.add_argument("--markdown", help="A file for the table; it is printed in any case.")
    args = parser.parse_args(own)
    if len(args.commits) < 2 or args.repeats < 1 or not benchmark:
        parser.error("give two commits or more, --repeats of 1 or more, and behind -- the options of benchmark.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worktree is left behind
    try:
        table = compare(args.commits, absolute_paths(benchmark), args.repeats)
    except subprocess.CalledProcessError as error:
        sys.exit(f"compare_commits.py: {error} {(error.stderr or b'').decode(errors='replace').strip()}")
    except ValueError as error:
        sys.exit(f"compare_commits.py: {error}")
    print(table)
    if args.markdown is not None:
        path = Path(args.markdown)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"```bash\npython scripts/compare_commits.py {shlex.join(arguments)}\n```\n\n{table}\n", encoding="utf-8"
        )
    return 0


def absolute_paths(options: Sequence[str]) -> list[str]:
    """Values of options that name files, from here: the commits run elsewhere.

    >>> absolute_paths(["--dtype", "float32", "--tree", "auto"])
    ['--dtype', 'float32', '--tree', 'auto']
    """
    values: list[str] = []
    option = ""
    for value in options:
        option = value if value.startswith("--") else option
        if "=" in option or option in OWN_OPTIONS:
            raise ValueError(f"got {option!r} behind --: write options and values apart, and leave files to write out")
        if option in PATH_OPTIONS and value != option:
            value = next((str(path.resolve()) for path in (Path(value), ROOT / value) if path.exists()), value)
        values.append(value)
    return values


def compare(commits: Sequence[str], options: Sequence[str], repeats: int) -> str:
    """A Markdown table: a line for each decoding and commit, medians over the runs."""
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trees = {commit: Path(folder) / f"tree-{number}" for number, commit in enumerate(commits)}
        try:
            for commit, tree in trees.items():
                _git("worktree", "add", "--detach", str(tree), commit)
            for _ in range(repeats):
                for commit, tree in trees.items():
                    for row in run_benchmark(tree, options):
                        measured.setdefault((f"{row['name']} {row['tree']}".strip(), commit), []).append(row)
        finally:
            for tree in trees.values():
                if tree.exists():
                    subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=False)
    lines = [
        f"| decoding | commit | tokens/s (min–max) | tokens a step | {' | '.join(f'{phase} ms' for phase in PHASES)} |",
        f"| --- | --- | ---: | ---: |{' ---: |' * len(PHASES)}",
    ]
    for name in dict.fromkeys(name for name, _ in measured):
        lines += [_line(name, commit, measured[name, commit]) for commit in commits if (name, commit) in measured]
    return "\n".join(lines)


def run_benchmark(tree: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one run of a commit's benchmark.py."""
    report = tree / "compared.json"
    subprocess.run(
        [sys.executable, "scripts/benchmark.py", *options, "--json", str(report)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "DRAFTSMITH_CACHE": str(tree / "costs")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    content = json.loads(report.read_text(encoding="utf-8"))
    reports = content.get("reports", [content])
    if len(reports) > 1:
        raise ValueError("several reports: give benchmark.py one target, one file of prompts and one temperature")
    rows: list[dict[str, Any]] = reports[0]["rows"]
    return [row for row in rows if not row.get("problem")]


def _line(name: str, commit: str, rows: Sequence[dict[str, Any]]) -> str:
    speeds = [row["tokens_per_second"] for row in rows]
    parts = [_median([(row.get("step_milliseconds") or {}).get(phase) for row in rows]) for phase in PHASES]
    cells = [
        name,
        commit,
        f"{statistics.median(speeds):.0f} ({min(speeds):.0f}–{max(speeds):.0f})",
        f"{statistics.median(row['acceptance_length'] for row in rows):.2f}",
        *parts,
    ]
    return f"| {' | '.join(cells)} |"


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "–"


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
