"""Heads that learn from the texts that they help to decode, beside the same heads frozen, and trained afterwards.

    python scripts/benchmarks/learning.py --target outputs/smollm2-135m --heads HEADS --prompts gsm8k.jsonl --limit 1000

Each --share is an arm that decodes the same prompts with the same seeds, so all arms decode the same texts. Decoding
and learning take turns in one thread, and learning gets its share of the CPU time, so that a busy machine changes
nothing. `offline` is `frozen` again, with heads that were trained on all the texts of the last arm before. A second
file of --prompts is a shift of the domain; --old_prompts, decoded by the first and the last heads, tell what was
forgotten.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder
from draftsmith.scripts.measuring.environment import describe_machine
from draftsmith.scripts.measuring.measure import Batch, load_prompts
from draftsmith.scripts.shared.model_loading import DTYPES, TREE_HELP, load_heads, load_target
from draftsmith.training.data.options import option
from draftsmith.training.learning.learner import OnlineLearner
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text

WINDOWS = 10  # in which acceptance is told


@dataclass
class LearningArguments:
    target: str = option(help="Target: a folder or hub id.")
    heads: str = option(help="Folder of trained heads.")
    prompts: list[str] = option(help="Files of conversations (JSON lines): one domain after the other.")
    old_prompts: str | None = option(default=None, help="Prompts of what the heads were trained for.")
    limit: int = option(default=1000, help="Prompts of each file.")
    share: list[float] = option(default_factory=lambda: [0.1], help="Shares of the CPU time that learning takes.")
    offline_passes: int = option(default=1, help="How often `offline` trains on all texts; 0 = not at all.")
    batch_size: int = option(default=1, help="Prompts decoded together.")
    max_new_tokens: int = option(default=100, help="Tokens decoded for each prompt.")
    temperature: float = option(default=0.7, help="Sampling temperature; 0 = greedy.")
    tree: str | None = option(default=None, help=f"Token tree: {TREE_HELP}.")
    dtype: str = option(default="auto", help="Dtype of target and heads.", metadata={"choices": list(DTYPES)})
    muon_learning_rate: float = option(default=0.03, help="As in OnlineLearner.")
    learning_rate: float = option(default=3e-4, help="As in OnlineLearner.")
    output: str = option(default="outputs/learning.json", help="The file to write.")


class Study:
    """What all arms share."""

    def __init__(self, args: LearningArguments) -> None:
        self.args = args
        self.target, tokenizer = load_target(args.target, dtype=args.dtype)
        self.domains = [self._read(file, tokenizer) for file in args.prompts]
        self.old = self._read(args.old_prompts, tokenizer) if args.old_prompts else []

    def load(self) -> DraftHeads:
        return load_heads(self.args.heads, self.target)

    def _read(self, file: str, tokenizer: Any) -> list[Batch]:
        args = self.args
        limits = {"num_prompts": args.limit, "max_new_tokens": args.max_new_tokens}
        prompts, _ = load_prompts(Path(file), tokenizer, self.target, **limits)
        return [
            Batch.of(*prompts[start : start + args.batch_size]) for start in range(0, len(prompts), args.batch_size)
        ]

    def run(self, name: str, heads: DraftHeads, share: float = 0.0) -> tuple[dict[str, Any], OnlineLearner | None]:
        """One arm: decodes all domains; learns after every batch, if it has a share."""
        args = self.args
        rates = {"muon_learning_rate": args.muon_learning_rate, "learning_rate": args.learning_rate}
        learner = OnlineLearner(self.target, heads, trial_seconds=0.0, **rates) if share else None
        decoder = Decoder(self.target, heads, tree=args.tree, learner=learner)
        before = self._measure_old(heads)
        decoding = learning = 0.0
        counts: list[tuple[int, int, float]] = []  # of each batch: passes of its rows, tokens of these, CPU seconds
        for domain in self.domains:
            for number, batch in enumerate(domain):
                start = time.thread_time()
                counts.append((*self._decode(decoder, batch, seed=number), time.thread_time() - start))
                decoding += counts[-1][2]
                while learner is not None and learner.has_work and learning < share / (1 - share) * decoding:
                    start = time.thread_time()
                    learner.work()
                    learning += time.thread_time() - start
        result = {
            "acceptance": _windows(counts, _mean_acceptance),
            "tokens_per_cpu_second": _windows(counts, lambda part: sum(c[1] for c in part) / sum(c[2] for c in part)),
            "learning_seconds": learning,
            "decoding_seconds": decoding,
            "old_acceptance": [before, self._measure_old(heads)],
            "swaps": []
            if learner is None
            else [[t.num_texts, t.before, t.after, t.first, t.length] for t in learner.trials],
            "learned_tokens": 0 if learner is None else learner.num_learned,
        }
        print(name, json.dumps(result), flush=True)
        return result, learner

    def _measure_old(self, heads: DraftHeads) -> float | None:
        decoder = Decoder(self.target, heads, tree=self.args.tree)
        counts = [(*self._decode(decoder, batch, seed=0), 0.0) for batch in self.old]
        return _mean_acceptance(counts) if counts else None

    def _decode(self, decoder: Decoder, batch: Batch, *, seed: int) -> tuple[int, int]:
        """Passes of the rows, and the tokens that they gave."""
        args, ids = self.args, batch.input_ids
        sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
        output = decoder.generate(ids, batch.attention_mask, seed=seed, max_new_tokens=args.max_new_tokens, **sampling)
        histogram = output.stats.accepted_histogram
        return sum(histogram), sum((accepted + 1) * count for accepted, count in enumerate(histogram))


def _mean_acceptance(counts: list[tuple[int, int, float]]) -> float:
    return sum(tokens for _, tokens, _ in counts) / max(1, sum(steps for steps, _, _ in counts))


def _windows(
    counts: list[tuple[int, int, float]], measure: Callable[[list[tuple[int, int, float]]], float]
) -> list[float]:
    """A number for each of `WINDOWS` parts of the batches, in their order."""
    size = -(-len(counts) // WINDOWS)
    return [round(measure(counts[start : start + size]), 4) for start in range(0, len(counts), size)]


def run(args: LearningArguments) -> None:
    study = Study(args)
    arms: dict[str, Any] = {}
    arms["frozen"], _ = study.run("frozen", study.load())
    for share in args.share:
        name = f"share {share:g}"
        arms[name], learner = study.run(name, study.load(), share)
    if args.offline_passes and args.share:
        assert learner is not None
        heads = study.load()
        student = OnlineLearner(study.target, heads, num_bytes=1 << 40)
        student.buffer = learner.buffer
        while student.num_learned < args.offline_passes * learner.buffer.num_tokens:
            student.learn()
        student.compare()
        student.swap()
        arms["offline"], _ = study.run("offline", heads)
    report = {"arguments": vars(args), "machine": describe_machine(study.target.device), "arms": arms}
    write_text(Path(args.output), json.dumps(report, indent=1) + "\n")


def main() -> None:
    with one_line_errors("scripts/benchmarks/learning.py"):
        (args,) = ProgramParser([LearningArguments], doc=__doc__).read()
        run(args)


if __name__ == "__main__":
    main()
