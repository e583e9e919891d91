"""Trains draft heads for a frozen target, from a YAML file (--config) and options, which win over the file.

    python training/train_heads.py --config configs/train/eagle3-chat-13m-quick.yaml
    accelerate launch training/train_heads.py --config FILE.yaml --learning_rate 5e-5

An option may stand in the file. `none` (in YAML: null) unsets an option that may have no value.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "what learns": "config target head_type head_overrides init_heads",
    "what from": "dataset eval_dataset max_length features on_policy_fraction",
    "how": "num_train_epochs max_steps per_device_train_batch_size learning_rate loss_type lora_r bf16 use_cpu",
    "what is written": "output_dir save_steps eval_steps resume_from_checkpoint report_to push_to_hub dry_run",
}


def main() -> int:
    # Launched as a file, Python puts training/ first on the path; the packages beside it must be ours (another
    # distribution also ships one named `inference`).
    sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "training")]
    import inference

    if Path(inference.__file__ or "").resolve().parent.parent != ROOT:
        sys.exit(f"`import inference` found {inference.__file__}, not {ROOT}/inference: uninstall the other package")
    from training.data.conversations import BadLineError
    from training.data.streaming import NoConversationError
    from training.options.command_line import parse_arguments
    from training.options.run_arguments import RunArguments, pick
    from training.reporting.dry_run import dry_run
    from training.reporting.dry_run_table import show
    from training.run.lost_processes import naming_lost_processes
    from training.run.run import prepare_run
    from training.run.stopping import TrainingStoppedError

    is_main_process = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_main_process else logging.ERROR  # one process speaks for all
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    try:
        arguments = parse_arguments(doc=__doc__ or "", groups=GROUPS)
        if pick(arguments, RunArguments).dry_run:
            if "RANK" in os.environ:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # from the launcher: what is temporary goes
            found = dry_run(*arguments)
            if is_main_process:
                show(found)
            elif found.problems:
                time.sleep(5)  # the first process says the same, or it would never know
                sys.exit("\n".join(f"train_heads.py, process {os.environ['RANK']}: {one}" for one in found.problems))
            return 1 if found.problems else 0
        run = prepare_run(*arguments)
    except (ValueError, OSError, TrainingStoppedError) as error:
        if not is_main_process:
            time.sleep(5)  # the first process says the same, and the launcher then ends this one
        sys.exit(f"train_heads.py: {error}")
    try:
        with naming_lost_processes(run.output_dir):
            run.finish()  # what else goes wrong in here keeps its traceback
    except (TrainingStoppedError, BadLineError, NoConversationError) as error:  # the latter two in a stream
        sys.exit(f"train_heads.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
