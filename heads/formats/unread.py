"""Formats that are named, so that a checkpoint is never mistaken for another one, but not read."""

from __future__ import annotations

import re
from typing import NoReturn

from draftsmith.heads.formats.format import Format
from draftsmith.heads.formats.published import Published
from draftsmith.inference.targets.target import Target

_TRAIN = "Heads of this kind can be trained here: draftsmith train."


class UnreadFormat(Format):
    """A format without a reader."""

    cure: str | None = _TRAIN

    def read(self, published: Published, target: Target) -> NoReturn:
        raise ValueError(f"{published.path} holds {self.title}, which is not read. {self.cure}")


class DFlash2(UnreadFormat):
    """DFlash with convolutions in its layers and a selector of candidates."""

    name = "dflash2"
    title = "a DFlash-2 drafter"
    cure = "DFlash and DSpark are read, and can be trained here: draftsmith train (head_type: block)."

    def matches(self, published: Published) -> bool:
        names = f"{published.architectures} {published.config.get('speculators_model_type')}"
        return re.search("dflash[-_]?2", names, re.IGNORECASE) is not None


class WholeModel(UnreadFormat):
    name = "model"
    title = "a whole model, which may be a target"
    cure = (
        "Give the folder of the heads; MTP modules in a target's own checkpoint are read by "
        "draftsmith.heads.kinds.mtp.MTPHeads.from_target_checkpoint."
    )

    def matches(self, published: Published) -> bool:
        return re.search("ForCausalLM|ForConditionalGeneration", published.architectures) is not None
