"""Trains heads on as many tokens in every way of configs/ablation, measures them, and writes a page comparing them.

    python scripts/benchmarks/ablation.py --conversations FILE [--jobs 2] [--only eagle3 hass]

Run the same command again to go on after an interruption: replies, checkpoints and finished runs are kept in --output.
The page is written anew after each run.
"""

from __future__ import annotations

import difflib
import json
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import HfArgumentParser

from scripts.benchmarks.ablation_data import DataPlan, prepare_data
from scripts.benchmarks.ablation_measure import OPTIONS, MeasureArguments
from scripts.benchmarks.ablation_render import read_page, write_page
from scripts.benchmarks.ablation_runs import LABELS, REFERENCE, Programs, Run, finish, store_features


@dataclass
class AblationArguments:
    conversations: str | None = field(
        default=None,
        metadata={
            "help": "People's conversations with an assistant (ShareGPT or `messages`): the target replies to their "
            "prompts. Not needed again once the data sets are made."
        },
    )
    replies: str | None = field(
        default=None,
        metadata={
            "help": "The target's replies to prompts of --conversations, if generate_data.py has written them already "
            "(on a GPU, say); none = it writes --num_conversations of them first."
        },
    )
    output: str = field(default="outputs/ablation", metadata={"help": "Folder of data, runs and results."})
    page: str | None = field(
        default=None, metadata={"help": "Write PAGE.md, PAGE.json and pictures; none = OUTPUT/ablation."}
    )
    reuse_page: bool = field(
        default=False,
        metadata={
            "help": "Do not run again what PAGE.json holds of the same settings and as many tokens, made on another "
            "machine or in an --output that is gone."
        },
    )
    only: list[str] = field(
        default_factory=list, metadata={"help": f"Runs to do, of: {', '.join(LABELS)}; none = all."}
    )
    budget: int = field(default=3_000_000, metadata={"help": "Training tokens of every run, in all of its epochs."})
    # About 136 tokens each, and a seventh of them is of no use.
    num_conversations: int = field(default=10_400, metadata={"help": "Conversations that the target replies to."})
    prompts: str = field(default="examples/prompts.jsonl", metadata={"help": "Prompts that acceptance is measured on."})
    num_prompts: int | None = field(default=None, metadata={"help": "The first so many of them; none = all."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens decoded for each of them."})
    tree: str = field(default="dynamic:6,4,24", metadata={"help": "The token tree of all measurements."})
    jobs: int = field(default=1, metadata={"help": "Runs at a time."})
    threads: int = field(default=1, metadata={"help": "CPU threads of a run."})
    seed: int = field(default=0, metadata={"help": "Of the prompts drawn and the target's replies."})

    def __post_init__(self) -> None:
        for name in ("budget", "num_conversations", "max_new_tokens", "jobs", "threads", "num_prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"got --{name} {value}: give at least 1")
        for name in self.only:
            if name not in LABELS:
                near = difflib.get_close_matches(name, LABELS, n=1, cutoff=0.0)[0]
                raise ValueError(f"got --only {name}; did you mean {near}? There are {', '.join(LABELS)}")


def run(args: AblationArguments) -> list[str]:
    """Does what is missing, and returns what failed: a line for each run."""
    output = Path(args.output)
    reference = Run(REFERENCE, output).settings()
    data = prepare_data(
        DataPlan(
            folder=output,
            conversations=Path(args.conversations) if args.conversations is not None else None,
            replies=Path(args.replies) if args.replies is not None else None,
            target=reference["target"],
            budget=round(args.budget / reference["num_train_epochs"]),
            max_length=reference["max_length"],
            num_conversations=args.num_conversations,
            seed=args.seed,
        )
    )
    runs = {name: Run(name, output) for name in LABELS}
    page = Path(args.page) if args.page is not None else output / "ablation"
    asked = MeasureArguments(
        target=reference["target"],
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
        tree=args.tree,
        json="",
    )
    options = {name: getattr(asked, name) for name in OPTIONS}
    results = read_page(page, data, runs, options) if args.reuse_page else {}
    results |= {name: result for name, run in runs.items() if (result := run.read_result(options)) is not None}
    wanted = [name for name in args.only or LABELS if name not in results]
    programs = Programs(args.threads)
    measure = ["--target", reference["target"], "--prompts", args.prompts, "--tree", args.tree]
    measure += ["--max_new_tokens", str(args.max_new_tokens)]
    measure += ["--num_prompts", str(args.num_prompts)] if args.num_prompts is not None else []
    texts = output / "plain.json"

    def write() -> None:
        if results:
            ordered = {name: results[name] for name in LABELS if name in results}
            write_page(page, data, ordered, [LABELS[name] for name in LABELS if name not in results])

    failures = []
    pool = ThreadPoolExecutor(args.jobs)
    try:
        if wanted and not (texts.exists() and json.loads(texts.read_text(encoding="utf-8"))["options"] == options):
            print("decoding plainly, for the texts to compare with", flush=True)
            programs.run(
                "scripts/benchmarks/ablation_measure.py", *measure, "--json", str(texts), log=output / "plain.log"
            )
        store_features((run for name, run in runs.items() if name in wanted), programs)
        futures: dict[Future[dict[str, Any]], str] = {
            pool.submit(finish, runs[name], programs, [*measure, "--texts", str(texts)]): name for name in wanted
        }
        for future in as_completed(futures):
            name = futures[future]
            try:
                results[name] = future.result()
            except (RuntimeError, OSError, ValueError) as error:
                failures.append(f"{name}: {error}")
                print(failures[-1], flush=True)
                continue
            lengths = {t: f"{one['acceptance_length']:.3f}" for t, one in results[name]["temperatures"].items()}
            print(f"{name}: acceptance length by temperature {lengths}", flush=True)
            write()
    finally:
        programs.stop()
        pool.shutdown(cancel_futures=True)
    write()
    return failures


def main() -> None:
    parser = HfArgumentParser(AblationArguments, description=__doc__.partition("\n")[0])  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ablation.py: stopped; the same command goes on from here"))
    try:
        (args,) = parser.parse_args_into_dataclasses()
        failures = run(args)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"ablation.py: {error}")
    if failures:
        sys.exit("\n".join(["ablation.py: not finished (the same command tries again):", *failures]))


if __name__ == "__main__":
    main()
