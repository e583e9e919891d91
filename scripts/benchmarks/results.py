"""The results of one target: every way to decode it, llama.cpp among them, in turns and in one run.

    pip install xllamacpp    # llama.cpp
    python scripts/benchmarks/results.py --target outputs/smollm2-135m --heads HEADS ... --prompts FOLDER --limit 2
    python scripts/benchmarks/results.py --target outputs/smollm2-135m --heads HEADS ... --prompts FOLDER    # goes on

Every decoded prompt is on disk in --cells at once, and the same command goes on with what is missing, also with a
larger --limit. OUTPUT.json, OUTPUT.md and OUTPUT.svg are written from all cells.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.gguf_file import read_metadata
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import GgufEagle3
from draftsmith.inference import Decoder, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.scripts.benchmarks.llama_cpp import LlamaCppDecoding, write_heads, write_llama
from draftsmith.scripts.benchmarks.results_chart import draw
from draftsmith.scripts.benchmarks.results_summary import make_content, render_json, render_page
from draftsmith.scripts.measuring.contenders import NGRAMS, OurDecoding, TransformersDecoding
from draftsmith.scripts.measuring.environment import describe_machine, describe_program
from draftsmith.scripts.measuring.matrix import Subject, check_matrix, is_faster_compiled, load_subject
from draftsmith.scripts.measuring.measure import (
    PLAIN,
    TRANSFORMERS,
    Batch,
    Contender,
    Prompt,
    Run,
    Settings,
    decode_warm,
)
from draftsmith.scripts.shared.clock import TimeLimit
from draftsmith.scripts.shared.draft_vocabulary import SIZE_HELP, DraftVocabulary
from draftsmith.scripts.shared.model_loading import DTYPES, TREE_HELP
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text

DEFAULT = "default"
LLAMA = "llama.cpp"
LLAMA_DEPTH = 3


@dataclass
class ResultsArguments:
    target: str = option(help="Target: a folder or hub id.")
    prompts: list[str] = option(help="Files of prompts (JSON lines), or folders of them; first user turns are used.")
    heads: list[str] = option(default_factory=list, help="Folders of trained heads.")
    tree: list[str] = option(
        default_factory=lambda: ["chain:3", DEFAULT], help=f"Token trees: {TREE_HELP}; {DEFAULT} = what heads get."
    )
    draft_vocab_size: int | None = option(default=None, help=SIZE_HELP)
    limit: int = option(default=40, help="Use only the first N prompts of each file.")
    minutes: float | None = option(
        default=None, help="Write what was measured after so many minutes (of each --threads); none = all of it."
    )
    max_new_tokens: int = option(default=64, help="Tokens decoded for each prompt (fewer after an EOS).")
    temperature: list[float] = option(default_factory=lambda: [0.0, 1.0], help="Sampling temperatures; 0 = greedy.")
    threads: list[int] = option(default_factory=lambda: [1], help="Numbers of CPU threads, one after another.")
    dtype: str = option(default="bfloat16", help="Dtype of target and heads.", metadata={"choices": list(DTYPES[1:])})
    compile: bool | None = option(default=None, help="Compile heads; none = where compiled decoding is faster.")
    gguf: str | None = option(
        default=None,
        help="The target as a quantised GGUF file, for llama.cpp, which also decodes the target's dtype; none = the "
        "file in the target's folder, where `make smollm2` puts it.",
    )
    cells: str = option(default="outputs/results.jsonl", help="The file that every decoded prompt is added to.")
    output: str = option(default="outputs/results", help="Write OUTPUT.json, .md and .svg.")

    def __post_init__(self) -> None:
        self.prompts = [
            str(file) for path in map(Path, self.prompts) for file in (sorted(path.glob("*.jsonl")) or [path])
        ]
        names = [Path(file).stem for file in self.prompts]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"got --prompts with two files called {', '.join(sorted(twice))}: rename one of them")
        check_matrix(self, counts=("max_new_tokens", "limit"), lists=("prompts", "temperature", "threads"))
        if min(self.threads) < 1:
            raise ValueError(f"got --threads {' '.join(map(str, self.threads))}: give positive numbers")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ValueError(f"got --minutes {self.minutes}: give a positive number")


class Cells:
    """What was measured: a JSON line for each decoded prompt, after a line with the conditions.

    Raises:
        ValueError: the file was measured under other conditions.
    """

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may leave half a line
        records = [json.loads(line) for line in whole] or [conditions]
        if changed := [key for key, value in conditions.items() if records[0].get(key) != value]:
            told = "; ".join(f"{key} {records[0].get(key)!r} there, {conditions[key]!r} now" for key in changed)
            raise ValueError(f"{path} was measured under other conditions ({told}): move it away, or change --cells")
        self.conditions = records[0]
        write_text(path, "".join(json.dumps(one) + "\n" for one in records))
        self.found = {tuple(one["key"]): one for one in records[1:]}

    def add(self, key: tuple[int, float, str, str], **values: Any) -> None:
        """key: threads, temperature, file and prompt."""
        self.found[key] = line = {"key": key, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        print(f"[{time.strftime('%H:%M:%S')}] {' '.join(map(str, key))}", flush=True)


def fingerprint(folder: str) -> str:
    """Of the heads' configuration and weights."""
    files = sorted([*Path(folder).glob("config.json"), *Path(folder).glob("*.safetensors")])
    if len(files) < 2:
        raise ValueError(f"{folder} has no config.json or no *.safetensors: give the folder of trained heads")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def describe_conditions(args: ResultsArguments) -> dict[str, Any]:
    """What all cells share."""
    names = ("target", "dtype", "tree", "draft_vocab_size", "max_new_tokens", "compile", "gguf")
    heads = {folder: fingerprint(folder) for folder in args.heads}
    machine = describe_machine(torch.device("cpu"))
    del machine["threads"]
    return {**{name: getattr(args, name) for name in names}, **machine, "heads": heads}


def make_contenders(subject: Subject, args: ResultsArguments, folder: Path) -> Iterator[Contender]:
    """transformers, plain decoding in each way, n-grams and heads with each tree, and llama.cpp."""
    target = subject.target
    is_compiled = is_faster_compiled(target) if args.compile is None else args.compile
    yield Contender(TRANSFORMERS, decode=TransformersDecoding(target))
    yield Contender(PLAIN, decode=OurDecoding(target, None))
    packed = target.with_packed_weights()
    yield Contender(f"{PLAIN}, packed", decode=OurDecoding(packed, None))
    drafters = {**subject.drafters, NGRAMS: NgramDrafter()}
    ours: list[Contender] = []
    graphs: bool | Decoder = is_compiled  # of the target: the first heads' decoder makes them for all
    for (name, drafter), tree in product(drafters.items(), args.tree):
        contender = Contender(name, tree)
        try:
            own = target if is_compiled else packed  # as the fastest plain decoding
            policy = None if tree == DEFAULT else tree
            contender.decode = OurDecoding(own, drafter, tree=policy, is_compiled=graphs)
        except ValueError as error:
            contender.problem = str(error)
        else:
            graphs = contender.decode.decoder if graphs is True else graphs
        ours.append(contender)
    if is_compiled:
        yield Contender(f"{PLAIN}, compiled", decode=OurDecoding(target, None, is_compiled=graphs))
    yield from ours
    if (quantised := find_gguf(args, target)) is not None:
        yield from make_rivals(subject, quantised, folder)


def find_gguf(args: ResultsArguments, target: Target) -> Path | None:
    """The target as a quantised GGUF file, or None.

    Raises:
        ValueError: it is another model.
    """
    file = Path(args.gguf) if args.gguf is not None else next(Path(args.target).glob("*.gguf"), None)
    if file is None:
        return None
    found, config = read_metadata(file), target.text_config
    sizes = {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
    if any(found.get(f"llama.{name}") != size for name, size in sizes.items()):
        raise ValueError(f"--gguf {file} is not {args.target}: its {' or '.join(sizes)} is another one")
    return file


def make_rivals(subject: Subject, quantised: Path, folder: Path) -> Iterator[Contender]:
    """llama.cpp with the target in its own dtype and quantised, plain and with every EAGLE-3 heads."""
    own, target = folder / "target.gguf", subject.target
    if not own.exists():
        write_llama(own, target, subject.tokenizer)
    files = {str(target.dtype).removeprefix("torch."): own, quantised.stem.rpartition(".")[2]: quantised}
    heads = {n: one for n, one in subject.drafters.items() if isinstance(one, DraftHeads)}
    heads = {n: one for n, one in heads.items() if one.config.head_type in GgufEagle3().kinds}
    for (label, model), name in product(files.items(), [None, *heads]):
        rival = f"{LLAMA} {label}"
        contender = Contender(f"{name}, {rival}", f"chain:{LLAMA_DEPTH}") if name else Contender(rival)
        try:
            file = write_heads(folder / name.replace("/", "-"), heads[name], target, quantised) if name else None
            contender.decode = LlamaCppDecoding(model, file, depth=LLAMA_DEPTH)
        except ValueError as error:
            contender.problem = str(error)
        yield contender


def take_turns(subject: Subject, count: int) -> list[tuple[str, Prompt]]:
    """The first prompt of every file, then the second of every file, and so on, with the files' names."""
    files = {Path(path).stem: found[:count] for path, (found, _) in subject.prompts.items()}
    rounds = zip_longest(*([(name, prompt) for prompt in found] for name, found in files.items()))
    return [one for turn in rounds for one in turn if one is not None]


def measure(args: ResultsArguments, subject: Subject, cells: Cells) -> None:
    """A cell for each prompt and temperature that has none, on torch's threads: every contender's tokens, seconds and
    steps. The contender that begins changes from prompt to prompt."""
    limit = TimeLimit(60 * args.minutes if args.minutes is not None else math.inf)
    cases = [
        ((torch.get_num_threads(), temperature, name, prompt.id), prompt)
        for (name, prompt), temperature in product(take_turns(subject, args.limit), args.temperature)
    ]
    cases = [case for case in cases if case[0] not in cells.found]
    if not cases:
        return
    with tempfile.TemporaryDirectory() as folder:
        contenders = list(make_contenders(subject, args, Path(folder)))
        problems = {one.name: one.problem for one in contenders if one.problem}
        runnable = [one for one in contenders if not one.problem]
        for one in runnable:
            decode_warm(one, Batch.of(cases[0][1]), Settings(max_new_tokens=8))
        for place, (key, prompt) in enumerate(cases):
            if limit.is_over:
                break
            first = place % len(runnable)
            settings = Settings(args.max_new_tokens, key[1], tokenizer=subject.tokenizer)
            runs = decode_all(runnable[first:] + runnable[:first], prompt, settings)
            cells.add(key, runs=runs, problems=problems)


def decode_all(contenders: Sequence[Contender], prompt: Prompt, settings: Settings) -> list[dict[str, Any]]:
    """One run of each contender. `same`: whether its text is the reference's; None where it may be another one."""
    runs = {(one.name, one.tree): decode_warm(one, Batch.of(prompt), settings) for one in contenders}
    reference = runs[PLAIN if settings.is_sampled else TRANSFORMERS, ""].texts
    found = []
    for (name, tree), run in runs.items():
        is_comparable = not settings.is_sampled or run.stats is not None
        same = run.texts == reference if is_comparable else None
        found.append({"name": name, "tree": tree, **count(run), "same": same})
    return found


def count(run: Run) -> dict[str, Any]:
    """`steps` and `step_tokens` are of verify steps; of decoders whose steps are unknown, passes and all tokens."""
    steps, step_tokens = run.num_forwards, run.num_tokens
    if run.stats is not None:
        steps = run.stats.num_verify_steps
        step_tokens = round(run.stats.acceptance_length * steps)
    return {"tokens": run.num_tokens, "seconds": run.seconds, "steps": steps, "step_tokens": step_tokens}


def run(args: ResultsArguments) -> dict[str, Any]:
    """Measures what is missing, and writes what follows from all cells."""
    cells = Cells(Path(args.cells), describe_conditions(args))
    for threads in args.threads:
        torch.set_num_threads(threads)
        torch.compiler.reset()  # graphs are made for a number of threads
        subject = load_subject(
            args.target,
            heads=args.heads,
            prompts=args.prompts,
            num_prompts=args.limit,
            max_new_tokens=args.max_new_tokens,
            dtype=args.dtype,
            device="cpu",
            vocabulary=None if args.draft_vocab_size is None else DraftVocabulary(args.draft_vocab_size, []),
        )
        measure(args, subject, cells)
        del subject
    content = make_content(cells.conditions | describe_program(), list(cells.found.values()))
    files = {".json": render_json(content), ".md": render_page(content)}
    if content["reports"]:
        files[".svg"] = draw(content)
    for ending, text in files.items():
        write_text(Path(f"{args.output}{ending}"), text)
    print(f"wrote {', '.join(args.output + ending for ending in files)}")
    return content


def main() -> None:
    with one_line_errors("results.py"):
        (args,) = ProgramParser([ResultsArguments], doc=__doc__).read()
        run(args)


if __name__ == "__main__":
    main()
