"""Draws an animated SVG of one reply, plain and drafted side by side, with measured times.

    python scripts/benchmarks/record.py --target outputs/smollm2-135m --heads examples/heads/smollm2-135m-eagle3 \\
        --output docs/images/demo.svg

Both decoders are this library's, and take turns in one process.
"""

from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

import torch

from draftsmith.inference import Decoder
from draftsmith.inference.streaming.detokenizer import IncrementalDetokenizer
from draftsmith.scripts.measuring.environment import describe_machine
from draftsmith.scripts.shared.model_loading import encode_messages, load_heads, load_target
from draftsmith.scripts.shared.side_by_side import Recording, record_side_by_side
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser
from draftsmith.training.whole_files import write_text

COLUMNS, CHARACTER, LINE = 50, 8.0, 19  # characters in a line; pixels of a character and of a line
MARGIN, TOP, GAP = 18, 74, 24
SLOW_DOWN = 2.0  # seconds of the picture per measured second
PAUSE = 4.0  # seconds for which both whole texts are shown
COLOURS = {"page": "#0f172a", "text": "#e2e8f0", "dim": "#94a3b8", "drafted": "#4ade80"}
Piece = tuple[float, str, bool]  # seconds, text, is it drafted


@dataclass
class RecordArguments:
    target: str = option(default="outputs/smollm2-135m", help="The target: a folder or a hub id.")
    heads: str = option(default="examples/heads/smollm2-135m-eagle3", help="Draft heads: a folder or a hub id.")
    prompt: str = option(default="What is a good way to learn a language?", help="The prompt.")
    tree: str = option(default="dynamic:3,2,8", help="Token tree.")
    max_new_tokens: int = option(default=64, help="Longest reply in tokens.")
    dtype: str = option(default="bfloat16", help="Dtype of target and heads.")
    output: str = option(default="docs/images/demo.svg", help="The SVG file to write.")


def main() -> None:
    with one_line_errors("record.py"):
        (args,) = ProgramParser([RecordArguments], doc=__doc__).read()
        torch.set_num_threads(1)
        target, tokenizer = load_target(args.target, dtype=args.dtype, device="cpu")
        packed, heads = target.with_packed_weights(), load_heads(args.heads, target)
        input_ids = encode_messages(tokenizer, [{"role": "user", "content": args.prompt}])
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "tokenizer": tokenizer}
        recordings = record_side_by_side(Decoder(packed), Decoder(packed, heads, tree=args.tree), input_ids, **options)
        plain, drafted = recordings
        if plain.token_ids != drafted.token_ids:
            raise ValueError(f"the two texts differ in {args.dtype}: give another --prompt, or --dtype float32")
        names = [f"{Path(args.target).name}, plain decoding", f"{Path(args.heads).name} heads"]
        hardware = f"{describe_machine(target.device)['cpu']}, 1 thread, {args.dtype}, packed weights"
        write_text(Path(args.output), draw(recordings, tokenizer, args.prompt, names, hardware))
        print(
            f"Wrote {args.output}: {plain.tokens_per_second:.0f} and {drafted.tokens_per_second:.0f} tokens/s, "
            f"acceptance length {drafted.acceptance_length:.2f}."
        )


def draw(recordings: list[Recording], tokenizer: Any, prompt: str, names: list[str], hardware: str) -> str:
    """The SVG: a panel for each recording, everything repeated after a pause."""
    columns = [lay_out(find_pieces(one, tokenizer)) for one in recordings]
    num_lines = max(line for column in columns for _, line, *_ in column) + 1
    panel = COLUMNS * CHARACTER
    width, height = 2 * MARGIN + 2 * panel + GAP, TOP + num_lines * LINE + 74
    cycle = max(one.seconds for one in recordings) * SLOW_DOWN + PAUSE
    ratio = recordings[1].tokens_per_second / recordings[0].tokens_per_second
    body = [_text(MARGIN, 26, f"> {prompt}", COLOURS["text"], weight="bold")]
    for place, (one, column) in enumerate(zip(recordings, columns, strict=True)):
        left = MARGIN + place * (panel + GAP)
        body.append(_text(left, 54, names[place], COLOURS["dim"]))
        for at, line, start, text, is_drafted in column:
            colour = COLOURS["drafted" if is_drafted else "text"]
            shown = _appearing(at * SLOW_DOWN, cycle)
            body.append(_text(left + start * CHARACTER, TOP + (line + 1) * LINE, text, colour, inside=shown))
        speed = f"{one.tokens_per_second:.0f} tokens/s" + (f", {ratio:.2f} × plain decoding" if place else "")
        shown = _appearing(one.seconds * SLOW_DOWN, cycle)
        body.append(_text(left, height - 42, speed, COLOURS["text"], weight="bold", inside=shown))
    note = f"Measured on {hardware}; shown {SLOW_DOWN:g} × slower. Green: accepted drafts. Same text."
    body.append(_text(MARGIN, height - 16, note, COLOURS["dim"], size=11, fit=False))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            'font-family="ui-monospace, Menlo, Consolas, monospace">',
            "<style>text{white-space:pre}</style>",  # Chromium ignores xml:space
            f'<rect width="100%" height="100%" rx="8" fill="{COLOURS["page"]}"/>',
            *body,
            "</svg>\n",
        ]
    )


def find_pieces(recording: Recording, tokenizer: Any) -> list[Piece]:
    """The text of each token, with the time of its step."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [
        (step.seconds, detokenizer.add(token), place < step.num_drafted)
        for step in recording.steps
        for place, token in enumerate(step.token_ids)
    ]
    return [*pieces, (recording.seconds, detokenizer.flush(), False)]


def lay_out(pieces: list[Piece], columns: int = COLUMNS) -> list[tuple[float, int, int, str, bool]]:
    """(seconds, line, column, text, is it drafted) of every run of characters; lines are broken between words.

    >>> lay_out([(0.1, "ab cd", True), (0.2, "e", False)], columns=5)
    [(0.1, 0, 0, 'ab ', True), (0.1, 1, 0, 'cd', True), (0.2, 1, 2, 'e', False)]
    """
    text = "".join(piece for _, piece, _ in pieces)
    wrap = TextWrapper(columns, drop_whitespace=False, replace_whitespace=False, expand_tabs=False).wrap
    lines = [line for paragraph in text.splitlines(keepends=True) for line in wrap(paragraph)]
    places = [(line, column) for line, words in enumerate(lines) for column in range(len(words))]
    marks = [(seconds, is_drafted) for seconds, piece, is_drafted in pieces for _ in piece]
    found = []
    characters = zip(marks, places, text, strict=True)
    for ((seconds, is_drafted), line), run in groupby(characters, key=lambda one: (one[0], one[1][0])):
        own = list(run)
        _, (_, column), _ = own[0]
        found.append((seconds, line, column, "".join(letter for *_, letter in own).rstrip("\n"), is_drafted))
    return found


def _appearing(at: float, cycle: float) -> str:
    """Hidden until that second of every cycle."""
    moment = min(at / cycle, 1.0)
    return (
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{moment:.5f}" calcMode="discrete" '
        f'dur="{cycle:.3f}s" repeatCount="indefinite"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    colour: str,
    *,
    inside: str = "",
    weight: str = "normal",
    size: float = 13,
    fit: bool = True,
) -> str:
    """fit: give each character the same width, whatever monospaced font is there."""
    length = f' textLength="{len(text) * CHARACTER:g}"' if fit else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size:g}" font-weight="{weight}"{length}>'
        f"{escape(text)}{inside}</text>"
    )


if __name__ == "__main__":
    main()
