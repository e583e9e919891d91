"""EAGLE-4 as NVIDIA's Automodel documents the layout: read as EAGLE-3.1 with a sliding window, never written.

    efficient_lm_head_down_proj.weight [r, D], efficient_lm_head.weight [V, r]: the low-rank candidate head

The candidate head chooses the tokens whose rows of lm_head.weight are computed, which saves time. Heads here compute
all rows, so its tensors are left out, and its tokens have the same scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from draftsmith.heads.formats.eagle.eagle3 import IDS, Eagle3, is_eagle4
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import Published
from draftsmith.inference.targets.target import Target

DOWN, UP = "efficient_lm_head_down_proj.weight", "efficient_lm_head.weight"
# Keys that change drafts, and whose defaults are not documented.
STATED = {IDS: f"eagle_config with {IDS}", "fc_norm": "fc_norm", "norm_output": "norm_output"}


class Eagle4(Eagle3):
    title = "an EAGLE-4 drafter"
    kinds: ClassVar[tuple[str, ...]] = ()

    def matches(self, published: Published) -> bool:
        return is_eagle4(published)

    def read(self, published: Published, target: Target) -> Imported:
        candidate_head = {name: published[name] for name in (DOWN, UP) if name in published}
        others = {name: tensor for name, tensor in published.items() if name not in candidate_head}
        dense = replace(published, tensors=others)
        config, count = dense.setting("efficient_lm_head_config", {}), dense.setting("num_aux_hidden_states")
        imported = super().read(dense, target)
        found = {name: list(tensor.shape) for name, tensor in candidate_head.items()}
        imported.problems.extend(find_wrong_shapes(config, found, target))
        if count not in (None, taps := len(imported.settings["feature_layers"])):
            imported.problems.append(f"num_aux_hidden_states is {count!r}, and the config names {taps} layers")
        lost = [name for key, name in STATED.items() if dense.setting(key) is None]
        imported.problems.extend(f"config.json has no {name}" for name in lost)
        if "lm_head.weight" not in dense:
            imported.problems.append("tensor lm_head.weight is missing")
        if found:
            imported.notes.append(
                f"the candidate head ({', '.join(found)}) is left out: drafts have the scores of all of lm_head.weight"
            )
        return imported


def find_wrong_shapes(config: Any, found: dict[str, list[int]], target: Target) -> list[str]:
    """Problems of a candidate head. Without tensors it would be computed from lm_head.weight."""
    rank = config.get("rank") if isinstance(config, dict) else None
    if not found:
        return []
    if not isinstance(rank, int):
        return [f"efficient_lm_head_config is {config!r}, and should have the rank of {', '.join(found)}"]
    wanted = {DOWN: [rank, target.hidden_size], UP: [target.vocab_size, rank]}
    missing = [f"tensor {name} is missing" for name in wanted.keys() - found.keys()]
    return missing + [
        f"tensor {name} is {shape} and should be {wanted[name]}"
        for name, shape in found.items()
        if shape != wanted[name]
    ]
