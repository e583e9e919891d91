"""Which Auto class of transformers loads a target."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def find_auto_class(config: Any) -> Any:
    """The class that loads a model of this config with its LM head: AutoModelForCausalLM, or another one for models
    that also read images or sounds. Models that no class knows are left to AutoModelForCausalLM."""
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        auto = getattr(transformers, name, None)  # the last is newer than the oldest release we take
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    return AutoModelForCausalLM


def find_auto_class_of(name: str, *, trust_remote_code: bool = False) -> Any:
    """`find_auto_class` of a folder or hub id."""
    try:
        return find_auto_class(AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code))
    except (OSError, ValueError):  # it also loads folders of adapters, and its errors are the known ones
        return AutoModelForCausalLM
