"""The progress bar of a run: steps, time left, tokens per second, and how well the heads draft so far."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RunProgress(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Replaces transformers' bar, on the main process.

    Tokens per second cover the training since the last log line, without evaluations and checkpoints. The acceptance
    length comes from the last evaluation.
    """

    def __init__(self) -> None:
        self.bar: Any = None
        self._shown: dict[str, str] = {}
        self._tokens, self._seconds, self._begin = 0, 0.0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, desc="training")
            self._tokens = int(state.num_input_tokens_seen)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seconds += time.perf_counter() - self._begin
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is None or logs is None:
            return
        if "loss" in logs:
            tokens = int(state.num_input_tokens_seen) - self._tokens
            if tokens and self._seconds:
                self._show(f"{tokens / self._seconds:,.0f}", "tokens/s")
            self._tokens, self._seconds = int(state.num_input_tokens_seen), 0.0
            self._show(f"{logs['loss']:.3f}", "loss")
            if "top1_depth1" in logs:
                self._show(f"{logs['top1_depth1']:.1%}", "first draft")
        if "eval_acceptance_length" in logs:
            self._show(f"{logs['eval_acceptance_length']:.2f}", "acceptance length")
        if "eval_loss" in logs:
            line = ", ".join(f"{name} {value}" for name, value in self._shown.items() if name != "tokens/s")
            self.bar.write(f"step {state.global_step}: {line}, eval loss {logs['eval_loss']:.3f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _show(self, value: str, name: str) -> None:
        self._shown[name] = value
        self.bar.set_postfix(self._shown)
