"""The console command `draftsmith NAME ...`, and `python -m draftsmith NAME ...` for launchers of several processes."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import draftsmith
from draftsmith.training.options.one_line_errors import one_line_interrupt

HELP = Path(__file__).parent / "help"  # NAME.txt: what --help prints, so that it imports nothing; a test compares
# Name -> module and purpose.
PROGRAMS = {
    "chat": ("draftsmith.scripts.generate", "chat with a target, or answer one prompt, and show accepted drafts"),
    "serve": ("draftsmith.scripts.serve", "serve a target and its heads to OpenAI's clients and to browsers"),
    "bench": ("draftsmith.scripts.benchmark", "measure drafters beside every baseline: tables, JSON"),
    "data": ("draftsmith.scripts.generate_data", "let a target write the conversations that heads learn from"),
    "inspect": ("draftsmith.scripts.inspect_data", "show and count the tokens of a data set that heads would learn"),
    "features": (
        "draftsmith.scripts.extract_features",
        "store a target's hidden states, for training without the target",
    ),
    "train": ("draftsmith.training.train_heads", "train draft heads (several processes: accelerate launch)"),
    "diagnose": ("draftsmith.scripts.diagnose", "say why heads accept few drafts, and what to do"),
    "import": ("draftsmith.scripts.import_heads", "turn heads that another project trained into heads of this library"),
    "export": ("draftsmith.scripts.export_heads", "write heads as vLLM, SGLang, llama.cpp or their authors read them"),
    "tree": ("draftsmith.scripts.build_tree", "build the best static tree for trained heads"),
}
# Package that only some programs need -> the extra that installs it.
EXTRAS = {
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "rich": "bench",
    "accelerate": "train",
    "datasets": "train",
    "xxhash": "train",
    "pyarrow": "train",
}


def overview() -> str:
    """The text of `draftsmith --help`."""
    names = "\n".join(f"  {name:<10}{what}" for name, (_, what) in PROGRAMS.items())
    return (
        "usage: draftsmith NAME [--option VALUE ...]\n\n"
        "Speculative decoding with trained draft heads on stock transformers models.\n\n"
        f"programs:\n{names}\n\n"
        "Options of a program: draftsmith NAME --help. The release: draftsmith --version\n\n"
        "examples:\n"
        "  draftsmith chat --target examples/chat-13m --heads examples/heads/eagle3\n"
        "  draftsmith train --config configs/train/eagle3-chat-13m-quick.yaml\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    name, *rest = words
    if name == "--version":
        print(f"draftsmith {draftsmith.__version__}")
        return 0
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"draftsmith: got {name!r}: {hint}Programs are {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & {*rest}:
        print((HELP / f"{name}.txt").read_text(encoding="utf-8"), end="")
        return 0
    sys.argv = [f"draftsmith {name}", *rest]
    with one_line_interrupt(f"draftsmith {name}"):
        try:
            return importlib.import_module(PROGRAMS[name][0]).main() or 0
        except ModuleNotFoundError as error:
            if (extra := EXTRAS.get(error.name or "")) is None:
                raise
            print(f"draftsmith {name}: needs {error.name}: pip install 'draftsmith[{extra}]'", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
