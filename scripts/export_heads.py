"""Writes trained heads as an inference engine, or their method's authors, read them.

    python scripts/export_heads.py --heads examples/heads/eagle3 --target examples/chat-13m --format vllm \\
        --output outputs/eagle3-vllm
    python scripts/export_heads.py --heads HEADS --target TARGET --format speculators --output OUT --push_to_hub true

The folder is complete or not written: the heads are read back, and must be the same bit for bit. Its model card has the
command that serves them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import HfApi

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from heads import DraftHeads
from heads.checkpoint import replace_checkpoint
from heads.formats.format import Exported, Format
from heads.formats.registry import FORMATS, find_format
from inference import Target
from scripts.doors.serving_card import fill_commands, render_serving_card
from scripts.shared.model_loading import check_folder, load_target
from scripts.shared.one_line_errors import one_line_errors
from scripts.shared.whole_files import check_new_folder
from training.options.program_parser import ProgramParser

NAMES = list(dict.fromkeys(known.name for known in FORMATS if known.kinds))
_ADAPTER_NOTE = (
    "The heads were trained for the target with an adapter, which is not in this folder: serve the target with the "
    "adapter merged into it."
)


@dataclass
class ExportArguments:
    """Options of export_heads.py."""

    heads: str = field(metadata={"help": "Trained heads: a folder or a hub id."})
    target: str = field(metadata={"help": "Their target: a folder or a hub id."})
    format: str = field(metadata={"help": "Who reads them.", "choices": NAMES})
    output: str = field(metadata={"help": "Folder to write, empty or not there yet."})
    target_gguf: str | None = field(
        default=None, metadata={"help": "The target's GGUF file, whose tokenizer the heads' file needs (format gguf)."}
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Upload the folder to the hub."})
    repo_id: str | None = field(default=None, metadata={"help": "Hub repository; none = the folder's name."})


def main(argv: list[str] | None = None) -> int:
    with one_line_errors("export_heads.py"):
        (args,) = ProgramParser([ExportArguments], doc=__doc__).read(argv)
        run(args)
    return 0


def run(args: ExportArguments) -> None:
    output = check_new_folder(args.output)
    if args.repo_id is not None and not args.push_to_hub:
        raise ValueError("got --repo_id without --push_to_hub true: nothing is uploaded")
    if args.push_to_hub and args.repo_id is None:
        raise ValueError("--push_to_hub needs --repo_id: the model card names the repository")
    check_folder(args.heads)
    target, _ = load_target(args.target, device="cpu")
    heads: DraftHeads = DraftHeads.from_pretrained(args.heads, target=target)
    known = find_format(args.format, heads.config.head_type)
    if args.target_gguf is not None:
        known = known.with_target_file(args.target_gguf)
    if heads.wants_token_counts:
        raise ValueError(f"{args.heads} has no draft vocabulary yet: train the heads first")
    exported = known.write(heads.config, heads.state_dict(), target)
    if heads.config.target_adapter:
        exported = replace(exported, notes=(*exported.notes, _ADAPTER_NOTE))
    shown = args.repo_id or args.output
    card = render_serving_card(exported, name=known.name, kind=heads.config.head_type, heads=shown, target=args.target)
    place = args.repo_id if args.repo_id is not None else str(output)
    write_checked(exported, known, heads, target, output, card, place)
    count = len(exported.tensors)
    print(f"Wrote {heads.config.head_type} heads, {count} tensors, to {args.output} (format {known.name}).")
    for note in exported.notes:
        print(f"note: {note}")
    if commands := fill_commands(exported, heads=args.output, target=args.target):
        print("Serve them with:")
        print("\n".join(f"  {command}" for command in commands))
    if args.push_to_hub:
        api = HfApi()
        repository = api.create_repo(args.repo_id, exist_ok=True).repo_id
        print(f"Uploaded to {api.upload_folder(folder_path=output, repo_id=repository)}")


def write_checked(
    exported: Exported, known: Format, heads: DraftHeads, target: Target, output: Path, card: str, place: str
) -> None:
    """Writes the folder, unless what was written does not come back as the same heads.

    Args:
        place: where users will find the heads, a folder or a hub id.
    """
    with replace_checkpoint(output) as scratch:
        exported.save(scratch, place)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        again = DraftHeads.from_pretrained(scratch, target=target).state_dict()
        mine = heads.state_dict()
        changed = [name for name in mine if name not in again or not torch.equal(mine[name], again[name])]
        if changed:
            raise ValueError(f"{known.title} does not give {', '.join(changed)} back: please report this")


if __name__ == "__main__":
    sys.exit(main())
