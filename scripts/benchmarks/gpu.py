"""Times decoding and training on a GPU: the most valuable parts first, each in bounded time, all in one record.

    make gpu ARGS="--minutes 10"
    python scripts/benchmarks/gpu.py --minutes 4 --parts 8B models        # of a checkout, without an installation
    python scripts/benchmarks/gpu.py --device cpu --tiny --minutes 2      # a rehearsal

It needs torch, transformers, safetensors and tokenizers only. Each part runs in a process of its own, which ends with
its time. Every number is written when it is there, and a later run replaces only the parts that it ran.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from draftsmith.scripts.benchmarks.gpu_parts import PARTS, Setup
from draftsmith.scripts.measuring.environment import ROOT, describe_machine, describe_program
from draftsmith.scripts.shared.clock import TimeLimit
from draftsmith.scripts.shared.model_loading import check_device
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.whole_files import write_text

GRACE = 5.0  # seconds after its limit in which a part may end by itself


def work(name: str, part: dict[str, Any], args: argparse.Namespace, limit: float) -> None:
    """Measures a part in a process of its own. Each line is in the record at once."""
    os.setsid()  # the part's own processes end with it
    os.chdir(ROOT)
    setup, start = Setup(torch.device(args.device), args.tiny, TimeLimit(limit)), time.monotonic()
    for label, measure in PARTS[name][1](setup):
        if setup.limit.is_over:
            break
        try:
            line = measure()
        except (RuntimeError, ValueError) as error:
            line = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        part["seconds"] = round(time.monotonic() - start, 1)
        part["lines"][label] = {key: shorten(value) for key, value in line.items()}
        print(f"  [{part['seconds']:5.0f} s] {label}: {describe(part['lines'][label])}", flush=True)
        save(args.output, name, part)
    save(args.output, name, part | {"state": "cut off" if setup.limit.is_over else "done"})


def make_context() -> Any:
    """Starts processes from one that has imported everything, once."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of that process, and of pytest
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Setup.__module__])
    return context


def run_part(name: str, about: dict[str, Any], args: argparse.Namespace, limit: TimeLimit) -> dict[str, Any]:
    """Runs a part until it is done or its time is over.

    Args:
        about: what the record says of the machine and the program.
    """
    part: dict[str, Any] = {**about, "state": "running", "seconds": 0.0, "lines": {}}
    save(args.output, name, part)
    process = make_context().Process(target=work, args=(name, part, args, limit.left))
    process.start()
    try:
        process.join(limit.left + GRACE)
        ended_as = "cut off" if process.is_alive() else "failed"  # unless it says itself; an error is on the terminal
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # processes of its own
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    part = read(args.output)[name]
    if part["state"] == "running":
        part["state"] = ended_as
        save(args.output, name, part)
    return part


def read(file: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8")) if Path(file).is_file() else {}
    return record


def save(file: str, name: str, part: dict[str, Any]) -> None:
    """Puts a part into the record, and writes its page."""
    record = read(file) | {name: part}
    ordered = {one: record[one] for one in PARTS if one in record}
    write_text(Path(file), json.dumps(ordered, indent=0, allow_nan=False) + "\n")
    write_text(Path(file).with_suffix(".md"), render(ordered))


def shorten(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def describe(line: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in line.items())


def render(record: dict[str, Any]) -> str:
    """The page of a record."""
    page = []
    for name, part in record.items():
        about = f"{part['card']}, torch {part['torch']}, commit {part['commit']}, {part['date']}"
        page += [f"## {name}", "", f"{about}: {part['state']} after {part['seconds']:.0f} s.", ""]
        page += [
            "| | |",
            "| --- | --- |",
            *(f"| {label} | {describe(one)} |" for label, one in part["lines"].items()),
            "",
        ]
    return "\n".join(["# Measured on GPUs", "", *page])


def run(args: argparse.Namespace) -> int:
    """Runs the parts in their order.

    Returns:
        how many parts failed.
    """
    check_device(args.device)
    machine, limit = describe_machine(torch.device(args.device)), TimeLimit(60 * args.minutes)
    about = {"card": machine["gpu"] or f"a rehearsal: {machine['cpu']}", "torch": machine["torch"]}
    about |= {"transformers": machine["transformers"], "commit": describe_program()["commit"]}
    about["date"] = time.strftime("%Y-%m-%d")
    first = make_context().Process(target=os.getpid)  # the imports are no part's time
    first.start()
    first.join()
    num_failed = 0
    for name in PARTS:
        if name not in args.parts or limit.is_over:
            continue
        print(f"{name} ...", flush=True)
        part = run_part(name, about, args, limit.part(PARTS[name][0]))
        print(f"  {part['state']} after {part['seconds']:.0f} s", flush=True)
        num_failed += part["state"] not in ("done", "cut off")
    print(f"wrote {args.output} and {Path(args.output).with_suffix('.md')}")
    return num_failed


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="The time for all parts together (default: 10).")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="Only these parts.")
    parser.add_argument("--device", default="cuda", help="Device; cpu only rehearses.")
    parser.add_argument("--tiny", action="store_true", help="Toys in the place of the shapes: a rehearsal.")
    parser.add_argument(
        "--output", help="The record, a JSON file; default: docs/benchmarks/gpu.json, of rehearsals outputs/gpu.json."
    )
    args = parser.parse_args()
    is_rehearsal = args.tiny or torch.device(args.device).type == "cpu"
    default = ROOT / ("outputs/gpu.json" if is_rehearsal else "docs/benchmarks/gpu.json")
    args.output = str(Path(args.output or default).resolve())
    return args


def main() -> int:
    with one_line_errors("gpu.py"):
        return min(1, run(read_arguments()))


if __name__ == "__main__":
    sys.exit(main())
