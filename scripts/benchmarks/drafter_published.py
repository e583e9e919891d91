"""What papers report of the kinds of drafters here: other targets, other training, other hardware. Written by hand."""

from __future__ import annotations

from dataclasses import dataclass

EAGLE3_PAPER = "EAGLE-3 (arXiv 2503.01840), Table 1"
DSPARK_PAPER = "DSpark (arXiv 2607.05147)"


@dataclass(frozen=True)
class Published:
    """One result of a paper; None where it gives no such number.

    Attributes:
        kind: the `head_type` here.
        setting: target and task.
        is_ranked: of the setting that most kinds were measured in, with the trees that are measured here.
    """

    kind: str
    method: str
    setting: str
    temperature: float | None
    acceptance_length: float | None
    speedup: float | None
    source: str
    is_ranked: bool = False


PUBLISHED = (
    Published("medusa", "Medusa", "Vicuna-13B, mean of five tasks", 0, 2.51, 2.12, EAGLE3_PAPER, is_ranked=True),
    Published("hydra", "Hydra", "Vicuna-13B, mean of five tasks", 0, 3.50, 2.80, EAGLE3_PAPER, is_ranked=True),
    Published("eagle", "EAGLE-1", "Vicuna-13B, mean of five tasks", 0, 3.96, 3.05, EAGLE3_PAPER),
    Published("eagle", "EAGLE-2", "Vicuna-13B, mean of five tasks", 0, 4.83, 4.22, EAGLE3_PAPER, is_ranked=True),
    Published("eagle3", "EAGLE-3", "Vicuna-13B, mean of five tasks", 0, 6.62, 5.51, EAGLE3_PAPER, is_ranked=True),
    Published("eagle3", "EAGLE-3", "Vicuna-13B, MT-Bench", 0, 6.65, 5.58, EAGLE3_PAPER),
    Published("eagle3", "EAGLE-3", "Llama-3.1-8B, mean of five tasks", 0, 6.23, 4.44, EAGLE3_PAPER),
    Published("eagle3", "EAGLE-3", "Llama-3.1-8B, mean of five tasks", 1, 4.92, 3.45, EAGLE3_PAPER),
    Published("eagle3", "EAGLE-3", "Qwen3-8B, GSM8K, chains of 7", 1, 5.30, None, DSPARK_PAPER),
    Published("block", "DFlash", "Qwen3-8B, GSM8K, chains of 7", 1, 5.33, None, DSPARK_PAPER),
    Published("block", "DSpark", "Qwen3-8B, GSM8K, chains of 7", 1, 6.17, None, DSPARK_PAPER),
    Published("eagle3", "EAGLE-3", "Qwen3-8B, HumanEval, chains of 7", 1, 4.33, None, DSPARK_PAPER),
    Published("block", "DFlash", "Qwen3-8B, HumanEval, chains of 7", 1, 4.64, None, DSPARK_PAPER),
    Published("block", "DSpark", "Qwen3-8B, HumanEval, chains of 7", 1, 5.52, None, DSPARK_PAPER),
    Published("eagle3", "EAGLE-3", "Qwen3-8B, MT-Bench, chains of 7", 1, 2.66, None, DSPARK_PAPER),
    Published("block", "DFlash", "Qwen3-8B, MT-Bench, chains of 7", 1, 3.11, None, DSPARK_PAPER),
    Published("block", "DSpark", "Qwen3-8B, MT-Bench, chains of 7", 1, 3.72, None, DSPARK_PAPER),
    Published("medusa", "Medusa-2", "Vicuna-7B", None, None, 2.83, "Medusa (arXiv 2401.10774)"),
    Published("mtp", "MTP", "DeepSeek-V3, one further token", None, None, 1.8, "DeepSeek-V3 (arXiv 2412.19437)"),
)


def find_ranked(kind: str) -> Published | None:
    return next((one for one in PUBLISHED if one.kind == kind and one.is_ranked), None)
