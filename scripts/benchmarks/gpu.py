"""Times decoding and training on a GPU: the most valuable parts first, each in bounded time, all in one record.

    make gpu ARGS="--minutes 10"
    python scripts/benchmarks/gpu.py --minutes 4 --parts 8B models        # of a checkout, without an installation
    python scripts/benchmarks/gpu.py --device cpu --tiny --minutes 2      # a rehearsal

It needs torch, transformers, safetensors and tokenizers only. Each part runs in a process of its own, which ends with
its time. Every number is written when it is there, and a later run replaces only the parts that it ran. The status is 0
if every part that ran is done.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from draftsmith.scripts.benchmarks.gpu_parts import PARTS, Measure, Setup
from draftsmith.scripts.measuring.environment import ROOT, describe_machine, describe_program
from draftsmith.scripts.shared.clock import TimeLimit
from draftsmith.scripts.shared.model_loading import check_device
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.whole_files import write_text

GRACE = 5.0  # seconds after its limit in which a part may end by itself


@dataclass
class Result:
    """Of a part. state: "done", "cut off" or "failed: " and the reason. lines: name of a measurement -> its numbers,
    or why it "failed"."""

    state: str = "running"
    seconds: float = 0.0
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)


def work(part: Measure, device: str, is_tiny: bool, seconds: float, sender: Connection) -> None:
    """Measures a part in a process of its own, and sends each line."""
    os.setsid()  # the part's own processes end with it
    os.chdir(ROOT)
    setup = Setup(torch.device(device), is_tiny, TimeLimit(seconds))
    try:
        for label, measure in part(setup):
            if setup.limit.is_over:
                break
            try:
                line = measure()
            except (RuntimeError, ValueError) as error:
                line = {"failed": explain(error)}
            sender.send((label, line))
    except BaseException as error:
        sender.send(f"failed: {explain(error)}")
        raise
    sender.send("cut off" if setup.limit.is_over else "done")


def explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def make_context() -> Any:
    """Starts processes from one that has imported everything, once."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of that process, and of pytest
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Setup.__module__])
    return context


def run_part(part: Measure, args: argparse.Namespace, limit: TimeLimit, save: Callable[[Result], None]) -> Result:
    """Runs a part until it is done or its time is over; `save` gets the result after each line."""
    start, result = time.monotonic(), Result()
    context = make_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(part, args.device, args.tiny, limit.left, sender))
    process.start()
    sender.close()
    deadline = TimeLimit(limit.left + GRACE)
    try:
        while result.state == "running":
            try:
                found = receiver.recv() if receiver.poll(deadline.left) else "cut off"
            except EOFError:
                process.join(GRACE)
                found = f"failed: its process ended with status {process.exitcode}"
            result.seconds = round(time.monotonic() - start, 1)
            if isinstance(found, str):
                failed = [f"{label}: {line['failed']}" for label, line in result.lines.items() if "failed" in line]
                result.state = f"failed: {'; '.join(failed)}" if failed else shorten(found)
            else:
                label, line = found
                result.lines[label] = {key: shorten(value) for key, value in line.items()}
                print(f"  [{result.seconds:5.0f} s] {label}: {describe(result.lines[label])}", flush=True)
            save(result)
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # processes of its own
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return result


def shorten(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())  # cells of the page are one line
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
        how many parts have failed; one that is cut off has not.
    """
    check_device(args.device)
    machine, limit = describe_machine(torch.device(args.device)), TimeLimit(60 * args.minutes)
    about = {"card": machine["gpu"] or f"a rehearsal: {machine['cpu']}", "torch": machine["torch"]}
    about |= {"transformers": machine["transformers"], "commit": describe_program()["commit"]}
    file = Path(args.output)
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def save(name: str, result: Result) -> None:
        record[name] = {**about, "date": time.strftime("%Y-%m-%d"), **vars(result)}
        ordered = {one: record[one] for one in PARTS if one in record}
        write_text(file, json.dumps(ordered, indent=0, allow_nan=False) + "\n")
        write_text(file.with_suffix(".md"), render(ordered))

    first = make_context().Process(target=os.getpid)  # the imports are no part's time
    first.start()
    first.join()
    unfinished = {}
    for name in PARTS:
        if name not in args.parts or limit.is_over:
            continue
        print(f"{name} ...", flush=True)
        seconds, part = PARTS[name]
        result = run_part(part, args, limit.part(seconds), partial(save, name))
        print(f"  {result.state} after {result.seconds:.0f} s", flush=True)
        if result.state != "done":
            unfinished[name] = result.state
    print(f"wrote {file} and {file.with_suffix('.md')}")
    for name, state in unfinished.items():
        print(f"not done: {name} ({state})")
    return sum(state != "cut off" for state in unfinished.values())


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
    args.output = args.output or str(ROOT / ("outputs/gpu.json" if is_rehearsal else "docs/benchmarks/gpu.json"))
    return args


def main() -> int:
    with one_line_errors("gpu.py"):
        return min(1, run(read_arguments()))


if __name__ == "__main__":
    sys.exit(main())
