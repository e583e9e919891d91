"""Measures pipelined decoding (SPEED) beside plain decoding of the same model, prompt by prompt in turns.

    python scripts/benchmarks/pipelined.py --target outputs/tied --prompts examples/prompts.jsonl
    python scripts/benchmarks/pipelined.py --shape 0.4B --group_size 8 --dtype bfloat16

With --target: a model that was trained with tied layers (examples/chat-13m/train.py --tied_group_size). Texts are
compared. With --shape: random tied weights in a published shape, whose first group is always right; lower shares of
right predictions are computed from the time of a pass, and marked as such.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.inference import Decoder, PipelinedDecoder, Target
from draftsmith.inference.targets.layer_groups import tie_layers
from draftsmith.scripts.benchmarks.scripted.counting import SHAPES, make_counting_target
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.measure import load_prompts
from draftsmith.scripts.shared.clock import read_clock
from draftsmith.scripts.shared.model_loading import DTYPES, check_device, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

RIGHT = (0.5, 0.6, 0.7, 0.8, 0.9)  # shares of right predictions whose speed is computed
CONTEXT = 64  # tokens of a prompt for a shape


@dataclass
class PipelinedArguments:
    target: str | None = option(default=None, help="A model with tied layers: a folder or a hub id.")
    prompts: str = option(default="examples/prompts.jsonl", help="Prompts, for --target.")
    num_prompts: int = option(default=20, help="How many of the prompts.")
    shape: str | None = option(default=None, help=f"Random weights: {', '.join(SHAPES)}.")
    group_size: int = option(default=8, help="Layers of a group, for --shape.")
    temperatures: list[float] = option(default_factory=lambda: [0.0, 1.0], help="0 = greedy.")
    max_new_tokens: int = option(default=64, help="Tokens of a text.")
    dtype: str = option(default="auto", help=f"{', '.join(DTYPES)}; for a shape, auto is bfloat16.")
    compile: bool = option(default=False, help="Plain decoding compiled, too.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    output: str = option(default="outputs/pipelined.json", help="JSON file.")

    def __post_init__(self) -> None:
        if (self.target is None) == (self.shape is None):
            raise ValueError("give --target or --shape, one of them")
        if self.shape is not None and self.shape not in SHAPES:
            raise ValueError(f"got --shape {self.shape}; allowed are {', '.join(SHAPES)}")
        if min(self.num_prompts, self.max_new_tokens - 1, self.group_size) < 1:
            raise ValueError("give at least 1 for every number, and 2 for --max_new_tokens")


def load(args: PipelinedArguments) -> tuple[Target, list[torch.Tensor]]:
    """The target and its prompts."""
    if args.target is not None:
        target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
        limits = {"num_prompts": args.num_prompts, "max_new_tokens": args.max_new_tokens}
        found, _ = load_prompts(Path(args.prompts), tokenizer, target, **limits)
        return target, [prompt.input_ids for prompt in found]
    device = torch.device(check_device(args.device))
    dtype = torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype)
    assert args.shape is not None
    model = make_counting_target(args.shape, dtype, device).model
    tie_layers(model, args.group_size)
    prompts = [torch.arange(place, place + CONTEXT, device=device)[None] for place in range(args.num_prompts)]
    return Target(model), prompts


def measure(args: PipelinedArguments) -> dict[str, Any]:
    """Texts, passes and seconds of every contender at every temperature."""
    target, prompts = load(args)
    pipelined = PipelinedDecoder(target)
    contenders: dict[str, Any] = {"plain": Decoder(target), "pipelined": pipelined}
    if args.compile:
        contenders["plain, compiled"] = Decoder(target, compile=True)
    rows = []
    for temperature in args.temperatures:
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        options |= {"max_new_tokens": args.max_new_tokens, "seed": 0}
        for decoder in contenders.values():  # the first call compiles and allocates
            decoder.generate(prompts[0], **options)
        texts: dict[str, list[Any]] = {name: [] for name in contenders}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        stats = []
        for prompt in prompts:
            for name, decoder in contenders.items():
                started = read_clock(target.device)
                output = decoder.generate(prompt, **options)
                taken = read_clock(target.device) - started
                texts[name].append(output.sequences.tolist())
                seconds[name].append(taken / (output.sequences.shape[1] - prompt.shape[1]))
                if name == "pipelined":
                    stats.append(output.stats)
        confirmed, refuted = (sum(getattr(one, name) for one in stats) for name in ("num_confirmed", "num_refuted"))
        later = [(one.num_passes - one.num_prompt_passes, one.num_new_tokens - 1) for one in stats]
        rows.append(
            {
                "temperature": temperature,
                "seconds_per_token": seconds,
                "equal_texts": sum(a == b for a, b in zip(texts["plain"], texts["pipelined"], strict=True)),
                "num_texts": len(prompts),
                "right": confirmed / max(1, confirmed + refuted),
                "passes_per_token": sum(passes for passes, _ in later) / max(1, sum(tokens for _, tokens in later)),
                "depth_in_flight": median(one.depth_in_flight for one in stats),
            }
        )
    groups = pipelined.groups
    sizes = {"num_groups": groups.num_groups, "group_size": groups.group_size}
    return {**describe_program(), "machine": describe_machine(target.device), **sizes, "runs": rows}


def show(found: dict[str, Any], console: Console, *, is_shape: bool) -> None:
    num_groups = found["num_groups"]
    table = Table(title=f"{num_groups} groups of {found['group_size']} layers with the same weights")
    for name in ("T", "right", "passes / token", "groups at work", "equal texts", "x plain", "ms / token plain"):
        table.add_column(name)
    for run in found["runs"]:
        plain = {name: taken for name, taken in run["seconds_per_token"].items() if name != "pipelined"}
        fastest = min(plain, key=lambda name: median(plain[name]))
        ratios = [a / b for a, b in zip(plain[fastest], run["seconds_per_token"]["pipelined"], strict=True)]
        cells = [f"{run['temperature']:g}", f"{run['right']:.2f}", f"{run['passes_per_token']:.2f}"]
        cells += [f"{run['depth_in_flight']:.1f}", f"{run['equal_texts']} of {run['num_texts']}"]
        table.add_row(*cells, f"{median(ratios):.2f}", f"{1000 * median(plain[fastest]):.1f} ({fastest})")
        if is_shape:
            for right in RIGHT:
                passes = 1 + (1 - right) * (num_groups - 1)
                speed = median(ratios) * run["passes_per_token"] / passes
                table.add_row("", f"{right:.1f}", f"{passes:.2f}", "", "computed", f"{speed:.2f}", "")
    console.print(table)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("pipelined.py"):
        (args,) = ProgramParser([PipelinedArguments], doc=__doc__).parse_args_into_dataclasses(argv)
        found = measure(args)
        write_text(Path(args.output), json.dumps(found, indent=1) + "\n")
        show(found, Console(), is_shape=args.shape is not None)


if __name__ == "__main__":
    main()
