"""Runs the lossless matrix. A whole run writes the tables in docs/lossless.md.

Exits with 1 if a cell differs or a required place was not reached.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence

import torch
import transformers

from draftsmith.scripts.measuring.environment import describe_machine
from draftsmith.training.whole_files import write_text
from tests.conftest import REPOSITORY
from tests.lossless.matrix import render
from tests.lossless.matrix.cells import (
    Cell,
    bfloat16_cells,
    greedy_cells,
    pair_cells,
    recurrent_cells,
    served_cells,
    trained_cells,
)
from tests.lossless.matrix.results import DIFFERENT, Result, find_gaps, run_cell
from tests.tiny_targets import LEFT_OUT

PARTS = {
    "greedy": greedy_cells,
    "pairs": pair_cells,
    "trained": trained_cells,
    "recurrent": recurrent_cells,
    "bfloat16": bfloat16_cells,
    "served": served_cells,
}
PUBLISHED = ("greedy", "pairs", "trained")  # what a whole run has
PAGE = REPOSITORY / "docs" / "lossless.md"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lossless.matrix", description=__doc__)
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PUBLISHED), help="parts to run (default: %(default)s)"
    )
    parser.add_argument(
        "--match",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="run only cells whose names contain all of these, such as gemma3 'batch 32' dynamic",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cells; decode nothing")
    return parser.parse_args(arguments)


def choose_cells(options: argparse.Namespace) -> list[Cell]:
    cells = [cell for part in options.part for cell in PARTS[part]()]
    return [cell for cell in cells if all(text in cell.name for text in options.match)]


def run_cells(cells: Sequence[Cell]) -> list[Result]:
    started, results = time.perf_counter(), []
    for index, cell in enumerate(cells, start=1):
        result = run_cell(cell)
        results.append(result)
        minutes = (time.perf_counter() - started) / 60
        print(f"{index}/{len(cells)} {minutes:5.1f} min  {result.status}  {result.cell.name}", flush=True)
        for line in (*result.outcome.ties, *([result.reason] if result.reason else [])):
            print(f"    {line}", flush=True)
    return results


def describe_environment() -> dict[str, str]:
    machine = describe_machine(torch.device("cpu"))
    return {
        "torch": machine["torch"],
        "transformers": machine["transformers"],
        "CPU": f"{machine['cpu']}, {machine['threads']} thread",
        "targets that this transformers cannot configure": ", ".join(LEFT_OUT) or "none",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("draftsmith.inference").setLevel(logging.ERROR)  # so is lossy acceptance
    cells = choose_cells(options)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    if not cells:
        print(f"no cell matches {options.match}: see --list", file=sys.stderr)
        return 2
    results = run_cells(cells)
    is_whole = not options.match and set(options.part) == set(PUBLISHED)
    gaps = find_gaps(results, is_whole=is_whole)
    if is_whole:
        part = render.render(results, gaps, describe_environment())
        write_text(PAGE, render.replace_between_markers(PAGE.read_text(encoding="utf-8"), part))
    wrong = [result.cell.name for result in results if result.status == DIFFERENT]
    num_tokens = sum(result.outcome.num_tokens for result in results)
    print(f"{num_tokens:,} tokens in {len(results)} cells; {len(wrong)} cells differ")
    print("\n".join([*wrong, *gaps]))
    return 1 if wrong or gaps else 0


if __name__ == "__main__":
    sys.exit(main())
