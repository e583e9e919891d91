"""What a call of `generate` takes from the generation config of the model, because the caller does not give it."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

# Settings that change texts, with the value that changes nothing; None changes nothing either.
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "watermarking_config": None,
}
_NEUTRAL_WHEN_SAMPLED: dict[str, Any] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_p": 0.0,
    "temperature": 1.0,
    "top_h": None,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
}


def find_model_settings(config: GenerationConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model's generation config that change the texts of a call.

    Args:
        given: the call's arguments. They hold, also where they are neutral.

    Returns:
        values by name; {} where nothing comes from the config.
    """
    is_sampled = given.get("do_sample", config.do_sample)
    neutral = _NEUTRAL | (_NEUTRAL_WHEN_SAMPLED if is_sampled else {})
    values = {name: value for name, value in config.to_dict().items() if name in neutral and name not in given}
    return {name: value for name, value in sorted(values.items()) if value not in (None, neutral[name])}


def describe_model_settings(settings: Mapping[str, Any]) -> str:
    """A line for people about settings that are not empty."""
    return "from the target's generation config: " + ", ".join(f"{name} {value}" for name, value in settings.items())
