"""Trains Medusa and EAGLE-3 heads on chat-13m in a few minutes, then compares them with plain decoding.

    make demo
    python examples/demo.py --max_steps 20 --num_prompts 2    # a quick look

`draftsmith train` trains the heads on conversations that the target wrote. Then transformers, plain decoding, the
new heads, and the heads of examples/heads (trained longer) decode prompts that no heads have seen. The results are in
examples/output: report.json, plot.png and the new heads.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith import Decoder, Drafter, DraftHeads, Target
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.chat.printer import style_of
from draftsmith.scripts.measuring.contenders import make_contenders
from draftsmith.scripts.measuring.environment import describe_environment
from draftsmith.scripts.measuring.matrix import measure_with_progress
from draftsmith.scripts.measuring.measure import Contender, Prompt, Settings, load_prompts
from draftsmith.scripts.measuring.plot import draw_plot
from draftsmith.scripts.measuring.report import headline, make_report, make_rows, write_json
from draftsmith.scripts.measuring.table import Row, make_grids
from draftsmith.scripts.shared.model_loading import DTYPES, encode_messages, load_heads, load_target
from draftsmith.scripts.shared.side_by_side import Recording, record_side_by_side
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

ROOT = Path(__file__).resolve().parents[1]
CONFIG_ENDING = "-chat-13m-quick"
# A prompt that the embedded target answers well.
SAMPLE, SAMPLE_SEED = "What do you think about football?", 8


@dataclass
class DemoArguments:
    target: str = option(default="examples/chat-13m", help="The target: a folder or a hub id.")
    conversations: str = option(
        default="examples/conversations.jsonl.gz", help="Conversations to train on, written by the target."
    )
    prompts: str = option(default="examples/prompts.jsonl", help="Held-out prompts to decode.")
    output: str = option(default="examples/output", help="Folder for the report, the plot and the heads.")
    max_steps: int | None = option(default=None, help="Training steps of each kind; none = as in its config.")
    train_options: list[str] = option(
        default_factory=list, help="More training options, key=value (see draftsmith train --help)."
    )
    # In float32, texts are identical to the last token, but every node of the tree costs a CPU time.
    tree: str = option(default="dynamic:2,2,4", help="Token tree (see draftsmith bench --help).")
    dtype: str = option(
        default="float32", help="Dtype of target and heads while decoding.", metadata={"choices": list(DTYPES)}
    )
    compile: bool = option(default=True, help="Compile the decoding. Small targets gain most.")
    num_prompts: int = option(default=6, help="Prompts to decode.")
    max_new_tokens: int = option(default=96, help="Tokens decoded for each prompt.")
    repeats: int = option(default=2, help="Rounds over the prompts.")
    threads: int | None = option(default=None, help="CPU threads; none = one per core.")

    def __post_init__(self) -> None:
        for name in ("max_steps", "num_prompts", "max_new_tokens", "repeats", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"got --{name} {value}: give at least 1")
        for words in self.train_options:
            key, equals, _ = words.partition("=")
            if not (key.isidentifier() and equals):
                raise ValueError(f"got --train_options {words!r}: write key=value, for example learning_rate=1e-3")


def find_recipes() -> dict[str, Path]:
    """The quick training config of every kind of heads."""
    configs = sorted((ROOT / "configs" / "train").glob(f"*{CONFIG_ENDING}.yaml"))
    return {path.stem.removesuffix(CONFIG_ENDING): path.relative_to(ROOT) for path in configs}


def train_command(recipe: Path, output: Path, args: DemoArguments) -> list[str]:
    """Arguments of `draftsmith`, as a user would type them in the repository's root."""
    options = {"target": args.target, "dataset": args.conversations, "output_dir": str(output), "use_cpu": "true"}
    if args.max_steps is not None:
        options["max_steps"] = str(args.max_steps)
    options |= dict(option.split("=", 1) for option in args.train_options)
    return ["train", "--config", str(recipe), *(word for key, value in options.items() for word in (f"--{key}", value))]


def train(recipe: Path, output: Path, args: DemoArguments, console: Console) -> float:
    """Trains one kind with its output shown; returns the seconds it took."""
    command = train_command(recipe, output, args)
    console.print(Text(f"$ draftsmith {shlex.join(command)}", "bold cyan"), soft_wrap=True)
    console.file.flush()
    if (output / "training_record.json").is_file():  # what an earlier demo left
        shutil.rmtree(output)
    # PASSIVE: waiting threads sleep; spinning ones lose most of their time on a machine that does other work too.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **threads}
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "draftsmith", *command], cwd=ROOT, env=environment) as trained:
        try:
            trained.wait()
        except KeyboardInterrupt:  # training has it too, and saves a checkpoint
            trained.wait()
            raise
    if trained.returncode:
        raise ValueError(f"training with {recipe} failed; its output is above")
    return time.perf_counter() - start


def gather_heads(trained: dict[str, Path], target: Target) -> dict[str, DraftHeads]:
    """The new heads, each followed by the repository's heads of the same kind."""
    heads = {}
    for kind, path in trained.items():
        heads[f"{kind}, trained here"] = load_heads(str(path), target)
        committed = ROOT / "examples" / "heads" / kind
        if (committed / "config.json").is_file():
            heads[f"{kind}, trained longer"] = load_heads(str(committed), target)
    return heads


def compare(
    heads: dict[str, DraftHeads], target: Target, prompts: list[Prompt], args: DemoArguments
) -> tuple[list[Contender], list[Row]]:
    """Decodes the prompts with all contenders in turns."""
    settings = make_settings(args)
    contenders = make_contenders(target, heads, [args.tree], settings, modes=(args.compile,))
    measure_with_progress(contenders, prompts, settings)
    return contenders, make_rows(contenders, prompts, settings, target)


def make_settings(args: DemoArguments) -> Settings:
    return Settings(max_new_tokens=args.max_new_tokens, repeats=args.repeats)


def show_sample(
    name: str, drafter: Drafter, tokenizer: Any, target: Target, args: DemoArguments, console: Console
) -> None:
    """One reply, decoded plainly and with drafts, side by side; drafted tokens in colour, or in brackets where there is
    no colour."""
    has_brackets = not console.is_terminal or console.no_color
    input_ids = encode_messages(tokenizer, [{"role": "user", "content": SAMPLE}]).to(target.device)
    decoders = (Decoder(target, compile=args.compile), Decoder(target, drafter, tree=args.tree, compile=args.compile))
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "temperature": 0.7, "seed": SAMPLE_SEED}
    recordings = record_side_by_side(*decoders, input_ids, repeats=args.repeats, **options)
    names = ["plain decoding", f"{name}, the same text"]
    table = Table(
        *(f"{name}: {one.tokens_per_second:.0f} tokens/s" for name, one in zip(names, recordings, strict=True))
    )
    table.add_row(*(_colour(one, tokenizer, has_brackets=has_brackets) for one in recordings))
    legend = "In [brackets]" if has_brackets else "In colour"
    console.print(f"\n> {SAMPLE}   (temperature 0.7, seed {SAMPLE_SEED})", markup=False)
    console.print(table)
    console.print(f"{legend}: drafted by the heads and accepted. The target added the rest itself.\n", markup=False)


def _colour(recording: Recording, tokenizer: Any, *, has_brackets: bool) -> Text:
    detokenizer, text = IncrementalDetokenizer(tokenizer), Text()
    for step in recording.steps:
        pieces = [detokenizer.add(token) for token in step.token_ids]
        drafted, rest = "".join(pieces[: step.num_drafted]), "".join(pieces[step.num_drafted :])
        text.append(f"[{drafted}]" if has_brackets and drafted else drafted, "" if has_brackets else style_of(1))
        text.append(rest)
    return text.append(detokenizer.flush())


def run(args: DemoArguments, console: Console) -> list[Row]:
    os.chdir(ROOT)
    start = time.perf_counter()
    torch.set_num_threads(args.threads or os.cpu_count() or 1)
    # Before the minutes of training, so that a wrong option is reported at once.
    resolve_policy(args.tree, None)
    target, tokenizer = load_target(args.target, dtype=args.dtype, device="cpu")
    prompts, _ = load_prompts(
        Path(args.prompts), tokenizer, target, num_prompts=args.num_prompts, max_new_tokens=args.max_new_tokens
    )
    output = Path(args.output)
    trained = {kind: output / "trained" / kind for kind in find_recipes()}
    seconds = {kind: train(recipe, trained[kind], args, console) for kind, recipe in find_recipes().items()}
    heads = gather_heads(trained, target)
    contenders, rows = compare(heads, target, prompts, args)
    environment = describe_environment(
        target,
        make_settings(args),
        target=args.target,
        trees=[args.tree],
        prompts=args.prompts,
        num_prompts=len(prompts),
        training_seconds=seconds,
    )
    grids = make_grids(rows, environment)
    for grid in grids:
        grid.print(console)
    write_json(output / "report.json", [make_report(environment, rows, contenders)])
    draw_plot(output / "plot.png", rows, grids[0].title)
    name = "eagle3, trained longer" if "eagle3, trained longer" in heads else list(heads)[-1]
    show_sample(name, heads[name], tokenizer, target, args, console)
    for line in headline([row for row in rows if row.name.removesuffix(", compiled") in heads or not row.tree]):
        console.print(line, markup=False)
    minutes = (time.perf_counter() - start) / 60
    console.print(f"Wrote {output}/report.json, {output}/plot.png and {output}/trained in {minutes:.1f} minutes.")
    return rows


def main() -> None:
    with one_line_errors("demo.py"):
        (args,) = ProgramParser([DemoArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150, highlight=False))


if __name__ == "__main__":
    main()
