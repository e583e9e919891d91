"""EAGLE-4 as NVIDIA's Automodel documents the layout: read as EAGLE-3.1 with a sliding window, never written.

    efficient_lm_head_down_proj.weight [r, D], efficient_lm_head.weight [V, r]: the low-rank candidate head

The candidate head chooses the tokens whose rows of lm_head.weight are computed, which saves time. Heads here compute
all rows, so its tensors are left out, and its tokens have the same scores.
"""

from dataclasses import replace
from typing import ClassVar

from draftsmith.heads.formats.eagle.eagle3 import IDS, Eagle3, is_eagle4
from draftsmith.heads.formats.format import Imported
from draftsmith.heads.formats.published import Published, refuse
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
        if lost := [f"config.json has no {name}" for key, name in STATED.items() if dense.setting(key) is None]:
            refuse(published.path, *lost)
        if "lm_head.weight" not in dense:
            refuse(published.path, "tensor lm_head.weight is missing")
        imported = super().read(dense, target)
        if candidate_head:
            imported.notes.append(
                f"the candidate head ({', '.join(candidate_head)}) is left out: drafts have the scores of all of "
                "lm_head.weight"
            )
        return imported
