"""A run that is loaded and checked: train it, measure the heads, save everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import TrainerState

from training.run.checkpoints import read_run_file
from training.run.outcome import make_record, write_pages, write_record
from training.run.resume import is_finished
from training.run.stopping import explain_full_disk
from training.run.trainer import HeadsTrainer


@dataclass(frozen=True)
class PreparedRun:
    """Everything is loaded and checked; no step has been made.

    Attributes:
        checkpoint: the run goes on from here; None = from the beginning.
        settings: every option, as `training_config.yaml` holds it.
        wants_report: write `report.html` at the end.
    """

    trainer: HeadsTrainer
    output_dir: Path
    checkpoint: Path | None
    tokenizer: Any
    settings: dict[str, Any]
    wants_report: bool = True

    def finish(self) -> dict[str, float]:
        """Trains, saves the heads, the record and the report, and returns the final metrics."""
        trainer = self.trainer
        seconds = self._train()
        metrics = self._measure()
        with explain_full_disk(trainer, "the trained heads"):
            trainer.save_model(str(self.output_dir), _internal_call=True)  # uploaded when all files are there
        record = make_record(trainer, metrics, seconds)
        write_record(trainer, record)
        write_pages(trainer, self.tokenizer, self.settings, record, wants_report=self.wants_report)
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        return metrics

    def _train(self) -> float:
        """Returns the seconds of training, evaluations and the time before an interruption included."""
        trainer = self.trainer
        trainer.clock.start()
        if self.checkpoint is None:
            trainer.train()
            return trainer.clock.seconds
        seconds_before: float = (read_run_file(self.checkpoint) or {}).get("seconds", 0.0)
        trainer.clock.start(seconds_before)
        trainer.args.eval_on_start = False  # the first step was made before the interruption
        state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
        if not is_finished(state, trainer.args):
            trainer.train(resume_from_checkpoint=str(self.checkpoint))
            return trainer.clock.seconds
        # The run was interrupted after its last step: Trainer would make one more.
        trainer.state = state
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            # Only steps split the heads. Here each process holds whole heads, as loaded, to measure and save them.
            trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = False
            cast(nn.Module, trainer.model).to(trainer.args.device)
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
            trainer._load_best_model()
        return seconds_before

    def _measure(self) -> dict[str, float]:
        """Metrics of the heads as they are now, measured unless the run has done so at this very step."""
        trainer, state = self.trainer, self.trainer.state
        if trainer.eval_dataset is None:
            cast(nn.Module, trainer.model).eval()  # adapters may have dropout
            return {f"eval_{name}": value for name, value in (trainer.measure_acceptance or dict)().items()}
        is_best = trainer.args.load_best_model_at_end and state.best_global_step
        step = state.best_global_step if is_best else state.global_step
        for entry in reversed(state.log_history):
            if entry["step"] == step and "eval_loss" in entry:
                return {key: value for key, value in entry.items() if key.startswith("eval_")}
        metrics: dict[str, float] = trainer.evaluate()
        return metrics
