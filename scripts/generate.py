"""Chats with a target and a drafter, or answers one prompt, and shows accepted drafts in colour.

    draftsmith chat --target examples/chat-13m --heads examples/heads/eagle3
    draftsmith chat --target examples/chat-13m --heads examples/heads/eagle3 --prompt "Tell me a story."

Heads, a small model (--drafter_model) or n-grams of the text (--ngrams) draft.

In a terminal, the program is a chat: /help lists its commands, Ctrl-C ends a reply, Ctrl-D ends the program. With
--prompt it answers one prompt. In a pipe it answers each line of the standard input. The text goes to the standard
output, the counts to the standard error. A terminal shows accepted drafts in colour, by depth; with NO_COLOR set, not.

With --distributed, several processes decode (there, Ctrl-C ends them all):

    torchrun --nproc_per_node 3 -m draftsmith chat --target examples/chat-13m \\
        --heads examples/heads/mtp --distributed
"""

import os
import sys
from contextlib import closing
from pathlib import Path

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rich.console import Console

from draftsmith.inference import serve_target
from draftsmith.scripts.chat.arguments import GenerateArguments
from draftsmith.scripts.chat.commands import chat
from draftsmith.scripts.chat.session import ChatSession
from draftsmith.scripts.shared.model_loading import load_target
from draftsmith.training.options.one_line_errors import one_line_errors
from draftsmith.training.options.program_parser import ProgramParser

GROUPS = {
    "target and drafter": "target heads draft_vocab_size drafter_model ngrams dtype device compile pack_weights "
    "batch_invariant",
    "prompt": "prompt system raw",
    "sampling": "max_new_tokens temperature top_k top_p seed",
    "drafting": "tree acceptance staged distributed",
    "output": "compare",
}


def run(args: GenerateArguments) -> None:
    console = Console(highlight=False)
    is_chat = args.prompt is None and sys.stdin.isatty()
    with closing(ChatSession(args, console, is_chat=is_chat)) as session:
        if is_chat:
            chat(session)
            return
        for line in [args.prompt] if args.prompt is not None else sys.stdin:
            if line.strip():
                session.reply(line.strip())


def read_rank() -> int:
    """This process's rank: rank 0 runs the program, and all others serve the target to it until it ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "got --distributed in a single process: one process drafts, and all others serve the target, so start "
            "torchrun --nproc_per_node 2 -m draftsmith chat with the same options"
        )
    return int(os.environ["RANK"])


def main() -> None:
    with one_line_errors("draftsmith chat"):
        (args,) = ProgramParser([GenerateArguments], doc=__doc__, groups=GROUPS).read()
        if args.distributed and read_rank() > 0:
            serve_target(load_target(args.target, dtype=args.dtype, device=args.device)[0])
            return
        run(args)


if __name__ == "__main__":
    main()
