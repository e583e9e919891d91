"""Import(export(heads)) is the heads, bit for bit: every format x every kind that it takes x every variant of the kind.

What a format cannot express is refused with a reason, never written; a damaged tensor and a lost key are refused by
their names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Format
from draftsmith.heads.formats.published import open_published
from draftsmith.heads.formats.registry import FORMATS, find_format
from draftsmith.inference import Target
from tests.heads.formats.round_trip import (
    assert_damage_is_named,
    assert_lost_keys_are_refused,
    export_heads,
    publish,
    write,
)
from tests.heads.test_contract import assert_same_tensors, config_of
from tests.heads.tiny_heads import AS_PUBLISHED, VARIANT_IDS, VARIANTS, tiny_heads

# What a format does not take, per variant, and the words of its reason. The other pairs must come back as they were.
REFUSED: dict[tuple[str, str], str] = {
    ("vllm", "eagle-1"): "vLLM drops fc.bias silently",
    ("vllm", "eagle-2"): "vLLM takes the target's embeddings for EAGLE-1",
    ("sglang", "eagle-2"): "its attention has no biases there",
    ("eagle", "eagle3-2"): "their code does not know fc_norm, norm_output",
    ("eagle", "eagle3-3"): "their code does not know norm_output",
    ("eagle", "eagle3-4"): "their code does not know norm_before_residual, norm_before_fc, norm_output",
    ("sglang", "eagle3-4"): "SGLang takes the target's embeddings",
    ("gguf", "eagle3-2"): "llama.cpp does not know fc_norm True, norm_output True",
    ("gguf", "eagle3-3"): "llama.cpp does not know norm_output True",
    ("gguf", "eagle3-4"): "llama.cpp does not know norm_output True, qkv_bias True",
    **{("eagle", f"eagle3-{index}"): "their code has one layer" for index in (5, 6)},
    **{("gguf", f"eagle3-{index}"): "num_layers ., sliding_window 4" for index in (5, 6)},
    ("sglang", "eagle3-6"): "SGLang has one window for all layers",
    ("hydra", "hydra-0"): "use_embedding_norm is True, and there False",
    ("hydra", "hydra-2"): "use_prefix_norm is False, and there True",
    ("hydra", "hydra-3"): "use_embedding_norm is True, and there False",
    ("dflash", "block-1"): "the mask was trained, and these readers",
    ("dflash", "block-2"): "is_causal is true, which these readers",
    ("sglang", "block-1"): "the mask was trained, and these readers",
    ("sglang", "block-2"): "is_causal is true, which these readers",
    ("gguf", "block-1"): "the mask was trained.*parts of DSpark",
    ("gguf", "block-2"): "parts of DSpark",
    **{("gguf", name): "this format knows no sliding_window" for name in ("block-3", "block-4", "dflash2-1")},
    ("gguf", "dflash2-0"): "selector_top_k is 16, .* hidden size of 272",
    **{(name, "dflash2-1"): "predicts_at_anchor is True" for name in ("dflash", "sglang", "vllm")},
    **{
        (name, f"mtp-{index}"): r"families that have it \(deepseek_v3.*eagle3"
        for name in ("vllm", "sglang", "transformers")
        for index in range(4)
    },
    ("sglang", "mtp-2"): "SGLang reads one module, .* have 4",
    ("transformers", "block-1"): "the mask was trained",
    ("transformers", "block-2"): "is_causal is true",
    ("transformers", "block-3"): "its window reaches",
    ("transformers", "block-4"): "its window reaches",
    ("speculators", "block-1"): "the mask was trained, and speculators",
    ("speculators", "block-2"): "is_causal is true, and speculators' blocks",
    ("vllm", "block-2"): "these are read: DFlash .* and DSpark",
}
WRITERS = [known for known in FORMATS if known.kinds]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_HYDRA = {"use_embedding_norm": False, "num_layers": 2, "use_biases": True}
_HYDRA_PLUS = {**_HYDRA, "use_prefix_attention": True, "use_prefix_norm": True, "rope_parameters": _ROPE}
# Beside the variants: (a format's name, kind, configuration, the words of its reason where it does not take that).
MORE: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("vllm", "block", {"is_causal": True, "num_layers": 1}, None),
    ("vllm", "block", {"is_causal": True, "predicts_at_anchor": True, "markov_rank": 6}, None),
    ("vllm", "block", {"feature_layers": [2, 8]}, r"feature_layers \[8\].*allowed are the layers 1 to 7"),
    ("vllm", "block", {"predicts_at_anchor": True}, "these are read: DFlash .* and DSpark .*choose speculators"),
    ("vllm", "block", {"predicts_at_anchor": True, "has_confidence": True}, "has_confidence True.*choose speculators"),
    ("speculators", "block", {"predicts_at_anchor": True}, None),
    *(
        ("gguf", "eagle3", {**AS_PUBLISHED, **settings}, reason)
        for settings, reason in (
            ({"norm_before_residual": True, "own_embedding": True, "rope_parameters": _ROPE}, None),
            ({"norm_before_fc": True}, None),
            ({"rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 2.0}}, None),
            ({"rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
            ({"feature_layers": [2, 3, 8]}, r"not the last norm's output \(8 of \[2, 3, 8\]\)"),
        )
    ),
    ("hydra", "hydra", {"use_embedding_norm": False}, None),
    ("hydra", "hydra", _HYDRA, None),
    ("hydra", "hydra", {**_HYDRA, "num_layers": 3}, r"share their weights.*hydra_mlp\.0\.2\.linear.*num_layers 1 or 2"),
    ("hydra", "hydra", {**_HYDRA_PLUS, "use_biases": False}, None),
    ("hydra", "hydra", _HYDRA_PLUS, None),
    ("hydra", "hydra", {**_HYDRA_PLUS, "rope_parameters": {**_ROPE, "rope_theta": 5e5}}, "rope_parameters is .*500000"),
    ("hydra", "hydra", {**_HYDRA_PLUS, "intermediate_size": 24}, "intermediate_size is 24, and there 64"),
]
_OWN_SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "intermediate_size": 40}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# As `MORE`, where no damage is looked for.
WHOLE = [
    # Layers that are not the usual ones. The engines' limits are one function.
    *((name, "eagle3", {"feature_layers": [1, 3, 6]}, None) for name in ("vllm", "sglang", "speculators")),
    *((name, "eagle3", {"feature_layers": [0, 4, 5]}, None) for name in ("vllm", "speculators")),
    ("sglang", "eagle3", {"feature_layers": [0, 4, 5]}, "SGLang cannot tap the embeddings"),
    ("eagle", "eagle3", {"feature_layers": [1, 3, 6]}, "their code reads layers"),
    ("vllm", "eagle3", {"feature_layers": [7, 2, 4]}, "vLLM sorts"),
    ("sglang", "eagle3", {"feature_layers": [2, 4, 8]}, "not the last norm's output"),
    ("speculators", "eagle3", {"feature_layers": [2, 5]}, "vLLM taps three"),
    *(
        (name, kind, {"rope_parameters": {**_ROPE, "rope_theta": 5e5, **rope}, **_OWN_SIZES}, None)
        for rope in ({}, {"rope_type": "llama3", **_LLAMA3})
        for kind, names in (("eagle", ("vllm", "sglang")), ("eagle3", ("vllm", "sglang", "speculators")))
        for name in names
    ),
]
# The variants that are damaged: each has tensors of its own.
DAMAGED = ("block-0", "block-1", "dflash2-0", "eagle-1", "eagle3-1", "medusa-0", "medusa-2", "parallel-1")
# Written and read as by the format "dflash".
_SAME_FILES = {(name, variant) for name in ("sglang", "vllm") for variant in ("block-0", "dflash2-0")}
# Tensors that a file may leave out, since the target has the same ones, or other tensors say the same.
MAY_LACK = ("embed_tokens.weight", "t2d", "output.weight", "token_embd.weight")
# Neighbours have different dtypes: each format and each kind has both.
CASES = [
    pytest.param(known, kind, overrides, REFUSED.get((known.name, name)), dtype, is_damaged, id=f"{known.name}-{name}")
    for number, known in enumerate(WRITERS)
    for index, ((kind, overrides), name) in enumerate(zip(VARIANTS, VARIANT_IDS, strict=True))
    for dtype in ((torch.float32, torch.bfloat16)[(number + index) % 2],)
    for is_damaged in (name in DAMAGED and (known.name, name) not in _SAME_FILES,)
    if kind in known.kinds
] + [
    pytest.param(find_format(name, kind), kind, overrides, reason, torch.float32, is_damaged, id=f"{name}-{kind}-m{n}")
    for is_damaged, more in ((True, MORE), (False, WHOLE))
    for n, (name, kind, overrides, reason) in enumerate(more)
]


@pytest.mark.parametrize(("known", "kind", "overrides", "reason", "dtype", "is_damaged"), CASES)
def test_heads_come_back_as_they_were(
    known: Format,
    kind: str,
    overrides: dict[str, Any],
    reason: str | None,
    dtype: torch.dtype,
    is_damaged: bool,
    target: Target,
    tmp_path: Path,
) -> None:
    heads = tiny_heads(kind, target, **overrides).to(dtype)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            export_heads(known, heads)
        return
    folder = write(export_heads(known, heads), tmp_path)
    again = DraftHeads.from_pretrained(folder, target=target)
    assert type(again) is type(heads)
    assert not again.training
    assert_same_tensors(dict(heads.state_dict()), dict(again.state_dict()))
    assert config_of(again) == config_of(heads)
    if known.needs_this_library:
        return
    published = open_published(str(folder))
    assert known.matches(published)
    assert known.matches(open_published(str(folder), on_meta=True))
    if not is_damaged:
        return
    copies = () if kind.startswith("eagle") else ("lm_head.weight",)
    assert_damage_is_named(known, published, target, (*MAY_LACK, *copies))
    assert_lost_keys_are_refused(known, published, heads)


def test_sglang_counts_layers_from_the_one_after(target: Target) -> None:
    config = publish(find_format("sglang", "eagle3"), tiny_heads("eagle3", target, feature_layers=[1, 3, 6])).config
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
