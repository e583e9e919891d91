"""Distributed decoding of one reply: rank 0 drafts with heads, every other rank verifies.

    torchrun --nproc_per_node 3 examples/distributed.py
    torchrun --nproc_per_node 3 examples/distributed.py TARGET HEADS PROMPT

On GPUs each rank takes the GPU of its own number.
"""

import os
import sys

import torch

from draftsmith import DistributedDecoder, serve_target
from draftsmith.scripts.shared.model_loading import encode_messages, load_drafter, load_target

DEFAULTS = ("examples/chat-13m", "examples/heads/eagle3", "What are the benefits of exercise?")


def main() -> None:
    name, heads, prompt = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]
    target, tokenizer = load_target(name, dtype="auto" if torch.cuda.is_available() else "float32")
    if int(os.environ["RANK"]) > 0:
        serve_target(target)
        return
    drafter = load_drafter(target, tokenizer, heads=heads)
    input_ids = encode_messages(tokenizer, [{"role": "user", "content": prompt}]).to(target.device)
    with DistributedDecoder(target, drafter) as decoder:
        output = decoder.generate(input_ids, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(output.sequences[0, input_ids.shape[1] :], skip_special_tokens=True))
    timeline = decoder.timeline
    print(
        f"{output.stats.num_new_tokens} tokens; {len(timeline.verifications)} verifications, of which "
        f"{timeline.num_wasted} were wasted"
    )


if __name__ == "__main__":
    main()
