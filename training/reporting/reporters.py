"""Where metrics are logged besides the terminal: `report_to`, transformers' own callbacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

# What transformers calls them -> the packages of which one is needed, and what installs it.
REPORTERS = {
    "tensorboard": (("tensorboard", "tensorboardX"), "pip install tensorboard"),
    "wandb": (("wandb",), 'pip install "draftsmith[wandb]"'),
    "mlflow": (("mlflow",), 'pip install "draftsmith[mlflow]"'),
    "trackio": (("trackio",), "pip install trackio"),
}


def check_reporters(report_to: Sequence[str]) -> None:
    """Raises:
    ValueError: a backend that is not installed, with what installs it. Names we do not know are transformers' matter.
    """
    for name in report_to:
        packages, hint = REPORTERS.get(name, ((), ""))
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise ValueError(f"got report_to {name}, which is not installed: {hint}, or leave it out of report_to")
