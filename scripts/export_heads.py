"""Writes trained heads as an inference engine, or their method's authors, read them.

    draftsmith export --heads examples/heads/eagle3 --target examples/chat-13m --format vllm \\
        --output outputs/eagle3-vllm
    draftsmith export --heads HEADS --target TARGET --format speculators --output OUT --push_to_hub true

The folder is complete or not written: the heads are read back, and must be the same bit for bit. Its model card has the
command that serves them.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draftsmith.heads import DraftHeads
from draftsmith.heads.checkpoint import SCRATCH, replace_checkpoint
from draftsmith.heads.config import is_hub_id, public_name
from draftsmith.heads.draft_vocabulary import write_counts
from draftsmith.heads.formats.format import Exported, Format
from draftsmith.heads.formats.registry import FORMATS, find_format
from draftsmith.inference import Target
from draftsmith.scripts.conversion.serving_card import fill_commands, fill_python, render_serving_card
from draftsmith.scripts.shared.model_loading import check_folder, check_new_folder, load_target
from draftsmith.training.data.options import option
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

NAMES = list(dict.fromkeys(known.name for known in FORMATS if known.kinds))
# Keys of a config that are about a file or a place, not about the heads.
_NOTES = (
    *("_name_or_path", "architectures", "dtype", "transformers_version"),
    *("format_version", "target_name_or_path", "target_adapter"),
)
_ADAPTER_NOTE = (
    "The heads were trained for the target with an adapter, which is not in this folder: serve the target with the "
    "adapter merged into it."
)


@dataclass
class ExportArguments:
    """Options of `draftsmith export`."""

    heads: str = option(help="Trained heads: a folder or a hub id.")
    target: str = option(help="Their target: a folder, a hub id or a GGUF file.")
    format: str = option(help=f"Format: {', '.join(NAMES)}.", metadata={"choices": NAMES})
    output: str = option(help="Folder to write, empty or not there yet.")
    target_gguf: str | None = option(
        default=None, help="The target's GGUF file, whose tokenizer the heads' file needs (format gguf)."
    )
    push_to_hub: bool = option(default=False, help="Upload the folder to the hub.")
    repo_id: str | None = option(default=None, help="Hub repository; none = the folder's name.")

    def __post_init__(self) -> None:
        if self.repo_id is not None and not self.push_to_hub:
            raise ValueError("got --repo_id without --push_to_hub true: nothing is uploaded")
        if self.push_to_hub and self.repo_id is None:
            raise ValueError("--push_to_hub needs --repo_id: the model card names the repository")


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("draftsmith export"):
        (args,) = ProgramParser([ExportArguments], doc=__doc__).read(argv)
        run(args)


def run(args: ExportArguments) -> None:
    output = check_new_folder(args.output)
    check_folder(args.heads)
    target, _ = load_target(args.target, device="cpu", keeps_dtype=True)
    heads: DraftHeads = DraftHeads.from_pretrained(args.heads, target=target)
    known = find_format(args.format, heads.config.head_type)
    if args.target_gguf is not None:
        known = known.with_target_file(args.target_gguf)
    if heads.wants_token_counts:
        raise ValueError(f"{args.heads} has no draft vocabulary yet: train the heads first")
    exported = known.write(heads.config, heads.state_dict(), target)
    if heads.config.target_adapter:
        exported = replace(exported, notes=(*exported.notes, _ADAPTER_NOTE))
    if args.push_to_hub and exported.not_uploaded:
        raise ValueError(f"--push_to_hub is not possible: {exported.not_uploaded}")
    verifier = exported.config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    if args.push_to_hub and verifier is not None and not is_hub_id(verifier):
        raise ValueError(
            f"--push_to_hub is not possible: config.json would name the target as {verifier!r}, where "
            "engines look for it; give the target's hub id as --target"
        )
    # What other people read names no folder of this machine.
    is_public = args.push_to_hub or known.needs_this_library
    card = render_serving_card(
        exported,
        name=known.name,
        kind=heads.config.head_type,
        heads=args.repo_id or (output.name if is_public else args.output),
        target=public_name(args.target) if is_public else args.target,
    )
    write_checked(exported, known, heads, target, output, card, args.repo_id)
    count = len(exported.tensors)
    print(f"Wrote {heads.config.head_type} heads, {count} tensors, to {args.output} (format {known.name}).")
    for note in exported.notes:
        print(f"note: {note}")
    if commands := fill_commands(exported, heads=args.output, target=args.target):
        print("Serve them with:")
        print("\n".join(f"  {command}" for command in commands))
    if python := fill_python(exported, heads=args.output, target=args.target):
        print("Run them with:")
        print("\n".join(f"  {line}".rstrip() for line in python.splitlines()))
    if args.push_to_hub:
        upload(args, output)


def upload(args: ExportArguments, output: Path) -> None:
    """Uploads a complete folder. The command that repeats it comes first, for an upload that fails."""
    command = shlex.join(["hf", "upload", str(args.repo_id), args.output, "."])
    print(f"Uploading. If that fails, repeat it: {command}", flush=True)
    api = HfApi()
    repository = api.create_repo(str(args.repo_id), exist_ok=True).repo_id
    place = api.upload_folder(folder_path=output, repo_id=repository, ignore_patterns=[f"{SCRATCH}/*"])
    print(f"Uploaded to {place}")


def write_checked(
    exported: Exported, known: Format, heads: DraftHeads, target: Target, output: Path, card: str, place: str | None
) -> None:
    """Writes the folder, unless what was written does not come back as the same heads.

    Args:
        place: the hub id under which users will find the heads, if there is one.
    """
    with replace_checkpoint(output) as scratch:
        exported.save(scratch, place)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        if known.needs_this_library and heads.token_counts is not None:  # engines would take the file for weights
            write_counts(scratch, heads.token_counts)
        again: DraftHeads = DraftHeads.from_pretrained(scratch, target=target)
        mine, theirs = heads.state_dict(), again.state_dict()
        changed = [name for name in mine if name not in theirs or not torch.equal(mine[name], theirs[name])]
        settings, others = (_comparable(one.config.to_dict()) for one in (heads, again))
        changed += [key for key in settings if settings[key] != others.get(key)]
        if changed:
            raise ValueError(f"{known.title} does not give {', '.join(changed)} back: please report this")


def _comparable(value: Any) -> Any:
    """A config without `_NOTES`, which a config inside it (`stock_layer`) has as well, and numbers as float32: GGUF
    stores 1e-5 so, and targets from GGUF files have it so."""
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items() if key not in _NOTES}
    return torch.tensor(value).item() if isinstance(value, float) else value


if __name__ == "__main__":
    main()
