"""What a finished run says of itself beside the heads: `report.html` and the model card, `README.md`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from training.reporting.examples import decode_examples
from training.reporting.model_card import render_card
from training.reporting.report import render_report
from training.reporting.run_costs import data_figures, row_lengths, step_sizes
from training.run.checkpoints import write_file
from training.run.evaluation import AcceptanceMeter
from training.run.trainer import HeadsTrainer
from training.synthesis.on_policy import OnPolicyRows

logger = logging.getLogger(__name__)
NUM_EXAMPLES = 4


def report_run(
    trainer: HeadsTrainer,
    tokenizer: Any,
    settings: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    wants_report: bool,
) -> None:
    """Writes both into the output folder, on the main process. Every process calls it: examples are decoded together.

    The heads are saved already: what goes wrong here is logged, and nothing else.

    Args:
        settings: every option (`training.options.command_line.resolve_arguments`).
        record: what `training_record.json` holds.
    """
    output_dir = Path(str(trainer.args.output_dir))
    is_main_process = trainer.args.process_index == 0
    try:
        page = _render(trainer, tokenizer, settings, record) if wants_report else None
        if not is_main_process:
            return
        if page is not None:
            write_file(output_dir / "report.html", page)
        card = output_dir / "README.md"
        if card.exists() and "library_name: draftsmith" not in card.read_text(encoding="utf-8"):
            logger.warning("%s is somebody's own: no model card is written", card)
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


def _render(trainer: HeadsTrainer, tokenizer: Any, settings: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    meter = trainer.measure_acceptance
    decoded = decode_examples(meter, tokenizer, NUM_EXAMPLES) if isinstance(meter, AcceptanceMeter) else ([], None)
    rows, data = trainer.train_dataset, {}
    if isinstance(rows, OnPolicyRows):
        rows = rows.rows
    if isinstance(rows, datasets.Dataset):
        sizes = step_sizes(trainer, row_lengths(rows, "input_ids"))
        data = data_figures(rows, sizes, trainer.args.world_size)
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
        data=data,
        examples=decoded[0],
        stats=decoded[1],
    )
