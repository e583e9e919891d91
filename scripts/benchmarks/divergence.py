"""Counts where decoding in low precision diverges from plain decoding, and how many divergences are near-ties.

    python scripts/benchmarks/divergence.py --heads examples/heads/eagle3 --dtype bfloat16 float32
    python scripts/benchmarks/divergence.py --heads examples/heads/eagle3 --batch_invariant true --batch_size 4

There are two references, both of single rows: this library's plain decoding, and transformers' `generate` (of greedy
text at batch size 1, not in batch-invariant mode). After a divergence, decoding starts again after the reference's
token, so every position is compared once. At each divergence, one pass in higher precision over the common text gives
the logits of both tokens. If these are at most NEAR_TIE_STEPS steps of the dtype apart, the divergence is a near-tie.

In batch-invariant mode, every decoding takes turns with itself in ordinary mode, and the table has the ratio of the
times of their steps (on a CPU: CPU time) over the first batches.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from rich.console import Console
from rich.progress import track

from draftsmith.inference import Drafter, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.noise import gumbel_noise, row_seeds
from draftsmith.inference.runners.compiled import count_graphs
from draftsmith.inference.text_difference import NEAR_TIE_STEPS, find_step
from draftsmith.scripts.measuring.contenders import OurDecoding, TransformersDecoding
from draftsmith.scripts.measuring.environment import describe_environment
from draftsmith.scripts.measuring.matrix import load_all_heads
from draftsmith.scripts.measuring.measure import (
    PLAIN,
    TRANSFORMERS,
    Batch,
    Prompt,
    Run,
    Settings,
    load_prompts,
    make_batches,
)
from draftsmith.scripts.measuring.table import Grid
from draftsmith.scripts.shared.clock import read_clock
from draftsmith.scripts.shared.model_loading import fit_tree, load_target
from draftsmith.scripts.shared.whole_files import write_text
from draftsmith.training.data.options import option
from draftsmith.training.options.command_line import ProgramParser
from draftsmith.training.options.one_line_errors import one_line_errors

DTYPES = ("bfloat16", "float16", "float32")
NUM_TIMED = 12  # batches: several hundred steps of each decoding

REFERENCES = (TRANSFORMERS, PLAIN)

Decoding = Callable[..., Run]  # a batch and settings -> its texts
Decode = Callable[[list[list[int]], int], list[list[int]]]  # prefixes and how many tokens at most -> the new tokens


@dataclass
class DivergenceArguments:
    target: str = option(default="examples/chat-13m", help="Target: a folder or hub id.")
    prompts: list[str] = option(
        default_factory=lambda: ["examples/prompts.jsonl"], help="Files of prompts or conversations."
    )
    heads: list[str] = option(default_factory=list, help="Draft heads: folders or hub ids.")
    tree: list[str] = option(
        default_factory=lambda: ["chain:4", "dynamic:4,4,16", "dynamic:5,8,60"],
        help="Trees for the heads, as in `draftsmith bench`; n-grams draft the first one.",
    )
    dtype: list[str] = option(default_factory=lambda: ["bfloat16"], help=f"Dtypes to compare: {', '.join(DTYPES)}.")
    num_prompts: int | None = option(default=None, help="Use only the first N prompts; none = all.")
    batch_size: int = option(default=1, help="Prompts decoded together; references decode each prompt by itself.")
    max_new_tokens: int = option(default=64, help="Longest text in tokens.")
    temperature: float = option(default=0.0, help="Sampling temperature; 0 = greedy.")
    batch_invariant: bool = option(default=False, help="Decode in batch-invariant mode, in the plain reference too.")
    compile: bool = option(default=False, help="Compile the heads and plain decoding.")
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")
    output: str = option(default="outputs/divergence.md", help="Markdown file for the tables.")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.dtype if name not in DTYPES]:
            raise ValueError(f"got --dtype {' '.join(unknown)}; allowed are {', '.join(DTYPES)}")
        if min(self.num_prompts or 1, self.batch_size, self.max_new_tokens) < 1:
            raise ValueError("give --num_prompts, --batch_size and --max_new_tokens of at least 1")


@dataclass
class Tally:
    """Attributes:
    gaps: at each divergence, the distance of the two logits in higher precision, in steps of the dtype.
    seconds: of all steps in batch-invariant and in ordinary mode; num_steps: their numbers.
    """

    num_texts: int = 0
    num_equal: int = 0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    num_steps: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def num_near_ties(self) -> int:
        return sum(gap <= NEAR_TIE_STEPS for gap in self.gaps)

    @property
    def cost(self) -> float | None:
        """A step's time in batch-invariant mode over that in ordinary mode; None if nothing was timed."""
        if not all(self.num_steps):
            return None
        own, ordinary = (seconds / count for seconds, count in zip(self.seconds, self.num_steps, strict=True))
        return own / ordinary


Tallies = dict[str, dict[str, Tally]]  # by reference and decoding


Judge = Callable[[Sequence[int], Sequence[int]], float]


def make_judge(model: Any, temperature: float = 0.0) -> Judge:
    """A function of a prefix and two tokens: the distance of their logits, in steps of the model's dtype at the larger
    logit's size. A copy of the model in higher precision, with the same weights, computes the logits. Sampling adds its
    noise, times the temperature, to the distance."""
    higher = copy.deepcopy(model).to(torch.float64 if model.dtype == torch.float32 else torch.float32)

    @torch.no_grad()
    def judge(prefix: Sequence[int], tokens: Sequence[int]) -> float:
        ids = torch.tensor([list(prefix)], device=model.device)
        logits: list[float] = higher(ids, use_cache=False).logits[0, -1, list(tokens)].tolist()
        gap = logits[0] - logits[1]
        if temperature > 0:
            place = torch.tensor([[len(prefix)]], device=model.device)
            columns = torch.tensor(list(tokens), device=model.device)
            noise = gumbel_noise(row_seeds(Settings.seed, 1, model.device), place, columns)[0, 0]
            gap += temperature * float(noise[0] - noise[1])
        return abs(gap) / find_step(max(logits, key=abs), model.dtype)

    return judge


def compare(
    tally: Tally, decode: Decode, prompts: Sequence[list[int]], texts: Sequence[list[int]], judge: Judge
) -> None:
    """Adds the reference texts of a batch to the tally.

    Raises:
        RuntimeError: a decoding stops where the text continues.
    """
    starts: list[int | None] = [0] * len(texts)  # None: the row is compared, and keeps its place in the batch
    num_gaps = [0] * len(texts)
    while any(start is not None for start in starts):
        prefixes = [[*prompt, *text[: start or 0]] for prompt, text, start in zip(prompts, texts, starts, strict=True)]
        count = max(len(text) - start for text, start in zip(texts, starts, strict=True) if start is not None)
        for row, found in enumerate(decode(prefixes, count)):
            text, start = texts[row], starts[row]
            if start is None:
                continue
            pairs = zip(text[start:], found, strict=False)
            same = next((place for place, (token, other) in enumerate(pairs) if token != other), None)
            if same is None:
                if len(found) < len(text) - start:
                    raise RuntimeError(
                        f"decoding ended after {len(found)} of {len(text) - start} tokens without an EOS"
                    )
                starts[row] = None
                continue
            tally.gaps.append(judge([*prompts[row], *text[: start + same]], (text[start + same], found[same])))
            num_gaps[row] += 1
            starts[row] = start + same + 1 if start + same + 1 < len(text) else None
    tally.num_texts += len(texts)
    tally.num_equal += num_gaps.count(0)
    tally.num_tokens += sum(map(len, texts))


def make_decodings(
    target: Target, heads: Mapping[str, Drafter], args: DivergenceArguments, *, batch_invariant: bool
) -> dict[str, Decoding]:
    """All decodings by name, the references included."""
    mode = {"is_compiled": args.compile, "batch_invariant": batch_invariant}
    decodings: dict[str, Decoding] = {PLAIN: OurDecoding(target, None, **mode)}
    if args.temperature == 0 and args.batch_size == 1 and not args.batch_invariant:  # transformers' noise is its own
        # A copy of the target nearly always agrees with it, so that nearly every token comes from a wide pass.
        assistant = copy.deepcopy(target.model)
        decodings |= {
            TRANSFORMERS: TransformersDecoding(target),
            "transformers prompt look-up": TransformersDecoding(target, prompt_lookup_num_tokens=10),
            "transformers, assisted by a copy of the target": TransformersDecoding(target, assistant_model=assistant),
        }
    if not args.compile:
        ngrams = OurDecoding(target, NgramDrafter(), tree=args.tree[0], batch_invariant=batch_invariant)
        decodings[f"n-grams, {args.tree[0]}"] = ngrams
    for name, drafter in heads.items():
        for tree in args.tree:
            own = fit_tree(tree, drafter.max_depth)
            decodings[f"{name}, {Path(own).stem}"] = OurDecoding(target, drafter, tree=own, **mode)
    return decodings


def make_settings(max_new_tokens: int, temperature: float) -> Settings:
    """Without the target's own penalty: near-ties are judged by its logits."""
    return Settings(max_new_tokens, temperature, repetition_penalty=1.0)


def as_decode(decoding: Decoding, target: Target, temperature: float) -> Decode:
    """The decoding as a function of lists; all rows have the same seed."""

    def decode(prefixes: list[list[int]], count: int) -> list[list[int]]:
        rows = (Prompt("", 0, torch.tensor([prefix], device=target.device)) for prefix in prefixes)
        return decoding(Batch.of(*rows), make_settings(count, temperature)).texts

    return decode


def time_steps(tally: Tally, modes: Sequence[Decoding], batch: Batch, settings: Settings) -> None:
    """Adds the steps of one batch, decoded in each mode. A text's steps take its time less that of its first token.
    Runs that compile are repeated."""
    device = batch.input_ids.device

    def now() -> float:
        return time.process_time() if device.type == "cpu" else read_clock(device)

    for place, decoding in enumerate(modes):
        graphs = -1
        while graphs != count_graphs():
            graphs, start = count_graphs(), now()
            decoding(batch, settings, max_new_tokens=1)
            first = now()
            run = decoding(batch, settings)
            seconds = now() - first - (first - start)
        assert run.stats is not None
        tally.seconds[place] += seconds
        tally.num_steps[place] += run.stats.num_verify_passes


def measure(args: DivergenceArguments, dtype: str) -> tuple[dict[str, Any], Tallies]:
    """Compares every decoding with the references in one dtype. Returns the environment and the counts."""
    target, tokenizer = load_target(args.target, dtype=dtype, device=args.device)
    heads: Mapping[str, Drafter] = load_all_heads(args.heads, target)
    decodings = make_decodings(target, heads, args, batch_invariant=args.batch_invariant)
    ordinary = make_decodings(target, heads, args, batch_invariant=False) if args.batch_invariant else {}
    decodes = {name: as_decode(decoding, target, args.temperature) for name, decoding in decodings.items()}
    judge, settings = make_judge(target.model, args.temperature), make_settings(args.max_new_tokens, args.temperature)
    references = [reference for reference in REFERENCES if reference in decodings]
    has_itself = args.batch_invariant or args.batch_size > 1  # the reference in the batch, and its cost
    tallies = {
        reference: {name: Tally() for name in decodings if name != reference or has_itself} for reference in references
    }
    batches = make_batches(read_prompts(args, tokenizer, target), args.batch_size)
    for number, batch in enumerate(track(batches, description=dtype, transient=True)):
        prompts: list[list[int]] = [prompt.input_ids[0].tolist() for prompt in batch.prompts]
        for reference, own in tallies.items():
            texts = [decodes[reference]([prompt], args.max_new_tokens)[0] for prompt in prompts]
            for name, tally in own.items():
                compare(tally, decodes[name], prompts, texts, judge)
        for name, decoding in ordinary.items() if number < NUM_TIMED else ():
            time_steps(tallies[PLAIN][name], (decodings[name], decoding), batch, settings)
    modes = {
        "batch-invariant": args.batch_invariant,
        "compiled": args.compile,
        f"T={args.temperature:g}": args.temperature,
        f"batch {args.batch_size}": args.batch_size > 1,
    }
    environment = describe_environment(target, None, target=args.target, max_new_tokens=args.max_new_tokens)
    environment["dtype"] = ", ".join([dtype, *(name for name, is_on in modes.items() if is_on)])
    return environment, tallies


def read_prompts(args: DivergenceArguments, tokenizer: Any, target: Target) -> list[Prompt]:
    """The first prompts of all files together."""
    prompts: list[Prompt] = []
    for path in args.prompts:
        num_left = None if args.num_prompts is None else args.num_prompts - len(prompts)
        limits = {"num_prompts": num_left, "max_new_tokens": args.max_new_tokens}
        prompts += load_prompts(Path(path), tokenizer, target, **limits)[0] if num_left != 0 else []
    return prompts


def make_grids(environment: dict[str, Any], tallies: Tallies) -> Iterator[Grid]:
    for reference, own in tallies.items():
        cells = []
        for name, tally in own.items():
            count, scale = len(tally.gaps), 1e4 / tally.num_tokens
            rate = f"{count * scale:.1f} ± {count**0.5 * scale:.1f}" if count else f"0 (< {3 * scale:.0f})"
            largest = f"{max(tally.gaps):.1f}" if count else "–"
            equal = f"{tally.num_equal} of {tally.num_texts}"
            cells.append([name, equal, f"{tally.num_tokens:,}", rate, f"{tally.num_near_ties}/{count}", largest])
            if any(tally.cost is not None for tally in own.values()):
                cells[-1].append("–" if tally.cost is None else f"{tally.cost:.2f}")
        columns = ["decoding", "equal texts", "positions", "divergences per 10,000", "near-ties", "largest gap, steps"]
        columns += ["step time / ordinary"] if len(cells[0]) > len(columns) else []
        yield Grid(f"{environment['target']}, {environment['dtype']}, against {reference}", columns, cells)


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_errors("divergence.py"):
        (args,) = ProgramParser([DivergenceArguments], doc=__doc__).read(argv)
        write(args, [measure(args, dtype) for dtype in args.dtype])


def write(args: DivergenceArguments, measured: Sequence[tuple[dict[str, Any], Tallies]]) -> None:
    grids = [grid for environment, tallies in measured for grid in make_grids(environment, tallies)]
    for grid in grids:
        grid.print(Console(width=None if sys.stdout.isatty() else 150))
    note = (
        f"Near-tie: in higher precision the two tokens are at most {NEAR_TIE_STEPS:g} steps of the dtype apart. ±: the "
        "square root of the count; without divergences, the bound of 95% confidence."
    )
    one = measured[0][0]
    machine = f"{one['gpu'] or one['cpu']}, {one['threads']} threads, torch {one['torch']}, commit {one['commit']}"
    parts = [f"```bash\n{one['command']}\n```\n\n{machine}\n", *(grid.to_markdown() for grid in grids), f"{note}\n"]
    write_text(Path(args.output), "\n".join(parts))
    print(f"{note}\nwrote {args.output}")


if __name__ == "__main__":
    main()
