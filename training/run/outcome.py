"""A run that is ready: trains, measures and saves the heads, their record, `report.html` and the model card."""

import json
import logging
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainerState

from draftsmith.inference import Decoder
from draftsmith.inference.request.chat_template import render_probe
from draftsmith.inference.request.model_settings import find_model_settings
from draftsmith.training.features.sharded_target import count_held
from draftsmith.training.options.one_line_errors import as_launched
from draftsmith.training.reporting.examples import Example, decode_examples, send_examples
from draftsmith.training.reporting.model_card import render_card
from draftsmith.training.reporting.report import count_rows, render_report
from draftsmith.training.run.checkpoints import read_run_file
from draftsmith.training.run.evaluation import AcceptanceMeter
from draftsmith.training.run.pace import CHAIN, describe_expected
from draftsmith.training.run.resume import find_newest, is_finished
from draftsmith.training.run.trainer import HeadsTrainer
from draftsmith.training.whole_files import write_text

logger = logging.getLogger(__name__)
USUAL_TOKENS = 3e6  # that heads learn from: docs/choosing-heads.md
NUM_EXAMPLES = 4  # prompts that the report shows with their replies
_SECRET = re.compile(r"(--[\w-]*token[= ])('[^']*'|\S+)")  # records are uploaded


@dataclass(frozen=True)
class PreparedRun:
    """Everything is loaded and checked; no step has been made.

    Attributes:
        checkpoint: the run goes on from here; None = from the beginning.
        counts: dropped conversations by reason, and turns that are not learned; empty for a stream.
    """

    trainer: HeadsTrainer
    output_dir: Path
    checkpoint: Path | None
    tokenizer: Any
    settings: dict[str, Any]
    counts: Mapping[str, int]
    wants_report: bool = True

    def finish(self) -> dict[str, float]:
        """Trains, saves the heads, the record and the report, and returns the final metrics."""
        trainer = self.trainer
        seconds = self._train()
        metrics = self._measure()
        trainer.save_model(str(self.output_dir), _internal_call=True)  # uploaded when all files are there
        record = self._make_record(metrics, seconds)
        if trainer.args.process_index == 0:
            # transformers' pickle of the options, which training_config.yaml holds as text
            (self.output_dir / "training_args.bin").unlink(missing_ok=True)
            write_text(self.output_dir / "training_record.json", json.dumps(record, indent=2) + "\n")
        self._write_pages(record)
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        return metrics

    def _train(self) -> float:
        """Returns the seconds of training, evaluations and the time before an interruption included."""
        trainer = self.trainer
        trainer.start = time.perf_counter()
        if self.checkpoint is None:
            trainer.train()
            return time.perf_counter() - trainer.start
        seconds_before: float = read_run_file(self.checkpoint)["seconds"]
        trainer.start -= seconds_before
        trainer.args.eval_on_start = False  # the first step was made before the interruption
        state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
        if not is_finished(state, trainer.args):
            trainer.train(resume_from_checkpoint=str(self.checkpoint))
            return time.perf_counter() - trainer.start
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

    def _make_record(self, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
        """`training_record.json`: command, cost of the training, processes, versions, metrics; and what the target's
        generation config adds to the greedy decoding that measures the acceptance length. Collective."""
        trainer, model, meter = self.trainer, self.trainer.target.model, self.trainer.measure_acceptance
        state, processes = trainer.state, trainer.accelerator.state
        own = {} if meter is None else find_model_settings(model.generation_config, {"do_sample": False})
        distributed = {"distributed_type": processes.distributed_type.value, "num_processes": processes.num_processes}
        if processes.distributed_type == DistributedType.DEEPSPEED:
            distributed["zero_stage"] = processes.deepspeed_plugin.zero_stage
        peak = round(torch.cuda.max_memory_allocated() / 1e9, 2) if torch.cuda.is_available() else None
        return {
            "command": written_command(sys.argv[1:]),
            "training": {
                "seconds": round(seconds, 1),
                "threads": torch.get_num_threads(),
                "steps": state.global_step,
                "tokens": state.num_input_tokens_seen,
                "epochs": round(state.epoch or 0, 2),
                "peak_gpu_gb": peak,
            },
            "distributed": {**distributed, "target_parameters_per_process": count_held(model)},
            "generation_config": own,
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
            "platform": platform.platform(),
            "metrics": metrics,
            "data": dict(self.counts),
            "chat_format": render_probe(self.tokenizer),
            **({} if meter is None else measure_drafting(meter)),
        }

    def _write_pages(self, record: Mapping[str, Any]) -> None:
        """Writes the report and the model card on the main process. Collective: every process decodes the examples.

        The heads are saved by now, so an error in here is only logged.
        """
        trainer, settings, meter = self.trainer, self.settings, self.trainer.measure_acceptance
        try:
            page = self._render_report(record) if self.wants_report else None
            if trainer.args.process_index != 0:
                return
            if page is not None:
                write_text(self.output_dir / "report.html", page)
            card = self.output_dir / "README.md"
            if card.exists() and "library_name: draftsmith" not in card.read_text(encoding="utf-8"):
                logger.warning("%s was written by someone else: no model card is written", card)
                return
            write_text(
                card,
                render_card(
                    kind=str(trainer.heads.config.head_type),
                    target=settings["target"],
                    location=(trainer.args.push_to_hub and trainer.args.hub_model_id) or str(self.output_dir),
                    datasets=settings["dataset"],
                    metrics=record["metrics"],
                    num_prompts=0 if meter is None else len(meter.prompts),
                    record=record["training"],
                    has_report=page is not None,
                    has_adapter=trainer.heads.config.target_adapter is not None,
                ),
            )
        except Exception:
            logger.exception(
                "%s: the heads are saved, but their report or model card could not be written", self.output_dir
            )

    def _render_report(self, record: Mapping[str, Any]) -> str:
        trainer, settings, meter = self.trainer, self.settings, self.trainer.measure_acceptance
        examples: list[Example] = []
        stats = None
        if meter is not None:
            examples, stats = decode_examples(
                meter.make_decoder(), meter.prompts[:NUM_EXAMPLES], self.tokenizer, max_new_tokens=meter.max_new_tokens
            )
            if trainer.args.process_index == 0:
                send_examples(examples, trainer.args.report_to)
        rows: Any = trainer.train_dataset
        shown = ("acceptance_length", "loss", "top1_depth1")
        metrics = {name: record["metrics"].get(f"eval_{name}") for name in shown}
        best = trainer.state.best_model_checkpoint
        return render_report(
            f"{trainer.heads.config.head_type} heads for {settings['target']}",
            summary={
                **{name.replace("_", " "): f"{value:.4g}" for name, value in metrics.items() if value is not None},
                **record["training"],
                **({"best checkpoint": Path(best).name} if best else {}),
                "versions": ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
                "command": record["command"],
            },
            history=trainer.state.log_history,
            options=settings,
            data={**count_rows(rows), **record["data"]} if isinstance(rows, datasets.Dataset) else {},
            examples=examples,
            stats=stats,
        )


def written_command(arguments: Sequence[str]) -> str:
    """The command of a run as its record has it, with tokens of hubs and trackers cut off.

    >>> written_command(["--target", "T", "--hub_token", "hf_secret"])
    'draftsmith train --target T --hub_token ...'
    """
    return _SECRET.sub(r"\1...", shlex.join(["draftsmith", "train", *arguments]))


def describe_outcome(output_dir: Path, target: str, *, has_target: bool = True) -> str:
    """The last lines of a run: the files it wrote, how good the heads are, the next command to type.

    Args:
        has_target: the whole target was here, not on a server.
    """
    record = json.loads((output_dir / "training_record.json").read_text(encoding="utf-8"))
    weights = ("model.safetensors", "token_counts.safetensors", "adapter")
    names = (*weights, "training_record.json", "report.html", "README.md")
    lines = [f"wrote {output_dir}: {', '.join(name for name in names if (output_dir / name).exists())}"]
    length = record["metrics"].get("eval_acceptance_length")
    if length is None:
        reason = "no held-out prompts" if has_target else "the target is on the server"
        lines.append(f"acceptance length: not measured ({reason})")
    else:
        tokens = record["training"]["tokens"]
        lines.append(f"acceptance length: {length:.2f} tokens per verify step after {tokens:,} tokens")
        lines.append(f"  {describe_expected(tokens, record.get('chain_acceptance_length'))}")
        if tokens < USUAL_TOKENS:
            lines.append(f"  more tokens help most: {USUAL_TOKENS / 1e6:.0f} million are usual")
    if (speed := record.get("speed_over_plain")) is not None:
        cure = "" if speed > 1 else "; --tree auto drafts only where that is faster"
        lines.append(f"speed on this machine: {speed:.2f} times plain decoding{cure}")
    heads = f"--target {shlex.quote(target)} --heads {shlex.quote(str(output_dir))}"
    lines.append(f'next: draftsmith chat {heads} --compare --prompt "Hello"')
    lines.append(f"  or: draftsmith bench {heads} --prompts examples/prompts.jsonl")
    return "\n".join(lines)


def describe_interrupted(output_dir: Path, step: int) -> str:
    """What a run that was interrupted at this step has left, and the command that continues it."""
    newest = find_newest(output_dir, most=step)
    if newest is None:
        return ""
    config = shlex.quote(str(output_dir / "training_config.yaml"))
    command = f"draftsmith train --config {config} --resume_from_checkpoint true"
    return f"{newest} is kept. Continue{as_launched(command)}"


def measure_drafting(meter: AcceptanceMeter) -> dict[str, float]:
    """How many times as fast as plain decoding the heads decode a few held-out prompts, one at a time, and the
    acceptance length of chains on all of them. Collective."""
    seconds = []
    for decoder in (meter.make_decoder(), Decoder(meter.target)):
        meter.decode(decoder, meter.prompts[:1])  # warms up
        start = time.perf_counter()
        meter.decode(decoder, meter.prompts[:NUM_EXAMPLES])
        seconds.append(time.perf_counter() - start)
    chain = meter.make_decoder(f"chain:{min(CHAIN, meter.heads.max_depth or CHAIN)}")
    length = meter.decode(chain, meter.prompts)
    return {"speed_over_plain": round(seconds[1] / seconds[0], 3), "chain_acceptance_length": round(length, 3)}
