"""Distributed speculative inference: a simulation of events, real runs that check it, and what it predicts.

    python scripts/benchmarks/dsi.py --sweep --json outputs/dsi-sweep.json
    torchrun --nproc_per_node 3 scripts/benchmarks/dsi.py --emulate --json outputs/dsi-emulated.json
    torchrun --nproc_per_node 3 scripts/benchmarks/dsi.py --target examples/chat-13m --heads examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl --json outputs/dsi-chat.json
    torchrun --nproc_per_node 2 scripts/benchmarks/dsi.py --shape 0.4B --acceptances 0.6 0.8 0.9 --num_tokens 48 \\
        --json outputs/dsi-0.4B.json
    python scripts/benchmarks/dsi.py --draw outputs/dsi-chat.json outputs/dsi-sweep.json --picture docs/images/dsi.png

The simulation runs the real protocol (`draftsmith.inference.distributed`) with a clock of its own: drafts,
verifications and messages take given times, which vary as measured, and a draft is right with a given chance.
`--emulate` runs the same with real processes and real messages, where drafts and verifications sleep. With `--target`
everything is real. With `--shape` target and EAGLE-3 heads have random weights in a published shape and do all their
work; then drafts are right with a given chance.

Baselines: plain decoding, and speculation that waits for each verification (in one process), with its best number of
drafts; of real models also with as many threads as there are processes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from draftsmith.inference import serve_target
from draftsmith.inference.distributed.gloo_link import GlooLink, serve
from draftsmith.scripts.benchmarks.scripted.counting import (
    SHAPES,
    ScriptedChances,
    make_counting_target,
    make_random_heads,
)
from draftsmith.scripts.benchmarks.servers.picture import draw, read_timeline
from draftsmith.scripts.benchmarks.servers.runs import EMULATED, EmulatedServer, emulate, run_models
from draftsmith.scripts.benchmarks.servers.simulation import Costs, sweep
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.measure import load_prompts
from draftsmith.scripts.shared.model_loading import DTYPES, load_drafter, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

LENGTHS = (2, 4, 8)  # of chains that wait for their verification
CONTEXT = 64  # tokens of a prompt for --shape


@dataclass
class DsiArguments:
    sweep: bool = option(default=False, help="Simulate over costs, acceptances and numbers of GPUs.")
    emulate: bool = option(default=False, help="Under torchrun: real messages, and passes that sleep.")
    target: str | None = option(default=None, help="Under torchrun: a real target, a folder or hub id.")
    shape: str | None = option(default=None, help=f"Under torchrun: random weights in a shape: {', '.join(SHAPES)}.")
    dtype: str = option(default="bfloat16", help="Dtype of --shape.", metadata={"choices": list(DTYPES[1:])})
    heads: str | None = option(default=None, help="Heads that draft for --target; none = n-grams.")
    prompts: str = option(default="examples/prompts.jsonl", help="Prompts for --target.")
    num_prompts: int = option(default=4, help="Use the first N prompts; of --shape, so many texts.")
    num_tokens: int = option(default=100, help="Tokens of each text (of the sweep: ten times as many).")
    verify_ms: float = option(default=100.0, help="Of --emulate: milliseconds of a pass of the target.")
    draft_ms: list[float] = option(default_factory=lambda: [10.0, 25.0], help="Of --emulate: milliseconds of a draft.")
    acceptances: list[float] = option(
        default_factory=lambda: [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95], help="Chances that a draft is right."
    )
    ratios: list[float] = option(
        default_factory=lambda: [0.02, 0.05, 0.1, 0.2, 0.4],
        help="Of --sweep: the time of a draft over the time of a pass of the target.",
    )
    draw: list[str] = option(default_factory=list, help="Draw the JSON of a run of --target and of a --sweep.")
    picture: str = option(default="outputs/dsi.png", help="The file that --draw writes.")
    shown_ms: float = option(default=120.0, help="Milliseconds of the timeline that --draw shows.")
    json: str = option(default="outputs/dsi.json", help="The file that the other modes write.")

    def __post_init__(self) -> None:
        modes = [self.sweep, self.emulate, self.target is not None, self.shape is not None, bool(self.draw)]
        if sum(modes) != 1:
            raise ValueError("give one of --sweep, --emulate, --target, --shape and --draw")
        if self.shape is not None and self.shape not in SHAPES:
            raise ValueError(f"got --shape {self.shape}; allowed are {', '.join(SHAPES)}")
        if self.draw and len(self.draw) != 2:
            raise ValueError(f"got --draw with {len(self.draw)} files: give the JSON of a run and of a sweep")


def run_emulation(args: DsiArguments, rank: int) -> list[dict[str, Any]]:
    """Rank 0 gives the rows."""
    costs = Costs(draft=0.0, verify=args.verify_ms / 1e3)
    if rank:
        serve(EmulatedServer(costs), EMULATED)
        return []
    link = GlooLink(EMULATED, timeout=120.0)
    rows = []
    for milliseconds in args.draft_ms:
        costs = Costs(milliseconds / 1e3, args.verify_ms / 1e3)
        rows += emulate(link, costs, args.acceptances, (None, 4), args.num_tokens)
    link.close()
    return rows


def run_target(args: DsiArguments, rank: int) -> list[dict[str, Any]]:
    """Rank 0 gives the result."""
    assert args.target is not None
    target, tokenizer = load_target(args.target, dtype="float32")
    if rank:
        serve_target(target)
        return []
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.num_tokens
    )
    drafter = load_drafter(target, tokenizer, heads=args.heads, ngrams=args.heads is None)
    assert drafter is not None
    return run_models(target, drafter, [one.input_ids for one in prompts], args.num_tokens, LENGTHS)


def run_shape(args: DsiArguments, rank: int) -> list[dict[str, Any]]:
    """Rank 0 gives a result for each acceptance."""
    assert args.shape is not None
    target = make_counting_target(args.shape, getattr(torch, args.dtype), torch.device("cpu"))
    if rank:
        serve_target(target)
        return []
    heads = make_random_heads("eagle3", target).for_target(target)
    drafter = ScriptedChances(heads, target.vocab_size)
    prompts = [torch.arange(place, place + CONTEXT)[None] for place in range(args.num_prompts)]
    return run_models(target, drafter, prompts, args.num_tokens, LENGTHS, args.acceptances)


def run(args: DsiArguments) -> None:
    if args.draw:
        (results, *_), rows = (json.loads(Path(file).read_text())["results"] for file in args.draw)
        real = results["tokens_per_second"]
        title = f"A real run: {real['distributed']:.0f} tokens/s. The numbers are positions in the text."
        timeline = read_timeline(results["timeline"])
        draw(Path(args.picture), timeline, rows, title=title, seconds=args.shown_ms / 1e3)
        print(f"Wrote {args.picture}.")
        return
    rank = int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    results: list[dict[str, Any]]
    if args.sweep:
        results = sweep(
            args.ratios, args.acceptances, (1, 3, 7), message=0.005, spread=0.05, num_tokens=10 * args.num_tokens
        )
    elif args.emulate:
        results = run_emulation(args, rank)
    else:
        results = run_target(args, rank) if args.shape is None else run_shape(args, rank)
    if rank == 0:
        about = {**describe_machine(torch.device("cpu")), **describe_program()}
        write_text(Path(args.json), json.dumps({"environment": about, "results": results}, indent=1) + "\n")
        print(f"Wrote {args.json}.")


def main() -> None:
    with one_line_errors("dsi.py"):
        (args,) = ProgramParser([DsiArguments], doc=__doc__).read()
        run(args)


if __name__ == "__main__":
    main()
