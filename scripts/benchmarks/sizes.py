"""Measures at which sizes of the target heads are worth it, with the heads' true cost and a SIMULATED acceptance.

    python scripts/benchmarks/sizes.py --sizes 0.1B 0.4B 1B --output outputs/sizes
    python scripts/benchmarks/sizes.py --sizes 1B --kinds eagle3 --trees dynamic:4,4,16 --modes eager

Target and heads have random weights in the shapes of published models. All their work is done; then each step's tree is
replaced by a tree of as many nodes, of which the target accepts as many as --acceptance_lengths says. Contenders take
turns in one process for each size and kind.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console
from transformers import StoppingCriteria, StoppingCriteriaList

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference import Target
from draftsmith.inference.runners.compiled import count_graphs
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.benchmarks.scripted.counting import (
    SHAPES,
    ScriptedTree,
    make_counting_target,
    make_random_heads,
)
from draftsmith.scripts.benchmarks.scripted.llama_cpp import measure_llama_cpp
from draftsmith.scripts.benchmarks.scripted.summary import SIMULATED, compare, draw_sizes, make_grids
from draftsmith.scripts.measuring.contenders import OurDecoding, TransformersDecoding, compiled_options
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.measure import Batch, Prompt, Run, Settings
from draftsmith.scripts.shared.clock import read_clock
from draftsmith.scripts.shared.model_loading import check_device, fit_tree
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

# How steps run -> options of OurDecoding.
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"is_compiled": True},
    "captured": {"graphs": True},
    "packed": {},
}
TREES = ["dynamic:3,2,4", "dynamic:4,3,8", "dynamic:4,4,16", "dynamic:5,6,32"]


@dataclass
class SizesArguments:
    sizes: list[str] = option(default_factory=lambda: ["0.1B", "0.4B", "1B"], help=f"Sizes: {', '.join(SHAPES)}.")
    kinds: list[str] = option(
        default_factory=lambda: ["eagle3", "medusa", "mtp"], help=f"Kinds of heads: {', '.join(sorted(HEAD_TYPES))}."
    )
    trees: list[str] = option(default_factory=lambda: list(TREES), help="Trees, cut for each kind.")
    acceptance_lengths: list[int] = option(
        default_factory=lambda: [2, 3, 4, 5], help="Simulated tokens per step, the target's own included."
    )
    dtypes: list[str] = option(default_factory=lambda: ["float32", "bfloat16"], help="Dtypes.")
    modes: list[str] = option(default_factory=lambda: ["eager", "compiled"], help=f"How steps run: {', '.join(MODES)}.")
    context: int = option(default=128, help="Tokens of the prompt.")
    steps: int = option(default=8, help="Steps of each text.")
    repeats: int = option(default=5, help="Texts of each contender and acceptance length.")
    threads: int = option(default=1, help="CPU threads.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    llama_bench: str | None = option(default=None, help="llama.cpp's program llama-bench: one more rival.")
    output: str = option(default="outputs/sizes", help="Write OUTPUT.json, OUTPUT.md and OUTPUT.png.")

    def __post_init__(self) -> None:
        allowed = {"sizes": SHAPES, "kinds": HEAD_TYPES, "modes": MODES, "dtypes": ("float32", "bfloat16", "float16")}
        for name, known in allowed.items():
            if not getattr(self, name) or set(getattr(self, name)) - set(known):
                raise ValueError(f"got --{name} {' '.join(getattr(self, name))}; allowed are {', '.join(known)}")
        for tree in self.trees:
            resolve_policy(tree, None)
        numbers = [*self.acceptance_lengths, self.context, self.repeats, self.threads, self.steps - 1]
        if min(numbers) < 1:
            raise ValueError("give at least 1 for every number, and 2 for --steps")


@dataclass
class Sample:
    """One text. seconds: of a step; parts: seconds of a step's draft (the drafter's own forwards) and verify."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Contender:
    """One way to decode.

    Attributes:
        name: a kind of heads, "plain" or "generate".
        script: None without a drafter.
        samples: of each simulated acceptance length; 1 without a drafter.
    """

    name: str
    dtype: str
    mode: str
    tree: str
    decode: Callable[..., Sample]
    script: ScriptedTree | None = None
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        samples = {length: [asdict(one) for one in some] for length, some in self.samples.items()}
        return {**{part: getattr(self, part) for part in ("name", "dtype", "mode", "tree")}, "samples": samples}

    def lengths(self, asked: Sequence[int]) -> list[int]:
        """The acceptance lengths that its tree can have."""
        return [1] if self.script is None else [one for one in asked if one - 1 <= self.script.most_right]


class StampTokens(StoppingCriteria):
    """Notes when transformers' `generate` has each token; it never stops."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(read_clock(self.device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def time_generate(decoding: TransformersDecoding, stamps: StampTokens, prompt: Batch, tokens: int, *_: Any) -> Sample:
    stamps.times.clear()
    check_text(decoding(prompt, Settings(), max_new_tokens=1 + tokens), prompt, decoding.target)
    return Sample((stamps.times[-1] - stamps.times[0]) / tokens)


def time_ours(decoding: OurDecoding, prompt: Batch, tokens: int, length: int) -> Sample:
    """Without the prompt's pass. On an accelerator the parts come from another text, which waits after each phase."""

    def run(**options: Any) -> Run:
        done = decoding(prompt, Settings(), max_new_tokens=1 + tokens, **options)
        check_text(done, prompt, decoding.decoder.target)
        if done.stats.acceptance_length != length:
            raise RuntimeError(f"the acceptance length is {done.stats.acceptance_length} instead of {length}")
        return done

    done = run()
    steps, spent = done.stats.num_verify_steps, done.stats.seconds
    seconds = (spent["total"] - spent["prefill"] - spent["profile"]) / steps
    if prompt.input_ids.device.type != "cpu":
        done = run(is_synchronised=True)
    parts = {"draft": done.draft_forward_seconds, "verify": done.stats.seconds["verify"]}
    return Sample(seconds, {name: value / steps for name, value in parts.items()})


def check_text(run: Run, prompt: Batch, target: Target) -> None:
    """The text must count on: otherwise the numbers are of another computation."""
    first = prompt.input_ids.shape[1]
    if run.texts[0] != [(first + place) % target.vocab_size for place in range(len(run.texts[0]))]:
        raise RuntimeError(f"the target of random weights does not count: {run.texts[0]}")


def make_rivals(target: Target, packed: Target | None, prompt: Batch, args: SizesArguments) -> list[Contender]:
    """Plain decoding in every mode, and transformers' `generate`."""
    dtype = str(target.dtype).removeprefix("torch.")
    found = []
    for mode in args.modes:
        ours = OurDecoding(packed if packed and mode == "packed" else target, None, **MODES[mode])
        found.append(Contender("plain", dtype, mode, "", partial(time_ours, ours, prompt)))
    for mode, options in {"eager": {}, "compiled": compiled_options()}.items():
        if mode in args.modes:
            stamps = StampTokens(target.device)
            theirs = TransformersDecoding(target, stopping_criteria=StoppingCriteriaList([stamps]), **options)
            found.append(Contender("generate", dtype, mode, "", partial(time_generate, theirs, stamps, prompt)))
    return found


def make_contenders(
    kind: str, target: Target, packed: Target | None, prompt: Batch, args: SizesArguments
) -> Iterator[Contender]:
    """Heads of one kind with each tree in each mode."""
    heads = make_random_heads(kind, target)
    packed_heads = heads.for_target(packed) if packed else heads
    for tree, mode in product(dict.fromkeys(fit_tree(tree, heads.max_depth) for tree in args.trees), args.modes):
        script = ScriptedTree(resolve_policy(tree, heads.max_depth), target.vocab_size, target.device)
        subject = (packed, packed_heads) if packed and mode == "packed" else (target, heads)
        ours = OurDecoding(*subject, tree=script, **MODES[mode])
        dtype = str(target.dtype).removeprefix("torch.")
        yield Contender(kind, dtype, mode, tree, partial(time_ours, ours, prompt), script)


def measure(contenders: Sequence[Contender], args: SizesArguments) -> None:
    """Fills in the samples. Contenders and acceptance lengths take turns, in an order that rotates."""
    turns = [(one, length) for one in contenders for length in one.lengths(args.acceptance_lengths)]
    for contender, length in turns:  # warm-up
        take_turn(contender, length, args.steps)
        contender.samples[length] = []
    for repeat in range(args.repeats):
        first = repeat * len(turns) // args.repeats
        for contender, length in turns[first:] + turns[:first]:
            contender.samples[length].append(take_turn(contender, length, args.steps))


def take_turn(contender: Contender, length: int, steps: int) -> Sample:
    """One text in which nothing was compiled."""
    if contender.script is not None:
        contender.script.num_right.fill_(length - 1)
    while True:
        graphs = count_graphs()
        sample = contender.decode(steps * length, length)
        if count_graphs() == graphs:
            return sample


def measure_kind(size: str, kind: str, args: SizesArguments) -> list[dict[str, Any]]:
    """Groups of contenders that took turns: heads of one kind in one dtype, and the rivals in every dtype."""
    torch.set_num_threads(args.threads)
    device = torch.device(check_device(args.device))
    targets = [make_counting_target(size, getattr(torch, dtype), device) for dtype in args.dtypes]
    prompt = Batch.of(Prompt("", 0, torch.arange(args.context, device=device)[None] % targets[0].vocab_size))
    # One packed copy for all contenders.
    packed = [target.with_packed_weights() if "packed" in args.modes else None for target in targets]
    rivals = [one for pair in zip(targets, packed, strict=True) for one in make_rivals(*pair, prompt, args)]
    others: list[dict[str, Any]] = []
    if args.llama_bench:
        settings = {"context": args.context, "rows": 16, "tokens": 2 * args.steps, "repeats": args.repeats}
        others = [measure_llama_cpp(args.llama_bench, target, **settings) for target in targets]
    groups = []
    for pair in zip(targets, packed, strict=True):
        contenders = [*rivals, *make_contenders(kind, *pair, prompt, args)]
        measure(contenders, args)
        groups.append({"size": size, "contenders": [*(one.to_dict() for one in contenders), *others]})
        del contenders  # before the next heads are made
    return groups


def run(args: SizesArguments, console: Console) -> None:
    """Measures each kind of heads at each size in a process of its own, which leaves no memory behind. The files are
    written after each of them, since all may take hours."""
    device = torch.device(check_device(args.device))
    torch.set_num_threads(args.threads)
    environment = {**describe_machine(device), **describe_program(), "simulated": SIMULATED, **asdict(args)}
    environment["shapes"] = {size: SHAPES[size][0] for size in args.sizes}
    title = f"{environment['gpu'] or environment['cpu']}, {args.threads} threads, context {args.context}"
    groups: list[dict[str, Any]] = []
    for size, kind in product(args.sizes, args.kinds):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            groups += process.submit(measure_kind, size, kind, args).result()
        content = json.dumps({"environment": environment, "groups": groups}, indent=1, allow_nan=False)
        write_text(Path(f"{args.output}.json"), content + "\n")
        rows = compare(groups)
        grids = make_grids(rows, args.acceptance_lengths)
        tables = "\n".join(grid.to_markdown() for grid in grids)
        write_text(Path(f"{args.output}.md"), f"```bash\n{environment['command']}\n```\n\n{title}\n\n{tables}")
        draw_sizes(Path(f"{args.output}.png"), rows, args.acceptance_lengths, title)
        console.print(f"measured {kind} at {size}", style="dim", highlight=False)
    for grid in grids:
        grid.print(console)
    console.print(f"wrote {args.output}.json, {args.output}.md and {args.output}.png", markup=False, highlight=False)


def main() -> None:
    with one_line_errors("sizes.py"):
        (args,) = ProgramParser([SizesArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 180))


if __name__ == "__main__":
    main()
