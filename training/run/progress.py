"""The progress bar of a run: steps, time left, tokens per second, and how well the heads draft so far."""

from __future__ import annotations

import time
from typing import Any

from transformers.trainer_callback import ProgressCallback


class RunProgress(ProgressCallback):  # type: ignore[misc, unused-ignore]
    """transformers' bar with our numbers.

    Tokens per second cover the training since the last log line, without evaluations and checkpoints. The acceptance
    length comes from the last evaluation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, str] = {}
        self._tokens, self._seconds, self._begin = 0, 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._tokens = int(state.num_input_tokens_seen)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self._seconds += time.perf_counter() - self._begin

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No bar of evaluations."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is None or logs is None:
            return
        if "loss" in logs:
            tokens = int(state.num_input_tokens_seen) - self._tokens
            if tokens and self._seconds:
                self._shown["tokens/s"] = f"{tokens / self._seconds:,.0f}"
            self._tokens, self._seconds = int(state.num_input_tokens_seen), 0.0
            self._shown["loss"] = f"{logs['loss']:.3f}"
            if "top1_depth1" in logs:
                self._shown["first draft"] = f"{logs['top1_depth1']:.1%}"
        if "eval_acceptance_length" in logs:
            self._shown["acceptance length"] = f"{logs['eval_acceptance_length']:.2f}"
        self.training_bar.set_postfix(self._shown)
        if "eval_loss" in logs:
            line = ", ".join(f"{name} {value}" for name, value in self._shown.items() if name != "tokens/s")
            self.training_bar.write(f"step {state.global_step}: {line}, eval loss {logs['eval_loss']:.3f}")
