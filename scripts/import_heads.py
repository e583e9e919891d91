"""Turns heads that another project trained into heads of this library.

    draftsmith import --checkpoint yuhuili/EAGLE3-LLaMA3.1-Instruct-8B \\
        --target meta-llama/Llama-3.1-8B-Instruct --output outputs/imported
    draftsmith import --checkpoint DIR --target TARGET --output outputs/imported --check true

The format is seen from the files. Every tensor and every key is accounted for, or nothing is written.
`DraftHeads.from_pretrained(checkpoint, target=model)` does the same without writing.
"""

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draftsmith.heads.checkpoint import read_head_type
from draftsmith.heads.formats.published import open_published
from draftsmith.heads.formats.registry import recognize
from draftsmith.heads.importing import build_heads
from draftsmith.scripts.conversion.conventions import advise, compare_on_texts, question_prompts
from draftsmith.scripts.shared.model_loading import DTYPES, check_folder, check_new_folder, load_target
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser


@dataclass
class ImportArguments:
    """Options of `draftsmith import`."""

    checkpoint: str = option(help="Heads of another project: a folder, a hub id or a GGUF file.")
    target: str = option(help="The target that they draft for: a folder, a hub id or a GGUF file.")
    output: str = option(help="Folder to write the heads to.")
    check: bool = option(
        default=False, help="Decode a few prompts under every known convention; name the one that fits."
    )
    settings: list[str] = option(
        default_factory=list,
        help="Settings of the heads in place of those that were read, as key=value with JSON values.",
    )
    dtype: str = option(
        default="auto", help="The target's dtype; auto = as it was saved.", metadata={"choices": list(DTYPES)}
    )
    device: str | None = option(default=None, help="Device; none = cuda if there is one, else cpu.")

    def parse_settings(self) -> dict[str, Any]:
        parsed = {}
        for item in self.settings:
            key, _, value = item.partition("=")
            try:
                parsed[key] = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"got --settings {item}: write key=value, for example norm_output=true") from error
        return parsed


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("draftsmith import"):
        (args,) = ProgramParser([ImportArguments], doc=__doc__).read(argv)
        run(args)


def run(args: ImportArguments) -> None:
    settings = args.parse_settings()
    check_folder(args.checkpoint)
    if not Path(args.output).is_dir() or read_head_type(args.output) is None:  # an import may be repeated
        check_new_folder(args.output)
    if read_head_type(args.checkpoint) is not None:
        raise ValueError(f"{args.checkpoint} holds heads of this library already: use them as they are")
    target, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device, keeps_dtype=True)
    published = open_published(args.checkpoint)
    known = recognize(published)
    if known is None:
        raise ValueError(f"{args.checkpoint} holds no heads in a format that is known here")
    imported = known.read(published, target)
    imported = replace(imported, settings={**imported.settings, **settings})
    heads = build_heads(imported, target, args.checkpoint)
    for note in imported.notes:
        print(f"note: {note}")
    if args.check:
        conventions, length = compare_on_texts(heads, target, question_prompts(tokenizer))
        print(f"acceptance length {length:.2f} tokens a pass; cross-entropy of the drafts in nats where")
        for one in conventions:
            print(f"  {one.mean:6.3f}  {one.name}")
        if (advice := advise(conventions, length)) is not None:
            print(f"warning: {advice}", file=sys.stderr)
    heads.save_pretrained(args.output)
    print(
        f"{args.checkpoint} holds {known.title}.\n"
        f"Wrote {imported.kind} heads, {len(heads.state_dict())} tensors in {str(heads.dtype).removeprefix('torch.')}, "
        f"to {args.output}.\n"
        f"Next: {shlex.join(['draftsmith', 'chat', '--target', args.target, '--heads', args.output])}"
    )


if __name__ == "__main__":
    main()
