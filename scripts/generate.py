"""Chats with a target and a drafter, or answers one prompt, and shows accepted drafts in colour.

    draftsmith chat --target examples/chat-13m --heads examples/heads/eagle3
    draftsmith chat --target examples/chat-13m --heads examples/heads/eagle3 --prompt "Tell me a story."

Heads, a small model (--drafter_model) and n-grams of the text (--ngrams) can draft. Several drafters are merged: the
tree has the candidates of all of them.

In a terminal, the program is a chat: /new starts a new conversation, Ctrl-C ends a reply, Ctrl-D ends the program. With
--prompt it answers one prompt. In a pipe it answers each line of the standard input. The text goes to the standard
output, the counts to the standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.text import Text
from torch import Tensor

from inference import Decoder, GenerationStats
from inference.acceptance.rules import RULES
from inference.streaming.detokenizer import IncrementalDetokenizer
from scripts.shared.model_loading import DTYPES, TREE_HELP, encode_messages, load_drafter, load_target
from scripts.shared.one_line_errors import one_line_errors
from training.options.program_parser import ProgramParser

DRAFTED_STYLE = "bold green"
GROUPS = {
    "target and drafter": "target heads drafter_model ngrams dtype device compile pack_weights batch_invariant",
    "prompt": "prompt system raw",
    "sampling": "max_new_tokens temperature top_k top_p seed",
    "drafting": "tree acceptance staged",
    "output": "compare color",
}
DRAFTERS = "--heads, --drafter_model or --ngrams"


@dataclass
class GenerateArguments:
    target: str = field(metadata={"help": "The target: a folder or a hub id."})
    heads: str | None = field(
        default=None, metadata={"help": "Draft heads: a folder or a hub id; none = plain decoding."}
    )
    drafter_model: str | None = field(
        default=None,
        metadata={"help": "A small causal LM with the target's tokenizer, as the drafter: a folder or a hub id."},
    )
    staged: bool = field(
        default=False, metadata={"help": "N-grams draft for the --drafter_model; only with --tree chain or gamma."}
    )
    ngrams: bool = field(default=False, metadata={"help": "Also draft with n-grams of the text."})
    prompt: str | None = field(
        default=None, metadata={"help": "The prompt; none = chat in a terminal, or read lines of the standard input."}
    )
    system: str | None = field(default=None, metadata={"help": "System message of every conversation."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest reply in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    top_k: int = field(default=0, metadata={"help": "Sample only from the k likeliest tokens; 0 = from all."})
    top_p: float = field(
        default=1.0, metadata={"help": "Sample only from the likeliest tokens with this total probability."}
    )
    seed: int | None = field(default=None, metadata={"help": "Seed of the sampling; none = a new text each time."})
    tree: str | None = field(default=None, metadata={"help": f"Token tree: {TREE_HELP}."})
    acceptance: str = field(
        default="exact",
        metadata={
            "help": "Acceptance rule: exact, rejection, block_verification, typical; for sampled text. exact gives the "
            "text of plain decoding. rejection (chains, static trees) and block_verification (chains) keep the "
            "distribution. typical is lossy.",
            "choices": list(RULES),
        },
    )
    dtype: str = field(
        default="auto", metadata={"help": "Dtype of the weights; auto = as saved.", "choices": list(DTYPES)}
    )
    device: str | None = field(default=None, metadata={"help": "Device; none = cuda if there is one, else cpu."})
    compile: bool = field(default=False, metadata={"help": "Compile the decoding: a slow start, then faster steps."})
    pack_weights: bool = field(
        default=False,
        metadata={"help": "On a CPU: pack the weights for faster steps. It takes their memory once more."},
    )
    batch_invariant: bool = field(
        default=False,
        metadata={
            "help": "Score tokens alike in passes of any width, so that drafts change no bit of a text. It is slower."
        },
    )
    compare: bool = field(
        default=False, metadata={"help": "Decode each reply a second time without drafts, and print both speeds."}
    )
    raw: bool = field(default=False, metadata={"help": "Continue the prompt without the chat template."})
    color: bool = field(default=True, metadata={"help": "Show accepted drafts in colour (in a terminal)."})

    def __post_init__(self) -> None:
        has_drafter = bool(self.heads or self.drafter_model or self.ngrams)
        if self.staged and self.drafter_model is None:
            raise ValueError("got --staged without --drafter_model: give the small model that n-grams should draft for")
        if self.staged and (self.tree or "").partition(":")[0] not in ("chain", "gamma"):
            raise ValueError(
                f"got --staged with --tree {self.tree}: --staged drafts chains, so give chain, chain:LENGTH or gamma"
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"got --max_new_tokens {self.max_new_tokens}: give at least 1")
        if self.temperature < 0:
            raise ValueError(f"got --temperature {self.temperature}: give 0 for greedy decoding, or a positive number")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"got --top_k {self.top_k} and --top_p {self.top_p}: top_k is 0 or more, top_p is in (0, 1]"
            )
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1.0):
            raise ValueError("--top_k and --top_p change only sampled text: give a --temperature above 0 too")
        if self.temperature == 0 and self.acceptance != "exact":
            raise ValueError(
                f"got --acceptance {self.acceptance} for greedy decoding, where all rules are the same: give a "
                "--temperature above 0 too"
            )
        if self.raw and self.system is not None:
            raise ValueError("--system needs the chat template, and --raw leaves the template out: drop one of the two")
        if not has_drafter and self.tree is not None:
            raise ValueError(f"got --tree {self.tree} without {DRAFTERS}: nothing is drafted in plain decoding")
        if not has_drafter and self.compare:
            raise ValueError(f"got --compare without {DRAFTERS}: there is nothing to compare plain decoding with")
        if not has_drafter and self.acceptance != "exact":
            raise ValueError(
                f"got --acceptance {self.acceptance} without {DRAFTERS}: nothing is drafted in plain decoding"
            )

    def generate_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.generate`."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if kwargs["do_sample"]:
            kwargs |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return kwargs


class SpeculationPrinter:
    """An `on_step` callback that prints each step's tokens: accepted drafts in colour, the bonus token plain.

    Args:
        has_brackets: put [brackets] around accepted drafts, for places without colour.
    """

    def __init__(self, tokenizer: Any, console: Console, *, has_brackets: bool = False) -> None:
        self.console = console
        self.has_brackets = has_brackets
        self.text = ""
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def __call__(self, token_ids: list[int], num_drafted: int) -> None:
        pieces = [self._detokenizer.add(token_id) for token_id in token_ids]
        self._print("".join(pieces[:num_drafted]), is_drafted=True)
        self._print("".join(pieces[num_drafted:]), is_drafted=False)

    def finish(self) -> None:
        """Prints the held-back text, and ends the line."""
        self._print(self._detokenizer.flush(), is_drafted=False)
        self.console.print()

    def _print(self, piece: str, *, is_drafted: bool) -> None:
        if not piece:
            return
        self.text += piece
        shown = piece.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")  # a model's text must not steer the terminal
        if is_drafted and self.has_brackets:
            shown = f"[{shown}]"
        self.console.print(Text(shown, style=DRAFTED_STYLE if is_drafted else ""), end="", soft_wrap=True)
        self.console.file.flush()


def describe(stats: GenerationStats, *, has_drafter: bool, has_color: bool) -> Text:
    seconds = stats.seconds["total"]
    line = Text(f"{stats.num_new_tokens} tokens in {seconds:.2f} s, {stats.num_new_tokens / seconds:.1f} tokens/s")
    if has_drafter:
        line.append(f", acceptance length {stats.acceptance_length:.2f}")
        if has_color:
            line.append("; ").append("drafted and accepted", DRAFTED_STYLE).append(", plain: the target's own")
    return line


def read_turns(console: Console) -> Iterator[str]:
    """User turns typed in a terminal, or lines of a file or pipe."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    console.print("[dim]/new starts a new conversation, Ctrl-C ends a reply, Ctrl-D the program[/dim]")
    while True:
        try:
            if turn := console.input("[bold]> [/bold]").strip():
                yield turn
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


class Conversation:
    """The messages of a chat; makes the next prompt from them."""

    def __init__(self, tokenizer: Any, *, system: str | None, is_raw: bool) -> None:
        if not is_raw and not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: use --raw, or set tokenizer.chat_template")
        self.tokenizer = tokenizer
        self.system = system
        self.is_raw = is_raw
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def ask(self, turn: str) -> Tensor:
        """Adds a user turn, and returns the prompt: [1, L] token ids."""
        if self.is_raw:
            input_ids: Tensor = self.tokenizer(turn, return_tensors="pt")["input_ids"]
            return input_ids
        self.messages.append({"role": "user", "content": turn})
        return encode_messages(self.tokenizer, self.messages)

    def answer(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})


def reply_to(
    turn: str,
    conversation: Conversation,
    decoder: Decoder,
    console: Console,
    args: GenerateArguments,
    *,
    goes_on: bool = False,
    plain: Decoder | None = None,
) -> None:
    """Prints the reply as it is decoded and keeps it in the conversation.

    Args:
        goes_on: read only the part of the conversation that is not in the decoder's cache.
        plain: decodes the reply once more, to compare the speed.
    """
    input_ids = conversation.ask(turn).to(decoder.target.device)
    printer = SpeculationPrinter(conversation.tokenizer, console)
    stats: GenerationStats | None = None
    try:
        stats = decoder.generate(
            input_ids,
            input_ids.new_ones(input_ids.shape),
            on_step=printer,
            reuse_cache=goes_on and decoder.holds_text,
            **args.generate_kwargs(),
        ).stats
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    printer.finish()
    conversation.answer(printer.text)
    if stats is not None:
        has_color = not console.no_color and console.is_terminal
        line = describe(stats, has_drafter=decoder.drafter is not None, has_color=has_color)
        if plain is not None:
            other = plain.generate(input_ids, input_ids.new_ones(input_ids.shape), **args.generate_kwargs()).stats
            line.append(f"; plain decoding {other.num_new_tokens / other.seconds['total']:.1f} tokens/s")
        Console(stderr=True, no_color=console.no_color, highlight=False).print(line, soft_wrap=True)


def run(args: GenerateArguments) -> None:
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
    drafter = load_drafter(
        target,
        tokenizer,
        heads=args.heads,
        drafter_model=args.drafter_model,
        staged=args.staged,
        ngrams=args.ngrams,
    )
    names = ("compile", "pack_weights", "batch_invariant")
    execution = {name: getattr(args, name) for name in names}
    decoder = Decoder(target, drafter, tree=args.tree, acceptance=args.acceptance, **execution)
    plain = Decoder(target, **execution) if args.compare else None
    console = Console(no_color=not args.color or None, highlight=False)
    conversation = Conversation(tokenizer, system=args.system, is_raw=args.raw)
    is_chat = args.prompt is None and sys.stdin.isatty()
    for turn in [args.prompt] if args.prompt is not None else read_turns(console):
        if not is_chat or turn == "/new":
            conversation.reset()
        if is_chat and turn == "/new":
            continue
        try:
            reply_to(turn, conversation, decoder, console, args, goes_on=is_chat, plain=plain)
        except ValueError as error:  # usually the conversation is longer than the target's position limit
            if not is_chat:
                raise
            console.print(f"{error}\nStarting a new conversation.", style="red", markup=False)
            conversation.reset()


def main() -> None:
    with one_line_errors("generate.py"):
        (args,) = ProgramParser([GenerateArguments], doc=__doc__, groups=GROUPS).read()
        run(args)


if __name__ == "__main__":
    main()
