"""Stores a target's hidden states of a data set, for `draftsmith train --features`.

    # the features that a training configuration needs
    draftsmith features --config configs/train/eagle3-chat-13m.yaml --output_dir outputs/features

    # the features of several kinds of heads: the layers by number
    draftsmith features --target examples/chat-13m --dataset chat.jsonl.gz --head_type eagle3 \\
        --head_overrides feature_layers=[2,5,8,13] --output_dir outputs/features-all

    # the states of a large target, which a vLLM server computes
    draftsmith features --target meta-llama/Llama-3.3-70B-Instruct --dataset chat.jsonl.gz --head_type eagle3 \\
        --endpoint http://localhost:8000/v1 --output_dir outputs/features-70b

The program reads the options that it shares with training from the configuration file, and ignores the others. It
prints the disk use first. Run the same command again to continue after a kill or a full disk. Several processes
(torchrun, accelerate launch) share the shards.
"""

import logging
import os
import sys
from pathlib import Path

if not __package__:  # launched as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from draftsmith.training.features.extraction import NOT_FROM_FILE, OPTION_CLASSES, extract_features
from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.options.one_line_errors import one_line_errors

GROUPS = {
    "data": "config target dataset max_length max_samples",
    "features": "output_dir head_type head_overrides init_heads",
    "execution": "target_dtype target_device_map batch_size shard_mb",
    "a server computes": "endpoint endpoint_model concurrency shared_folder",
}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for name in ("httpx", "httpx2"):  # one line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
    rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with one_line_errors("draftsmith features", kept="finished shards are kept"):
        options = parse_arguments(sys.argv[1:], OPTION_CLASSES, not_from_file=NOT_FROM_FILE, doc=__doc__, groups=GROUPS)
        extract_features(*options, rank=rank, num_processes=num_processes, say=print)


if __name__ == "__main__":
    main()
