"""Trains draft heads for a frozen target, from a YAML file (--config) and options, which win over the file.

    draftsmith train --target TARGET --dataset FILE.jsonl.gz    # chooses the other options, and prints why
    draftsmith train --config configs/train/eagle3-chat-13m-quick.yaml
    accelerate launch -m draftsmith train --config FILE.yaml --learning_rate 5e-5

Every option may also stand in the file. `none` (in YAML: null) unsets an option that may have no value.
"""

import logging
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # launched as a file: not training/ itself, whose modules have names of libraries
    sys.path[:] = [str(ROOT / "src"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "training")]

GROUPS = {
    "Target and heads": "config target served_by head_type head_overrides init_heads",
    "Conversations to learn from": "dataset eval_dataset max_length features",
    "Training": "time_budget num_train_epochs max_steps per_device_train_batch_size learning_rate loss_type lora_r "
    "bf16 use_cpu",
    "Results and checkpoints": "output_dir save_steps eval_steps resume_from_checkpoint report_to push_to_hub",
}


def main() -> int:
    from draftsmith.training.options.one_line_errors import one_line_interrupt

    with one_line_interrupt("draftsmith train"):
        return train()


def train() -> int:
    from draftsmith.training.data.conversations import BadLineError
    from draftsmith.training.data.streaming import NoConversationError, message_of
    from draftsmith.training.options.command_line import parse_arguments
    from draftsmith.training.options.run_options import RunOptions
    from draftsmith.training.run.outcome import describe_interrupted, describe_outcome
    from draftsmith.training.run.preparation import prepare_run
    from draftsmith.training.run.stopping import TrainingStoppedError

    is_main_process = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_main_process else logging.ERROR  # only the main process speaks
    logging.basicConfig(level=level, format="%(message)s")
    try:
        options = RunOptions(*parse_arguments(doc=__doc__ or "", groups=GROUPS))
        run = prepare_run(options)
    except (ValueError, OSError) as error:
        if not is_main_process:
            time.sleep(5)  # the main process prints the same message first; then the launcher ends this one
        sys.exit(f"draftsmith train: {error}")
    try:
        run.finish()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_interrupted(run.output_dir, run.trainer.state.global_step)) from None
    except (TrainingStoppedError, BadLineError, NoConversationError) as error:  # bad lines of a stream show late
        sys.exit(f"draftsmith train: {message_of(error)}")
    if is_main_process:  # which has written the record
        has_target = options.features.features_endpoint is None
        sys.stdout.write(describe_outcome(run.output_dir, options.model.target, has_target=has_target) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
