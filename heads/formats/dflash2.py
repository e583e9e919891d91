"""DFlash 2 as its authors and NVIDIA's Automodel publish it, in vLLM, in SGLang, and in the speculators format.

The layout is DFlash's, with convolutions in the layers, a selector, and four sizes: beside `target_layer_ids` in the
authors' config, at the top in speculators'. Engines of the first releases with DFlash 2 read the former only.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from draftsmith.heads.formats.block import BlockSpeculators, DFlash, SGLangBlock, VLLMBlock
from draftsmith.heads.formats.eagle.llama_keys import Reading
from draftsmith.heads.formats.format import Exported
from draftsmith.heads.formats.published import Published
from draftsmith.inference.targets.target import Target

SELECTOR = {
    "selector.predecessor_embedding.weight": "candidate_selector.predecessor_codebook",
    "selector.successor_embedding.weight": "candidate_selector.successor_codebook",
    "selector.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


class DFlash2(DFlash):
    title = "a DFlash 2 drafter"
    kinds = ("dflash2",)
    names: ClassVar[dict[str, str]] = SELECTOR

    def matches(self, published: Published) -> bool:
        return re.search("DFlash2", published.architectures, re.IGNORECASE) is not None

    def architecture(self, config: Any) -> str:
        return "DFlash2DraftModel"

    def sizes(self, config: Any) -> dict[str, int]:
        return {name: getattr(config, name) for name in SIZES}

    def _read_block(self, reading: Reading) -> dict[str, Any]:
        block = super()._read_block(reading)
        kept = ("block_size", "predicts_at_anchor", "is_causal")
        return {key: block[key] for key in kept} | {name: reading.integer(name) for name in SIZES}


class SGLangDFlash2(DFlash2, SGLangBlock):
    pass


class VLLMDFlash2(DFlash2, VLLMBlock):
    pass


class DFlash2Speculators(DFlash2, BlockSpeculators):
    def matches(self, published: Published) -> bool:
        return published.config.get("speculators_model_type") == "dflash2"

    def algorithm(self, config: Any) -> str:
        return "dflash2"

    def _read_sliding_causal(self, reading: Reading) -> bool:
        """The default differs from DFlash's."""
        return reading.published.setting("sliding_window_non_causal", True) is not True

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        note = "Engines of the first releases with DFlash 2 do not read this layout; for them choose vllm or sglang."
        written = super().write(config, tensors, target)
        return replace(written, commands=(), notes=(*written.notes, note))
