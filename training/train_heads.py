"""Trains draft heads: accelerate launch training/train_heads.py --config configs/train/NAME.yaml [--any_key value]."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    # Launched as a file, Python puts training/ first on the path; the packages beside it must be ours (another
    # distribution also ships one named `inference`).
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "training")]
    import inference

    if Path(inference.__file__ or "").resolve().parent.parent != ROOT:
        sys.exit(f"`import inference` found {inference.__file__}, not {ROOT}/inference: uninstall the other package")
    from training.arguments import parse_arguments
    from training.run import prepare_run

    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR  # one process speaks for all
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    try:
        run = prepare_run(*parse_arguments())
    except (ValueError, OSError) as error:
        sys.exit(f"train_heads.py: {error}")
    run.finish()  # what goes wrong in here keeps its traceback
    return 0


if __name__ == "__main__":
    sys.exit(main())
