"""A whole model, which is named, so that it is never mistaken for heads, but not read."""

from __future__ import annotations

import re

from draftsmith.heads.formats.format import Format
from draftsmith.heads.formats.published import Published


class WholeModel(Format):
    name = "model"
    title = "a whole model, which may be a target"
    cure = (
        "Give the folder of the heads; MTP modules in a target's own checkpoint are read by "
        "draftsmith.heads.kinds.mtp.MTPHeads.from_target_checkpoint."
    )

    def matches(self, published: Published) -> bool:
        return re.search("ForCausalLM|ForConditionalGeneration", published.architectures) is not None
