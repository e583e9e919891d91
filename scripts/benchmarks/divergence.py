"""Counts where decoding in low precision diverges from plain decoding, and how many divergences are near-ties.

    python scripts/benchmarks/divergence.py --heads examples/heads/eagle3 --dtype bfloat16 float32
    python scripts/benchmarks/divergence.py --heads examples/heads/eagle3 --batch_invariant true --temperature 0.7

There are two references: transformers' `generate` (of greedy text) and this library's plain decoding. After a
divergence, decoding starts again after the reference's token, so every position is compared once. At each divergence,
one pass in higher precision over the common text gives the logits of both tokens. If these are at most NEAR_TIE_STEPS
steps of the dtype apart, the divergence is a near-tie.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from rich.progress import track

from inference import Drafter, Target
from inference.drafters.ngram import NgramDrafter
from inference.noise import gumbel_noise, row_seeds
from scripts.measuring.contenders import OurDecoding, TransformersDecoding
from scripts.measuring.environment import describe_environment
from scripts.measuring.matrix import load_all_heads
from scripts.measuring.measure import PLAIN, TRANSFORMERS, Batch, Prompt, Run, Settings, load_prompts
from scripts.measuring.render import Grid
from scripts.measuring.texts import find_step
from scripts.shared.model_loading import fit_tree, load_target
from scripts.shared.one_line_errors import one_line_errors
from scripts.shared.whole_files import write_text
from training.options.program_parser import ProgramParser

DTYPES = ("bfloat16", "float16", "float32")
# In bfloat16, two passes over the same text move the lead of one token over another by up to 3 steps where both choose
# the same token (chat-13m, 10,000 positions); a fault in the code moves the lead by up to 300.
NEAR_TIE_STEPS = 4.0

REFERENCES = (TRANSFORMERS, PLAIN)

Decode = Callable[[list[int], int], list[int]]  # a prefix and how many tokens at most -> the new tokens


@dataclass
class DivergenceArguments:
    target: str = field(default="examples/chat-13m", metadata={"help": "Target: a folder or hub id."})
    prompts: list[str] = field(
        default_factory=lambda: ["examples/prompts.jsonl"], metadata={"help": "Files of prompts or conversations."}
    )
    heads: list[str] = field(default_factory=list, metadata={"help": "Draft heads: folders or hub ids."})
    tree: list[str] = field(
        default_factory=lambda: ["chain:4", "dynamic"],
        metadata={"help": "Trees for the heads, as in `draftsmith bench`; n-grams draft the first one."},
    )
    dtype: list[str] = field(
        default_factory=lambda: ["bfloat16"], metadata={"help": f"Dtypes to compare: {', '.join(DTYPES)}."}
    )
    num_tokens: int = field(default=10_000, metadata={"help": "Number of positions to compare."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest text in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    batch_invariant: bool = field(
        default=False, metadata={"help": "Decode in batch-invariant mode, in the plain reference too."}
    )
    compile: bool = field(default=False, metadata={"help": "Compile the heads and plain decoding."})
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    output: str = field(default="outputs/divergence.md", metadata={"help": "Markdown file for the tables."})

    def __post_init__(self) -> None:
        if unknown := [name for name in self.dtype if name not in DTYPES]:
            raise ValueError(f"got --dtype {' '.join(unknown)}; allowed are {', '.join(DTYPES)}")
        if min(self.num_tokens, self.max_new_tokens) < 1:
            raise ValueError("give --num_tokens and --max_new_tokens of at least 1")


@dataclass
class Tally:
    """gaps: at each divergence, the distance of the two logits in higher precision, in steps of the dtype."""

    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def num_near_ties(self) -> int:
        return sum(gap <= NEAR_TIE_STEPS for gap in self.gaps)


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


def compare(tally: Tally, decode: Decode, prompt: list[int], text: list[int], judge: Judge) -> None:
    """Adds one reference text to the tally.

    Raises:
        RuntimeError: the decoding stops where the text continues.
    """
    start = 0
    while start < len(text):
        found = decode([*prompt, *text[:start]], len(text) - start)
        pairs = zip(text[start:], found, strict=False)
        same = next((place for place, (token, other) in enumerate(pairs) if token != other), None)
        if same is None:
            if len(found) != len(text) - start:
                raise RuntimeError(f"decoding ended after {len(found)} of {len(text) - start} tokens without an EOS")
            break
        tally.gaps.append(judge([*prompt, *text[: start + same]], (text[start + same], found[same])))
        start += same + 1
    tally.num_tokens += len(text)


def make_decodings(target: Target, heads: dict[str, Drafter], args: DivergenceArguments) -> dict[str, Decode]:
    """All decodings by name, the references included."""
    mode = {"is_compiled": args.compile, "batch_invariant": args.batch_invariant}
    decodings: dict[str, Callable[..., Run]] = {REFERENCES[1]: OurDecoding(target, None, **mode)}
    if args.temperature == 0:  # transformers' noise is its own
        # A copy of the target nearly always agrees with it, so that nearly every token comes from a wide pass.
        assistant = copy.deepcopy(target.model)
        decodings |= {
            REFERENCES[0]: TransformersDecoding(target),
            "transformers prompt look-up": TransformersDecoding(target, prompt_lookup_num_tokens=10),
            "transformers, assisted by a copy of the target": TransformersDecoding(target, assistant_model=assistant),
        }
    if not args.compile:
        ngrams = OurDecoding(target, NgramDrafter(), tree=args.tree[0], batch_invariant=args.batch_invariant)
        decodings[f"n-grams, {args.tree[0]}"] = ngrams
    for name, drafter in heads.items():
        for tree in args.tree:
            own = fit_tree(tree, drafter.max_depth)
            decodings[f"{name}, {Path(own).stem}"] = OurDecoding(target, drafter, tree=own, **mode)

    def make(run: Callable[..., Run]) -> Decode:
        def decode(prefix: list[int], count: int) -> list[int]:
            prompt = Prompt("", 0, torch.tensor([prefix], device=target.device))
            return run(Batch.of(prompt), Settings(count, args.temperature)).texts[0]

        return decode

    return {name: make(run) for name, run in decodings.items()}


def measure(args: DivergenceArguments, dtype: str) -> tuple[dict[str, Any], Tallies]:
    """Compares every decoding with both references in one dtype. Returns the environment and the counts."""
    target, tokenizer = load_target(args.target, dtype=dtype, device=args.device)
    heads = load_all_heads(args.heads, target, is_only_target=True)[0]
    decodings, judge = make_decodings(target, dict(heads), args), make_judge(target.model, args.temperature)
    references = [reference for reference in REFERENCES if reference in decodings]
    tallies = {reference: {name: Tally() for name in decodings if name != reference} for reference in references}
    for prompt in track(list(read_prompts(args, tokenizer, target)), description=dtype, transient=True):
        ids: list[int] = prompt.input_ids[0].tolist()
        for reference, own in tallies.items():
            text = decodings[reference](ids, args.max_new_tokens)
            for name, tally in own.items():
                compare(tally, decodings[name], ids, text, judge)
        if all(tally.num_tokens >= args.num_tokens for own in tallies.values() for tally in own.values()):
            break
    modes = {
        "batch-invariant": args.batch_invariant,
        "compiled": args.compile,
        f"T={args.temperature:g}": args.temperature,
    }
    environment = describe_environment(target, None, target=args.target, max_new_tokens=args.max_new_tokens)
    environment["dtype"] = ", ".join([dtype, *(name for name, is_on in modes.items() if is_on)])
    return environment, tallies


def read_prompts(args: DivergenceArguments, tokenizer: Any, target: Target) -> Iterator[Prompt]:
    """The prompts of all files, at most one for each token to compare."""
    for path in args.prompts:
        limits = {"num_prompts": args.num_tokens, "max_new_tokens": args.max_new_tokens}
        yield from load_prompts(Path(path), tokenizer, target, **limits)[0]


def make_grids(environment: dict[str, Any], tallies: Tallies) -> Iterator[Grid]:
    for reference, own in tallies.items():
        cells = []
        for name, tally in own.items():
            count, scale = len(tally.gaps), 1e4 / tally.num_tokens
            rate = f"{count * scale:.1f} ± {count**0.5 * scale:.1f}" if count else f"0 (< {3 * scale:.0f})"
            largest = f"{max(tally.gaps):.1f}" if count else "–"
            cells.append([name, f"{tally.num_tokens:,}", rate, f"{tally.num_near_ties}/{count}", largest])
        columns = ["decoding", "positions", "divergences per 10,000", "near-ties", "largest gap, steps"]
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
