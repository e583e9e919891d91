"""Output in a terminal: replies with accepted drafts in colour, and lines of counts."""

from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.inference import GenerationStats, StepTokens
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer

_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}")
_CONTROLS[0x1B] = "\N{SYMBOL FOR ESCAPE}"
# By depth, the last one for all deeper ones. Terminals show these names in shades that fit their background.
DEPTH_STYLES = ("green", "cyan", "blue", "magenta", "yellow", "red")


def style_of(depth: int) -> str:
    """The style of a token of this depth; 0, the target's own, is plain."""
    return DEPTH_STYLES[min(depth, len(DEPTH_STYLES)) - 1] if depth else ""


class ReplyPrinter:
    """Prints each step's tokens: accepted drafts in the colour of their depth, the target's own plain."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        self.console = console
        self.text = ""
        self.token_ids: list[int] = []
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def add(self, tokens: StepTokens) -> None:
        self.token_ids += tokens
        for token_id, depth in zip(tokens, tokens.depths, strict=True):
            self._print(self._detokenizer.add(token_id), depth)
        self.console.file.flush()

    def finish(self) -> None:
        """Prints the held-back text, and ends the line."""
        self._print(self._detokenizer.flush(), 0)
        self.console.print()

    def _print(self, piece: str, depth: int) -> None:
        if piece:
            self.text += piece
            self.console.print(Text(without_escapes(piece), style=style_of(depth)), end="", soft_wrap=True)


def without_escapes(text: str) -> str:
    """A model's text must not steer the terminal."""
    return text.translate(_CONTROLS)


def describe(stats: GenerationStats, *, has_drafter: bool, has_color: bool) -> Text:
    """One line about a reply."""
    line = Text(f"{stats.num_new_tokens} tokens in {stats.seconds['total']:.2f} s, {speed_of(stats):.1f} tokens/s")
    if has_drafter:
        line.append(f", acceptance length {stats.acceptance_length:.2f}")
        if has_color:
            line.append("; drafted at depth ")
            for depth in range(1, len(DEPTH_STYLES) + 1):
                line.append(f"{depth} ", style_of(depth))
            line.append("or more, plain: the target's own")
    return line


def speed_of(stats: GenerationStats) -> float:
    """Tokens per second, the prompt's pass included."""
    return stats.num_new_tokens / stats.seconds["total"]
