"""Is plain decoding bitwise equal to verification, when both run through passes of one shape, and what decides that?

    python scripts/bitwise_verify.py --target examples/chat-13m --prompts examples/prompts.jsonl \\
        --dtype bfloat16 float16 float32 --compiled bfloat16 float32 \\
        --json docs/benchmarks/bitwise.json --markdown docs/benchmarks/bitwise.md

One text is read several times, each time by passes of another shape (see `bitwise_passes`), and the rows of logits are
compared bit by bit; then the operations of a pass are run one by one, with one thing changed (see `bitwise_factors`).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmark_environment import describe_environment
from benchmark_report import write_json, write_text
from bitwise_factors import Finding, find_factors
from bitwise_passes import Shape, Verify, make_tree, read_text
from bitwise_render import render
from model_loading import DTYPES, encode_messages
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from inference import Target
from inference.compilation import StepCompiler
from inference.kv_cache import TreeCache
from inference.target import TargetOutput
from inference.tree import TokenTree
from training.synthesis.prompts import read_prompts

SIZE = 16  # rows of a fixed-shape pass
VIEW = 512  # slots in a fixed view
CAPACITY = VIEW + 64  # never all in view, as in compiled decoding
PLAIN = Shape("padding", SIZE, VIEW)
REPEATS = 40


@dataclass(frozen=True)
class Comparison:
    """Two readings of the text that differ in what the label says. refill: see `read_text`, of `shape`."""

    label: str
    shape: Shape
    other: Shape = PLAIN
    refill: Shape | None = None


COMPARISONS = (
    *(Comparison(f"{n} row{'s' * (n > 1)} instead of {SIZE}", Shape("padding", n, VIEW)) for n in (1, 2, 3, 4, 8, 32)),
    Comparison("wrong children beside the root", Shape("decoys", SIZE, VIEW)),
    Comparison(f"chain of {SIZE}", Shape("chain", SIZE, VIEW)),
    Comparison("chain of 5", Shape("chain", 5, VIEW)),
    Comparison(f"tree of {SIZE}, the text's nodes first", Shape("front", SIZE, VIEW)),
    Comparison(f"tree of {SIZE}, one pass behind the plain cache", Shape("tree", SIZE, VIEW), refill=PLAIN),
    Comparison(f"tree of {SIZE}", Shape("tree", SIZE, VIEW)),
    Comparison("view that grows", Shape("padding", SIZE)),
    Comparison(f"views that grow: chain of {SIZE}, beside {SIZE} rows", Shape("chain", SIZE), Shape("padding", SIZE)),
    Comparison("views that grow: chain of 5, beside 1 row (a Decoder's)", Shape("chain", 5), Shape("padding", 1)),
    Comparison(
        f"views that grow: tree of {SIZE}, beside 1 row (a Decoder's)", Shape("tree", SIZE), Shape("padding", 1)
    ),
    Comparison("views that grow: chain of 5, beside 4 rows", Shape("chain", 5), Shape("padding", 4)),
    Comparison(f"views that grow: tree of {SIZE}, beside 4 rows", Shape("tree", SIZE), Shape("padding", 4)),
)


@dataclass
class BitwiseArguments:
    """Options of bitwise_verify.py."""

    target: str = field(metadata={"help": "The frozen target: a folder or hub id; a Llama for the single operations."})
    prompts: str = field(metadata={"help": "Prompts, whose first turns are one long prompt together."})
    dtype: list[str] = field(
        default_factory=lambda: ["bfloat16", "float16", "float32"],
        metadata={"help": f"Dtypes: {', '.join(DTYPES[1:])}."},
    )
    compiled: list[str] = field(
        default_factory=list, metadata={"help": "Those of them in which passes are compiled too."}
    )
    num_prompt_tokens: int = field(default=200, metadata={"help": "Of the prompt, which is cut to that."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of the text behind it."})
    num_draws: int = field(default=16, metadata={"help": "Random inputs of each single operation."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; none = torch's choice."})
    json: str | None = field(default=None, metadata={"help": "A file for the findings."})
    markdown: str | None = field(default=None, metadata={"help": "A file for the tables; they are printed anyway."})

    def __post_init__(self) -> None:
        if unknown := [name for name in (*self.dtype, *self.compiled) if name not in DTYPES[1:]]:
            raise ValueError(f"got the dtypes {' '.join(unknown)}; allowed are {', '.join(DTYPES[1:])}")
        if left := set(self.compiled) - set(self.dtype):
            raise ValueError(f"got --compiled {' '.join(left)}, not among --dtype {' '.join(self.dtype)}")
        if min(self.num_prompt_tokens, self.max_new_tokens, self.num_draws) < 1:
            raise ValueError("give --num_prompt_tokens, --max_new_tokens and --num_draws of at least 1")
        if self.num_prompt_tokens + self.max_new_tokens + 2 * SIZE > VIEW:
            raise ValueError(f"prompt, text and {2 * SIZE} nodes must fit into {VIEW} slots: give fewer tokens")


def main(argv: Sequence[str] | None = None) -> int:
    parser = HfArgumentParser(BitwiseArguments, description=(__doc__ or "").partition("\n\n")[0])
    try:
        (args,) = parser.parse_args_into_dataclasses(None if argv is None else list(argv))
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        disable_progress_bar()
        reports = []
        for dtype in args.dtype:
            reports.append(examine(args, dtype))
            if args.json is not None:
                write_json(Path(args.json), reports)
    except (ValueError, OSError) as error:
        sys.exit(f"bitwise_verify.py: {error}")
    text = render(reports)
    print(text)
    if args.markdown is not None:
        write_text(Path(args.markdown), text)
    return 0


def examine(args: BitwiseArguments, dtype: str) -> dict[str, Any]:
    """Findings in one dtype."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    passes: dict[str, list[Finding]] = {}
    costs: dict[str, dict[str, float]] = {}
    factors: list[Finding] = []
    for attention in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, attn_implementation=attention)
        model = model.requires_grad_(False).eval()
        target = Target(model)
        if attention == "sdpa":
            prompt = make_prompt(args, tokenizer)
            text = model.generate(
                torch.tensor([prompt]), max_new_tokens=args.max_new_tokens, do_sample=False, eos_token_id=None
            )[0, len(prompt) :].tolist()
            environment = describe_environment(
                target,
                None,
                target=args.target,
                prompts=args.prompts,
                num_prompt_tokens=len(prompt),
                max_new_tokens=args.max_new_tokens,
            )
            factors = find_factors(model, num_draws=args.num_draws)
        verify: Verify = target.verify_opened
        passes[f"{attention}"] = compare_passes(target, verify, prompt, text, COMPARISONS)
        if attention == "sdpa":
            costs["eager"] = measure_costs(target, verify, prompt, text, (1, 2, 4, 5, SIZE))
            if dtype in args.compiled:
                compiler = StepCompiler([model], on_compile=lambda _: None)
                with compiler.active():
                    verify = compile_verify(target, compiler)
                    passes["sdpa, compiled"] = compare_passes(target, verify, prompt, text, COMPILED)
                    costs["compiled"] = measure_costs(target, verify, prompt, text, (1, SIZE))
    return {
        "environment": environment,
        "passes": {name: [asdict(one) for one in findings] for name, findings in passes.items()},
        "operations": [asdict(one) for one in factors],
        "milliseconds": costs,
    }


# Each number of rows is a graph of its own.
COMPILED = tuple(
    one
    for one in COMPARISONS
    if {one.shape.num_nodes, one.other.num_nodes} <= {1, SIZE} and one.shape.view == one.other.view == VIEW
)


def make_prompt(args: BitwiseArguments, tokenizer: Any) -> list[int]:
    turns = " ".join(
        conversation.messages_before_reply()[-1]["content"] for conversation in read_prompts(Path(args.prompts))
    )
    ids = encode_messages(tokenizer, [{"role": "user", "content": turns}])[0].tolist()
    if len(ids) < args.num_prompt_tokens:
        raise ValueError(f"{args.prompts} holds {len(ids)} tokens: give a longer file, or --num_prompt_tokens")
    return [int(token) for token in ids[: args.num_prompt_tokens]]


def compile_verify(target: Target, compiler: StepCompiler) -> Verify:
    def verify(cache: TreeCache, tree: TokenTree) -> TargetOutput:
        return target.verify_opened(cache, tree)

    return compiler.compile(verify)


def compare_passes(
    target: Target, verify: Verify, prompt: Sequence[int], text: Sequence[int], comparisons: Sequence[Comparison]
) -> list[Finding]:
    """One finding for each comparison."""
    known: dict[tuple[Shape, Shape | None], Tensor] = {}

    def read(shape: Shape, refill: Shape | None) -> Tensor:
        if (shape, refill) not in known:
            known[shape, refill] = read_text(target, verify, shape, prompt, text, capacity=CAPACITY, refill=refill)
        return known[shape, refill]

    findings = []
    for one in comparisons:
        finding = Finding("pass", one.label)
        finding.add(read(one.other, None), read(one.shape, one.refill))
        findings.append(finding)
    return findings


@torch.no_grad()
def measure_costs(
    target: Target, verify: Verify, prompt: Sequence[int], text: Sequence[int], sizes: Sequence[int]
) -> dict[str, float]:
    """Milliseconds of processor time of a pass, by its number of rows: medians, the sizes taking turns."""
    cache = target.new_cache(1, CAPACITY)
    cache.view_multiple = VIEW
    target.prefill(cache, torch.tensor([list(prompt)]), torch.tensor([len(prompt)]))
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(REPEATS):
        for size in sizes:
            tree, _ = make_tree(Shape("padding", size, VIEW), text, 0, target.vocab_size, random.Random(0))
            cache.open_slots(size)
            start = time.process_time()
            verify(cache, tree)
            times[size].append(time.process_time() - start)
    return {str(size): 1e3 * statistics.median(seconds) for size, seconds in times.items()}


if __name__ == "__main__":
    sys.exit(main())
