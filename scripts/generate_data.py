"""Lets a target write training conversations: ShareGPT JSON lines, which training/train_heads.py reads.

    # the target answers the user turns of given conversations, turn by turn
    python scripts/generate_data.py --target examples/chat-13m --prompts chat.jsonl.gz --output regenerated.jsonl

    # the target writes both sides
    python scripts/generate_data.py --target examples/chat-13m --mode self --num_conversations 5000 --output self.jsonl

Lines are on the disk as soon as they are accepted. Run the same command again to continue after a kill.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    # Launched as a file, Python looks for packages in scripts/; ours stand beside it.
    sys.path.insert(0, str(ROOT))
    from training.conversation_file import ConversationFile
    from training.synthesis import SynthesisArguments, Synthesizer, read_prompts

    try:
        (args,) = HfArgumentParser(SynthesisArguments, description=__doc__).parse_args_into_dataclasses()
        if Path(args.output).exists() and not args.resume:
            raise ValueError(f"--output {args.output} exists: leave --no_resume out to continue it, or name another")
        prompts = read_prompts(Path(args.prompts)) if args.prompts else []  # before what takes long
        output = ConversationFile(Path(args.output))
        model = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
        model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        synthesizer = Synthesizer(model, AutoTokenizer.from_pretrained(args.target), args)
        num_written = write(synthesizer.synthesize(output.rows, prompts), output, args)
    except (ValueError, OSError) as error:
        sys.exit(f"generate_data.py: {error}")
    output.compact()
    print(f"{args.output}: {len(output.rows)} conversations were there, {num_written} were written")
    for reason, count in synthesizer.dropped.most_common():
        print(f"dropped: {count} times {reason}")
    return 0


def write(windows: Iterator[list[Any]], output: Any, args: Any) -> int:
    """Appends conversations until there are enough of them; returns how many."""
    missing = max(0, args.num_conversations - len(output.rows)) if args.mode == "self" else None
    num_written = 0
    with tqdm(total=missing, unit=" conversations") as progress:
        while missing is None or num_written < missing:
            window = next(windows, None)
            if window is None:
                break
            if missing is not None and not window:
                raise ValueError("none of a window's conversations was of use: is --target a chat model?")
            window = window[: None if missing is None else missing - num_written]
            output.append(conversation.to_sharegpt() for conversation in window)
            num_written += len(window)
            progress.update(len(window))
    return num_written


if __name__ == "__main__":
    sys.exit(main())
