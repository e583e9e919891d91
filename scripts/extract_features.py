"""Stores the target's states of a data set, which training/train_heads.py --features then reads.

    # what a training configuration needs, from the same data
    python scripts/extract_features.py --config configs/train/eagle3-chat-13m.yaml --output_dir outputs/features

    # for several kinds of heads at once: the layers by number
    python scripts/extract_features.py --target examples/chat-13m --dataset chat.jsonl.gz \\
        --feature_layers 2 8 13 --output_dir outputs/features-all

Of a configuration's file it takes what both programs know; the rest is training's. Disk use is printed first, and
refused where it does not fit. Run the same command again to go on after a kill or a full disk. Several processes
(torchrun, accelerate launch) share the work: each takes its part of the shards.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

# First on the path: another distribution also ships a package named `inference`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.one_line_errors import one_line_errors
from training.features.extraction import extract_features
from training.features.extraction_options import NOT_FROM_FILE, OPTION_CLASSES
from training.options.command_line import parse_arguments

GROUPS = {
    "what is read": "config target dataset max_length max_samples",
    "what is stored": "output_dir head_type feature_layers teacher_top_k",
    "how": "target_dtype target_device_map batch_size shard_mb",
}


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with one_line_errors("extract_features.py"):
        options = parse_arguments(sys.argv[1:], OPTION_CLASSES, not_from_file=NOT_FROM_FILE, doc=__doc__, groups=GROUPS)
        extract_features(*options, rank=rank, num_processes=num_processes, say=print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
