"""Formats that are named, so that a checkpoint is never mistaken for another one, but not read."""

from __future__ import annotations

import re
from typing import NoReturn

from heads.formats.format import Format
from heads.formats.published import Published
from inference.targets.target import Target

_TRAIN = "Heads of this kind can be trained here: draftsmith train."


class UnreadFormat(Format):
    """A format without a reader."""

    cure: str | None = _TRAIN

    def read(self, published: Published, target: Target) -> NoReturn:
        raise ValueError(f"{published.path} holds {self.title}, which is not read. {self.cure}")


class WholeModel(UnreadFormat):
    name = "model"
    title = "a whole model, which may be a target"
    cure = (
        "Give the folder of the heads; MTP modules in a target's own checkpoint are read by "
        "heads.mtp.MTPHeads.from_target_checkpoint."
    )

    def matches(self, published: Published) -> bool:
        return re.search("ForCausalLM|ForConditionalGeneration", published.architectures) is not None


class PublishedBlock(UnreadFormat):
    name = "dflash"
    title = "a block drafter in the published DFlash or DSpark format"

    def matches(self, published: Published) -> bool:
        names = f"{published.architectures} {published.config.get('speculators_model_type', '')}"
        return re.search("DFlash|DSpark", names, re.IGNORECASE) is not None


class PublishedHydra(UnreadFormat):
    name = "hydra"
    title = "heads in the published Hydra format"

    def matches(self, published: Published) -> bool:
        return "hydra_num_heads" in published.config or published.file.startswith("hydra") or published.has(r"hydra_.*")


class PublishedMedusa(UnreadFormat):
    name = "medusa"
    title = "heads in the published Medusa format"

    def matches(self, published: Published) -> bool:
        return (
            "medusa_num_heads" in published.config
            or "MedusaModel" in published.architectures
            or published.file.startswith("medusa_lm_head")
            or published.has(r"(medusa_head\..*|\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)")
        )
