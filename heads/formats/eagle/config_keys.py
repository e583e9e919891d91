"""Keys of published configs that nobody asked for: which ones change what heads compute, and which ones do not.

Published configs carry whatever their target's family has: Granite's multipliers, Gemma's soft caps, labels, licences.
A key that may change the maths is refused by its name, unless its value changes nothing. Other keys are named once.
"""

import re
from typing import Any

from transformers import LlamaConfig

from draftsmith.heads.formats.published import OWN_KEY, Published

# The tables of a config whose keys belong to the heads.
_TABLES = ("eagle_config", "dflash_config", "transformer_layer_config")
# Parts of names of keys that scale, bound, bias, rotate, normalise or mask something.
_MATHS = re.compile(
    "multiplier|softcap|scal(e|ing|ar)|clip|clamp|temperature|mup|dim_model_base|bias|norm|rope|rotary|alibi|sink"
    "|window|swa|chunk|bidirectional|parallel_(attn|residual)|quantization"
)
# Keys that scale the attention's scores -> the power of the size of a head that changes nothing.
_ATTENTION_SCALES = {
    "attention_multiplier": -0.5,
    "attn_scale": -0.5,
    "softmax_scale": -0.5,
    "query_pre_attn_scalar": 1,
}
# Keys that say nothing about the maths of these heads, or that the tensors say better: `bias` of EAGLE-1's fc.
_HARMLESS = {
    *LlamaConfig().to_dict(),
    *("torch_dtype", "auto_map", "name_or_path", "bias", "max_window_layers", "target_model_type", "license"),
    *("norm_topk_prob", "routed_scaling_factor"),  # of mixtures
    "sliding_window_pattern",  # layer_types says it
    *("embed_requires_grad", "has_no_defaults_at_init", "sliding_window_non_causal"),
    *("efficient_lm_head_config", "num_aux_hidden_states"),  # of EAGLE-4: a head that is left out, and fc's width
    *("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers"),
    *(OWN_KEY, *_TABLES, "speculators_config", "speculators_model_type", "speculators_version"),
    *("pard_token", "ptd_token_id", "mask_token_id", "num_anchors", "confidence_head_alpha"),
}


def find_unread(published: Published, head_dim: int) -> tuple[list[str], list[str]]:
    """(problems, notes) about the keys that were not asked for (`Published.setting`)."""
    problems, others = [], []
    tables = [table for name in _TABLES if isinstance(table := published.config.get(name), dict)]
    for key, value in (item for level in (published.config, *tables) for item in level.items()):
        if key in published.asked or key in _HARMLESS or key.startswith("_"):
            continue
        if not _MATHS.search(key):
            others.append(key)
        elif not _is_neutral(key, value, head_dim):
            problems.append(f"{key} is {value!r}, which heads here do not have: they would compute something else")
    named = ", ".join(sorted(set(others)))
    return problems, [f"keys of config.json that are not read: {named}"] if others else []


def _is_neutral(key: str, value: Any, head_dim: int) -> bool:
    if value is None or value is False:
        return True
    if not isinstance(value, int | float) or value is True:
        return False
    if (power := _ATTENTION_SCALES.get(key)) is not None:
        needed = head_dim**power
        return bool(abs(value - needed) <= 1e-6 * needed)
    return value == 1
