"""How often speculative decoding leaves the text of plain greedy decoding, and whether only at near-ties.

    python scripts/benchmarks/bf16_divergence.py --target examples/chat-13m \\
        --heads examples/heads/medusa examples/heads/eagle3 \\
        --prompts examples/prompts.jsonl examples/conversations.jsonl.gz --dtype bfloat16 float16 float32 \\
        --json docs/benchmarks/bf16-divergence.json --markdown docs/benchmarks/bf16-divergence.md

Every way to decode, transformers' own and ours, is compared with two references, plain decoding of transformers and of
this library, at every position of the reference's texts (see `divergence_count`). Of each divergence the logits of both
tokens are kept: of the pass that wrote the text, of the decoding's own pass, and of one pass in higher precision.
A combination of dtype and attention replaces the same one in a file that is there already, and leaves the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from inference import Drafter
from inference.drafters.ngram import NgramDrafter
from scripts.benchmarks.divergence_contenders import (
    Contender,
    FaultyTarget,
    OurGreedy,
    RecordingTarget,
    make_transformers,
    with_control,
)
from scripts.benchmarks.divergence_count import Decode, Decoded, Divergence, Tally, count_divergences, find_gaps
from scripts.benchmarks.divergence_render import render
from scripts.benchmarks.environment import describe_environment
from scripts.benchmarks.matrix import load_all_heads
from scripts.benchmarks.measure import Prompt, load_prompts
from scripts.benchmarks.report import write_json, write_text
from scripts.benchmarks.texts import share_of_repeated_ngrams
from scripts.model_loading import fit_tree, parse_tree

KEEP_EVERY = 20  # prompts; what was counted is then written
# Rounding puts a logit off by half a step and its lead over another by one: from their last rounding alone the leads of
# two passes may be two steps apart.
ROUNDING_STEPS = 2.0
ORDER = ("bfloat16", "float16", "float32")  # of the reports
QUANTILES = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


@dataclass
class DivergenceArguments:
    """Options of bf16_divergence.py."""

    target: str = field(metadata={"help": "The frozen target: a folder or hub id."})
    prompts: list[str] = field(metadata={"help": "Files of prompts or conversations, read in this order."})
    heads: list[str] = field(default_factory=list, metadata={"help": "Trained heads: folders or hub ids."})
    tree: list[str] = field(
        default_factory=lambda: ["chain:4", "configs/trees/static12.yaml", "dynamic"],
        metadata={"help": "Trees for the heads, as for benchmark.py; n-grams draft with the first one."},
    )
    dtype: list[str] = field(default_factory=lambda: ["bfloat16"], metadata={"help": f"Dtypes: {', '.join(ORDER)}."})
    attention: list[str] = field(default_factory=lambda: ["sdpa"], metadata={"help": "sdpa, eager, or both."})
    early_exit: int | None = field(
        default=None, metadata={"help": "Also transformers' generation assisted by so many of the target's own layers."}
    )
    segment: int | None = field(
        default=None, metadata={"help": "Also plain decoding that is called anew every so many tokens, as a control."}
    )
    num_tokens: int = field(default=10_000, metadata={"help": "Positions to compare, at least, of each reference."})
    max_new_tokens: int = field(default=64, metadata={"help": "Of each text, which ends at EOS."})
    device: str | None = field(default=None, metadata={"help": "None = cuda if there is one, else cpu."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads; none = torch's choice."})
    json: str | None = field(default=None, metadata={"help": "A file for all that was counted."})
    markdown: str | None = field(default=None, metadata={"help": "A file for the tables; they are printed anyway."})

    def __post_init__(self) -> None:
        if unknown := [name for name in self.dtype if name not in ORDER]:
            raise ValueError(f"got --dtype {' '.join(unknown)}; allowed are {', '.join(ORDER)}")
        if unknown := [name for name in self.attention if name not in ("sdpa", "eager")]:
            raise ValueError(f"got --attention {' '.join(unknown)}; allowed are sdpa and eager")
        if min(self.num_tokens, self.max_new_tokens, 1 if self.threads is None else self.threads) < 1:
            raise ValueError("give --num_tokens, --max_new_tokens and --threads of at least 1")


@dataclass
class Reference:
    """Plain decoding that the others are compared with; texts by the prompt's id, tallies by the contender's name."""

    name: str
    decode: Decode
    texts: dict[str, Decoded] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts.values())


def main(argv: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").partition("\n\n")[0]
    parser = HfArgumentParser(DivergenceArguments, description=description)
    try:
        (args,) = parser.parse_args_into_dataclasses(None if argv is None else list(argv))
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        for dtype in args.dtype:
            for attention in args.attention:
                report = measure_combination(args, dtype, attention)
                reports = [report] if args.json is None else read_reports(Path(args.json))
        text = render(reports)
    except (ValueError, OSError) as error:
        sys.exit(f"bf16_divergence.py: {error}")
    print(text)
    if args.markdown is not None:
        write_text(Path(args.markdown), text)
    return 0


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Those of the file, or none if there is no such file."""
    reports: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["reports"] if path.exists() else []
    return reports


def keep_report(path: Path, report: dict[str, Any]) -> None:
    """Writes a report beside those that are there, in the place of one of the same dtype and attention."""

    def find_place(one: dict[str, Any]) -> tuple[int, bool]:
        environment = one["environment"]
        return ORDER.index(environment["dtype"]), environment["attention"] != "sdpa"

    others = (one for one in read_reports(path) if find_place(one) != find_place(report))
    write_json(path, sorted([*others, report], key=find_place))


def measure_combination(args: DivergenceArguments, dtype: str, attention: str) -> dict[str, Any]:
    """Everybody against both references, in one dtype and with one implementation of attention."""
    disable_progress_bar()
    model = load_model(args, dtype, attention)
    target = RecordingTarget(model)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    heads = load_all_heads(args.heads, target, is_only_target=True)[0]
    theirs = make_transformers(model, early_exit=args.early_exit, segment=args.segment)
    ours = make_ours(target, heads, args.tree, segment=args.segment)
    references = [Reference(theirs[0].name, theirs[0].decode), Reference(ours[0].name, ours[0].decode)]
    exact = load_model(args, "float64" if dtype == "float32" else "float32", "eager")
    judge = Judge(exact, tokenizer)
    environment = describe_environment(
        target,
        None,
        target=args.target,
        prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        higher_precision=str(exact.dtype).removeprefix("torch."),
    )

    faulty = {one.name for one in ours if one.is_faulty}

    def make_report() -> dict[str, Any]:
        limit = find_limit(references)
        report = {
            "environment": environment | {"near_tie_steps": limit},
            "references": [describe_reference(one, target.dtype) for one in references],
            "rows": [
                describe_row(reference, name, tally, judge, limit) | {"is_faulty": name in faulty}
                for reference in references
                for name, tally in reference.tallies.items()
            ],
        }
        if args.json is not None:
            keep_report(Path(args.json), report)
        return report

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{dtype}, {attention}", total=args.num_tokens)
        for number, prompt in enumerate(iterate_prompts(args, tokenizer, target), start=1):
            judge.prompts[prompt.id] = prompt.input_ids[0].tolist()
            compare_prompt(prompt, references, [*theirs, *ours], args.max_new_tokens, target.dtype)
            done = min(reference.num_tokens for reference in references)
            progress.update(task, completed=done)
            if done >= args.num_tokens:
                break
            if number % KEEP_EVERY == 0:
                make_report()
    return make_report()


def load_model(args: DivergenceArguments, dtype: str, attention: str) -> Any:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype, attn_implementation=attention)
    return model.requires_grad_(False).eval().to(device)


def make_ours(
    target: RecordingTarget, heads: Mapping[str, Drafter], trees: Sequence[str], *, segment: int | None
) -> list[Contender]:
    """Our own ways to decode; the first is plain decoding."""
    contenders = with_control("plain decoding", OurGreedy(target), segment)
    ngrams = NgramDrafter()
    pairs = [("n-grams", ngrams, trees[0]), *((name, one, tree) for name, one in heads.items() for tree in trees)]
    for name, drafter, tree in pairs:
        fitted = fit_tree(tree, drafter.max_depth)
        contenders.append(Contender(f"{name}, {Path(fitted).stem}", OurGreedy(target, drafter, parse_tree(fitted))))
    faulty = OurGreedy(FaultyTarget(target.model), ngrams, parse_tree(fit_tree(trees[0], ngrams.max_depth)))
    contenders.append(Contender(f"control: n-grams, {trees[0]}, drafts one position too far", faulty, is_faulty=True))
    return contenders


def iterate_prompts(args: DivergenceArguments, tokenizer: Any, target: RecordingTarget) -> Iterator[Prompt]:
    """The prompts of all files, each once."""
    seen: set[tuple[int, ...]] = set()
    for path in args.prompts:
        prompts, _ = load_prompts(
            Path(path), tokenizer, target, num_prompts=args.num_tokens, max_new_tokens=args.max_new_tokens
        )
        for prompt in prompts:
            if (key := tuple(prompt.input_ids[0].tolist())) not in seen:
                seen.add(key)
                yield replace(prompt, id=f"{Path(path).name}: {prompt.id}")


def compare_prompt(
    prompt: Prompt,
    references: Sequence[Reference],
    contenders: Sequence[Contender],
    max_new_tokens: int,
    dtype: torch.dtype,
) -> None:
    """Everybody on one prompt. A call that both references ask for is made once."""
    prompt_ids = prompt.input_ids[0].tolist()
    for reference in references:
        reference.texts[prompt.id] = reference.decode(tuple(prompt_ids), max_new_tokens)
    for contender in contenders:
        made = {
            (tuple(prompt_ids), len(reference.texts[prompt.id].token_ids)): reference.texts[prompt.id]
            for reference in references
            if reference.decode is contender.decode
        }

        def decode(prefix: tuple[int, ...], budget: int) -> Decoded:
            if (prefix, budget) not in made:  # noqa: B023
                made[prefix, budget] = contender.decode(prefix, budget)  # noqa: B023
            return made[prefix, budget]  # noqa: B023

        for reference in references:
            if contender.name == reference.name:
                continue
            tally = reference.tallies.setdefault(contender.name, Tally())
            text = reference.texts[prompt.id]
            count_divergences(tally, decode, prompt.id, prompt_ids, text, dtype, segment=contender.segment)


def find_limit(references: Sequence[Reference]) -> float:
    """By how many steps the lead of one token over another may differ between the text's pass and the decoding's own
    one in a near-tie: as far as it differs anywhere between the two plain decodings, where both agree."""
    names = {reference.name for reference in references}
    plain = [tally for one in references for name, tally in one.tallies.items() if name in names]
    return max([ROUNDING_STEPS, *(change for tally in plain for change in tally.changes)])


class Judge:
    """Says of a divergence whether it is a near-tie, and what a pass in higher precision makes of its two tokens."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.prompts: dict[str, list[int]] = {}  # their tokens, by id
        self.tokenizer = tokenizer
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, reference: Reference, divergence: Divergence, limit: float) -> dict[str, Any]:
        text = reference.texts[divergence.prompt].token_ids[: divergence.position]
        prefix = (*self.prompts[divergence.prompt], *text)
        if prefix not in self.known:
            input_ids = torch.tensor([prefix], device=self.model.device)
            self.known[prefix] = self.model(input_ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        tokens = [divergence.token, divergence.other]
        return {
            **asdict(divergence),
            "texts": [self.tokenizer.decode([token]) for token in tokens],
            "exact": self.known[prefix][tokens].tolist(),
            "plain_gap": divergence.plain_gap,
            "own_gap": divergence.own_gap,
            "is_near_tie": divergence.plain_gap + divergence.own_gap <= limit,
        }


def describe_reference(reference: Reference, dtype: torch.dtype) -> dict[str, Any]:
    gaps = torch.tensor(find_gaps(reference.texts.values(), dtype), dtype=torch.float64)
    texts = [text.token_ids for text in reference.texts.values()]
    return {
        "name": reference.name,
        "num_texts": len(texts),
        "num_tokens": reference.num_tokens,
        "repeated_4grams": share_of_repeated_ngrams(texts),
        "gap_steps": {name: float(gaps.quantile(q)) for name, q in (("p1", 0.01), ("p10", 0.1), ("median", 0.5))},
        "equal_tops": int((gaps == 0).sum()),
    }


def describe_row(reference: Reference, name: str, tally: Tally, judge: Judge, limit: float) -> dict[str, Any]:
    changes = torch.tensor(tally.changes, dtype=torch.float64)
    divergences = [judge(reference, one, limit) for one in tally.divergences]
    return {
        "name": name,
        "reference": reference.name,
        "num_tokens": tally.num_tokens,
        "num_divergences": len(divergences),
        "per_10000": tally.per_10000,
        "standard_error": 1e4 * len(divergences) ** 0.5 / tally.num_tokens,
        "num_first": sum(one["is_first"] for one in divergences),
        "num_until_first": tally.num_until_first,
        "first_per_10000": tally.first_per_10000,
        "tokens_per_pass": tally.num_emitted / tally.num_passes,
        "equal_rows": tally.num_equal_rows / max(len(tally.changes), 1),
        "change_steps": {label: float(changes.quantile(q)) for label, q in QUANTILES.items()},
        "num_near_ties": sum(one["is_near_tie"] for one in divergences),
        "num_exact_for_text": sum(one["exact"][0] > one["exact"][1] for one in divergences),
        "divergences": divergences,
    }


if __name__ == "__main__":
    sys.exit(main())
