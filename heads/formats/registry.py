"""All formats of other projects: which one a checkpoint is in, and which one an engine reads."""

import re
from typing import Any

from draftsmith.heads.formats.block import BlockSpeculators, DFlash, SGLangBlock, VLLMBlock
from draftsmith.heads.formats.custom_generate import CustomGenerateFolder
from draftsmith.heads.formats.dflash2 import DFlash2, DFlash2Speculators, SGLangDFlash2, VLLMDFlash2
from draftsmith.heads.formats.eagle.eagle1 import Eagle1, SGLangEagle1, VLLMEagle1
from draftsmith.heads.formats.eagle.eagle3 import Eagle3
from draftsmith.heads.formats.eagle.eagle4 import Eagle4
from draftsmith.heads.formats.eagle.engines import SGLangEagle3, VLLMEagle3
from draftsmith.heads.formats.eagle.speculators_format import Speculators
from draftsmith.heads.formats.format import Format
from draftsmith.heads.formats.hydra import Hydra
from draftsmith.heads.formats.llama_cpp.gguf_dflash import GgufDFlash
from draftsmith.heads.formats.llama_cpp.gguf_eagle3 import GgufEagle3
from draftsmith.heads.formats.medusa import Medusa, VLLMMedusa
from draftsmith.heads.formats.published import Published
from draftsmith.heads.formats.stitched_mtp import VLLMMTP, SGLangMTP, TransformersMTP
from draftsmith.heads.formats.transformers_dflash import TransformersDFlash
from draftsmith.inference.targets.target import Target


class WholeModel(Format):
    """Named, so that it is never mistaken for heads, but not read."""

    name = "model"
    title = "a whole model, which may be a target"
    cure = (
        "Give the folder of the heads; MTP modules in a target's own checkpoint are read by "
        "draftsmith.heads.kinds.mtp.MTPHeads.from_target_checkpoint."
    )

    def matches(self, published: Published) -> bool:
        return re.search("ForCausalLM|ForConditionalGeneration", published.architectures) is not None


# In the order of recognition: the first that matches is the checkpoint's, so the special ones come first. Several with
# one name write different kinds of heads for one engine.
FORMATS: tuple[Format, ...] = (
    GgufEagle3(),
    GgufDFlash(),
    DFlash2Speculators(),
    DFlash2(),
    TransformersDFlash(),
    BlockSpeculators(),
    DFlash(),
    Speculators(),
    Eagle4(),
    Eagle3(),
    Eagle1(),
    Hydra(),
    Medusa(),
    VLLMMedusa(),
    VLLMMTP(),
    WholeModel(),
    VLLMEagle1(),
    VLLMEagle3(),
    SGLangEagle1(),
    SGLangEagle3(),
    VLLMBlock(),
    VLLMDFlash2(),
    SGLangBlock(),
    SGLangDFlash2(),
    SGLangMTP(),
    TransformersMTP(),
    CustomGenerateFolder(),
)


# Where heads can decode -> the format that is written for it; "" = heads of this library as they are.
PLACES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "gguf", "transformers": "custom_generate", "draftsmith": ""}


def serves(place: str, kind: str) -> bool:
    """Whether heads of this kind can decode at one of `PLACES`, with some settings and targets."""
    return not PLACES[place] or any(known.name == PLACES[place] and kind in known.kinds for known in FORMATS)


def settings_for(place: str, kind: str) -> dict[str, Any]:
    """The settings that new heads of this kind need so that they can be exported to one of `PLACES`."""
    return find_format(PLACES[place], kind).settings if PLACES[place] else {}


def check_place(heads: Any, target: Target, place: str) -> None:
    """Refuses heads that cannot be exported to one of `PLACES` after training.

    Args:
        heads: of any kind, before or after training.
    """
    if not PLACES[place]:
        return
    # Training changes every weight: a mask that is still the target's embedding will differ from it.
    trained = {name for name, parameter in heads.named_parameters() if parameter.requires_grad}
    tensors = {name: tensor + 1 if name in trained else tensor for name, tensor in heads.state_dict().items()}
    try:
        find_format(PLACES[place], heads.config.head_type).write(heads.config, tensors, target)
    except ValueError as error:
        raise ValueError(f"got --for {place}: {error}") from error


def recognize(published: Published) -> Format | None:
    """The format of a checkpoint; None = unknown."""
    return next((known for known in FORMATS if known.matches(published)), None)


def find_format(name: str, kind: str) -> Format:
    """The format of this name that writes heads of this kind.

    Raises:
        ValueError: there is none; the message names the formats for the kind, or the known names.
    """
    writers = [known for known in FORMATS if known.kinds]
    named = [known for known in writers if known.name == name]
    if not named:
        raise ValueError(f"got format {name!r}; allowed are {', '.join(dict.fromkeys(one.name for one in writers))}")
    if (found := next((known for known in named if kind in known.kinds), None)) is not None:
        return found
    engines = [known for known in writers if not known.needs_this_library]
    others = dict.fromkeys(known.name for known in engines if kind in known.kinds)
    kinds = dict.fromkeys(one for known in named for one in known.kinds)
    raise ValueError(
        f"{kind} heads are not written as {name}, which takes {', '.join(kinds)}: "
        + (f"choose {' or '.join(others)}" if others else "no engine serves them, so decode with draftsmith")
        + ". transformers runs them as custom_generate"
    )
