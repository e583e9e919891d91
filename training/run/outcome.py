"""What a finished run leaves beside the heads: its record, `report.html` and the model card; and its last words."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch

from training.distributed.launch import describe_launch
from training.features.sharded_target import count_held
from training.reporting.examples import Example, decode_examples
from training.reporting.model_card import render_card
from training.reporting.report import render_report
from training.reporting.row_counts import count_rows
from training.run.checkpoints import write_file
from training.run.evaluation import AcceptanceMeter
from training.run.stopping import explain_full_disk
from training.run.trainer import HeadsTrainer
from training.synthesis.on_policy import OnPolicyRows

logger = logging.getLogger(__name__)
NUM_EXAMPLES = 4  # prompts that the report shows with their replies


def hide_secrets(words: Sequence[str]) -> list[str]:
    """A command line without the values of options that end in `token`, because records are uploaded.

    >>> hide_secrets(["--hub_token", "hf_1", "--push_to_hub_token=hf_2", "--max_steps", "3"])
    ['--hub_token', '...', '--push_to_hub_token=...', '--max_steps', '3']
    """
    shown, is_secret = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        is_option = option.startswith("--") and option.endswith("token")
        shown.append(f"{option}=..." if is_option and equals else "..." if is_secret else word)
        is_secret = is_option and not equals
    return shown


def make_record(trainer: HeadsTrainer, metrics: dict[str, float], seconds: float) -> dict[str, Any]:
    """`training_record.json`: command, cost of the training, processes, versions, metrics."""
    state = trainer.state
    return {
        "command": shlex.join(["train_heads.py", *hide_secrets(sys.argv[1:])]),
        "training": {
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "steps": state.global_step,
            "tokens": state.num_input_tokens_seen,
            "epochs": state.epoch,
        },
        "distributed": {
            **describe_launch(trainer.accelerator),
            "target_parameters_per_process": count_held(trainer.target.model),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "platform": platform.platform(),
        "metrics": metrics,
    }


def write_record(trainer: HeadsTrainer, record: Mapping[str, Any]) -> None:
    """Writes the record on the main process."""
    if trainer.args.process_index == 0:
        # transformers' pickle of the options, which training_config.yaml holds as text
        (Path(str(trainer.args.output_dir)) / "training_args.bin").unlink(missing_ok=True)
        write_text(trainer, "training_record.json", json.dumps(record, indent=2) + "\n")


def write_text(trainer: HeadsTrainer, name: str, text: str) -> None:
    """Writes a file into the output folder; a full disk is a clear error."""
    with explain_full_disk(trainer, name, len(text)):
        write_file(Path(str(trainer.args.output_dir)) / name, text)


def write_pages(
    trainer: HeadsTrainer,
    tokenizer: Any,
    settings: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    wants_report: bool,
) -> None:
    """Writes the report and the model card on the main process. Collective: every process decodes the examples.

    The heads are saved by now, so an error in here is only logged.
    """
    output_dir = Path(str(trainer.args.output_dir))
    try:
        page = _render_report(trainer, tokenizer, settings, record) if wants_report else None
        if trainer.args.process_index != 0:
            return
        if page is not None:
            write_file(output_dir / "report.html", page)
        card = output_dir / "README.md"
        if card.exists() and "library_name: draftsmith" not in card.read_text(encoding="utf-8"):
            logger.warning("%s was written by someone else: no model card is written", card)
            return
        meter = trainer.measure_acceptance
        write_file(
            card,
            render_card(
                kind=str(trainer.heads.config.head_type),
                target=settings["target"],
                location=(trainer.args.push_to_hub and trainer.args.hub_model_id) or str(output_dir),
                datasets=settings["dataset"],
                metrics=record["metrics"],
                num_prompts=len(meter.prompts) if isinstance(meter, AcceptanceMeter) else 0,
                record=record["training"],
                has_report=page is not None,
                has_adapter=trainer.heads.config.target_adapter is not None,
            ),
        )
    except Exception:
        logger.exception("%s: the heads are saved, but their report or model card could not be written", output_dir)


def _render_report(
    trainer: HeadsTrainer, tokenizer: Any, settings: Mapping[str, Any], record: Mapping[str, Any]
) -> str:
    meter = trainer.measure_acceptance
    examples: list[Example] = []
    stats = None
    if isinstance(meter, AcceptanceMeter):
        prompts = meter.prompts[:NUM_EXAMPLES]
        examples, stats = decode_examples(
            meter.target, meter.heads, prompts, tokenizer, max_new_tokens=meter.max_new_tokens
        )
    rows: Any = trainer.train_dataset
    if isinstance(rows, OnPolicyRows):
        rows = rows.rows
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
        data=count_rows(rows) if isinstance(rows, datasets.Dataset) else {},
        examples=examples,
        stats=stats,
    )


def describe_outcome(output_dir: Path, target: str, metrics: Mapping[str, float]) -> str:
    """The last lines of a run: what it wrote, the acceptance length, the next command to type."""
    names = ("model.safetensors", "adapter", "training_record.json", "report.html", "README.md")
    written = ", ".join(name for name in names if (output_dir / name).exists())
    length = metrics.get("eval_acceptance_length")
    measured = "not measured (no held-out prompts)" if length is None else f"{length:.2f} tokens per verify step"
    heads = f"--target {shlex.quote(target)} --heads {shlex.quote(str(output_dir))}"
    return (
        f"wrote {output_dir}: {written}\n"
        f"acceptance length: {measured}\n"
        f'next: python scripts/generate.py {heads} --compare true --prompt "Hello"\n'
        f"  or: python scripts/benchmark.py {heads} --prompts examples/prompts.jsonl"
    )
