"""Everything there is to run on a GPU, in one command: tests, decoding, training steps; one page of results.

    make gpu
    make gpu ARGS="--device cpu --tiny"

Each part is a program of its own, so that none leaves memory behind. A part that fails is reported, and the others run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from draftsmith.scripts.benchmarks.scripted.counting import make_config
from draftsmith.scripts.benchmarks.sizes import MODES
from draftsmith.scripts.measuring.environment import ROOT, describe_machine, describe_program
from draftsmith.scripts.shared.model_loading import check_device
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

# A part of a card's name -> its dense bfloat16 operations per second, in 1e12 (data sheets). The first that fits.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "RTX 4090": 165}
TIMEOUT = 600  # seconds of one part
KINDS = ("eagle3", "mtp", "block")  # whose training steps are timed
CHAT = "--target examples/chat-13m --prompts examples/prompts.jsonl --heads examples/heads/eagle3"


@dataclass
class GpuArguments:
    device: str = option(default="cuda", help="Device; cpu only rehearses.")
    tiny: bool = option(default=False, help="Toys in the place of the 1B and 8B shapes: a rehearsal.")
    peak_tflops: float | None = option(
        default=None, help="Dense bfloat16 TFLOP/s of the card, for the MFU; none = of known cards."
    )
    output: str | None = option(
        default=None, help="Write OUTPUT.json and OUTPUT.md; none = docs/benchmarks/gpu (rehearsals: outputs/gpu)."
    )


@dataclass
class Part:
    """A program with its result.

    Attributes:
        words: after `python`. folder: where it may write TITLE.md and TITLE.json. tail: its last lines.
    """

    title: str
    words: list[str]
    folder: Path
    returncode: int = -1
    seconds: float = 0.0
    tail: str = ""

    def run(self) -> None:
        for ending in ("md", "json"):  # of an earlier run
            self._file(ending).unlink(missing_ok=True)
        start = time.perf_counter()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, *self.words], cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=TIMEOUT)
                self.returncode, self.tail = process.returncode, "\n".join(output.strip().splitlines()[-12:])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own workers, too
                self.tail = f"not done after {TIMEOUT} seconds"
        self.seconds = time.perf_counter() - start

    def read(self, ending: str) -> str:
        file = self._file(ending)
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def _file(self, ending: str) -> Path:
        return self.folder / f"{self.title}.{ending}"


def make_parts(args: GpuArguments, folder: Path) -> Iterator[Part]:
    device = torch.device(args.device)
    on_device = ["--device", args.device]
    modes = [mode for mode in MODES if mode == "eager" or (mode in ("compiled", "captured") and not args.tiny)]
    tests = ["-m", "pytest", "tests", "-m", "gpu"]
    if device.type == "cpu":
        tests = ["-m", "pytest", "tests/gpu", "-k", "accepted and cpu and eagle3"]
    yield Part("tests", [*tests, "-q", "-p", "no:cacheprovider"], folder)

    words = ["scripts/benchmark.py", *CHAT.split(), *on_device, "--repeats", "1", "--tree", "dynamic:4,4,16"]
    few = ["--num_prompts", "1", "--max_new_tokens", "8", "--compile", "false"]
    words += few if args.tiny else ["--num_prompts", "10", "--compile"]
    yield Part("chat-13m", [*words, "--json", f"{folder}/chat-13m.json", "--markdown", f"{folder}/chat-13m.md"], folder)

    words = ["scripts/benchmarks/sizes.py", *on_device, "--kinds", "eagle3", "--modes", *modes, "--repeats", "3"]
    words += ["--sizes", *(["tiny"] if args.tiny else ["1B", "8B"]), "--dtypes", "bfloat16", "--steps", "4"]
    words += ["--trees", "dynamic:4,4,16" if args.tiny else "dynamic:5,8,32", "--output", f"{folder}/sizes"]
    yield Part("sizes", words, folder)

    for size in ["tiny"] if args.tiny else ["1B", "8B"]:
        make_config(size).save_pretrained(folder / size)
        words = [
            "scripts/benchmarks/training/speed.py",
            "--target",
            str(folder / size),
            "--kinds",
            *KINDS,
            *on_device,
        ]
        words += ["--lengths", "64" if args.tiny else "2048", "--plain_up_to", "1", "--repeats", "3"]
        yield Part(f"training-{size}", [*words, "--output", f"{folder}/training-{size}"], folder)


def find_utilisation(training: dict[str, Any] | None, args: GpuArguments, card: str) -> dict[str, float]:
    """The MFU of training steps by kind of heads; empty without the card's peak. Operations that are computed again in
    the backward pass count."""
    known = (peak for name, peak in PEAK_TFLOPS.items() if name.lower() in card.lower())
    peak = args.peak_tflops or next(known, None)
    if peak is None or not training:
        return {}
    steps = {cell["kind"]: cell["ours"] for cell in training["cells"]}
    return {kind: step["operations"] / (step["total"] * peak * 1e12) for kind, step in steps.items()}


def report(parts: list[Part], args: GpuArguments) -> tuple[str, dict[str, Any]]:
    """The page, and its numbers."""
    machine = describe_machine(torch.device(args.device))
    name = machine["gpu"] or machine["cpu"]
    results = {part.title: json.loads(part.read("json") or "null") for part in parts[1:]}
    training = {title: found for title, found in results.items() if title.startswith("training")}
    utilisation = {title: find_utilisation(found, args, name) for title, found in training.items()}
    about = (
        "a rehearsal: toys, or no GPU" if args.tiny or not machine["gpu"] else "random weights in the 1B and 8B shapes"
    )
    lines = [
        f"# {name}",
        "",
        f"{describe_program()['command']} ({about})",
        "",
        "| part | result | seconds |",
        "| --- | --- | ---: |",
    ]
    for part in parts:
        result = "passed" if part.returncode == 0 else f"FAILED ({part.returncode})"
        lines.append(f"| {part.title} | {result} | {part.seconds:.0f} |")
    for title, by_kind in utilisation.items():
        lines += ["", f"{title}, MFU: " + ", ".join(f"{kind} {mfu:.1%}" for kind, mfu in by_kind.items())]
    for part in parts:
        shown = part.read("md") if part.returncode == 0 else ""
        lines += ["", f"## {part.title}", "", shown or f"```text\n{part.tail}\n```"]
    environment = {**machine, **describe_program(), **asdict(args)}
    runs = {part.title: {"returncode": part.returncode, "seconds": part.seconds} for part in parts}
    return "\n".join(lines) + "\n", {"environment": environment, "runs": runs, "mfu": utilisation, **results}


def run(args: GpuArguments, folder: Path) -> int:
    """Runs all parts; `folder` gets the files of each.

    Returns:
        how many parts failed.
    """
    check_device(args.device)
    folder.mkdir(parents=True, exist_ok=True)
    is_rehearsal = args.tiny or torch.device(args.device).type == "cpu"
    output = Path(args.output or ("outputs/gpu" if is_rehearsal else "docs/benchmarks/gpu"))
    parts = []
    for part in make_parts(args, folder):
        print(f"{part.title} ...", flush=True)
        part.run()
        print(part.tail if part.returncode else f"  done in {part.seconds:.0f} s", flush=True)
        parts.append(part)
    page, content = report(parts, args)
    write_text(output.with_suffix(".md"), page)
    write_text(output.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    print(f"wrote {output}.md and {output}.json")
    return sum(part.returncode != 0 for part in parts)


def main() -> int:
    with one_line_errors("gpu.py"):
        (args,) = ProgramParser([GpuArguments], doc=__doc__).read()
        return min(1, run(args, ROOT / "outputs" / "gpu-parts"))


if __name__ == "__main__":
    sys.exit(main())
