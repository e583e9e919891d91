"""The model card, `README.md` of trained heads: how to decode with them, metrics, training data."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader

from draftsmith.heads.config import is_hub_id
from draftsmith.training.reporting.report import TEMPLATES


def render_card(
    *,
    kind: str,
    target: str,
    location: str,
    datasets: Sequence[str],
    metrics: Mapping[str, Any],
    num_prompts: int,
    record: Mapping[str, Any],
    has_report: bool,
    has_adapter: bool = False,
) -> str:
    """Returns the card as Markdown.

    Args:
        target: the target as the user named it, a folder or a hub id.
        location: the folder or hub id to load the heads from.
        datasets: as the user named them; hub ids, without subsets, also stand in the card's metadata.
        record: `training` of the run's record.
    """
    data = ModelCardData(
        library_name="draftsmith",
        license="unknown",
        base_model=target if is_hub_id(target) else None,
        datasets=list(dict.fromkeys(name.partition(":")[0] for name in datasets if is_hub_id(name))) or None,
        tags=["speculative-decoding", "draft-heads", kind],
    )
    environment = Environment(loader=FileSystemLoader(TEMPLATES), keep_trailing_newline=True)
    return environment.get_template("model_card.md.jinja").render(
        front_matter=data.to_yaml(),
        kind=kind,
        target=target,
        location=location,
        datasets=", ".join(f"`{name}`" for name in datasets),
        metrics={
            name.removeprefix("eval_"): f"{value:.4g}" for name, value in metrics.items() if _is_of_the_heads(name)
        },
        num_prompts=num_prompts,
        steps=record["steps"],
        tokens=f"{record['tokens']:,}",
        seconds=f"{record['seconds']:,.0f}",
        has_report=has_report,
        has_adapter=has_adapter,
    )


def _is_of_the_heads(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("runtime", "per_second"))
