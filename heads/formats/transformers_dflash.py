"""DFlash heads as an assistant model of transformers (from 5.24 on), which drafts chains for one text at a time.

    model.generate(..., assistant_model=assistant, speculation_type="dflash")

transformers has one class for them, `MuseGlimmerAssistantModel`. Tensor names are DFlash's but for two.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from draftsmith.heads.formats.block import DFlash
from draftsmith.heads.formats.format import Exported, Imported
from draftsmith.heads.formats.published import Published
from draftsmith.heads.formats.tensors import rename
from draftsmith.inference.targets.target import Target

MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_PYTHON = (
    "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # 5.24 or later\n\n"
    "model, tokenizer = AutoModelForCausalLM.from_pretrained({target}), AutoTokenizer.from_pretrained({target})\n"
    "assistant = AutoModel.from_pretrained({heads}, dtype=model.dtype)\n"
    'inputs = tokenizer("Hello", return_tensors="pt")\n'
    'output = model.generate(**inputs, assistant_model=assistant, speculation_type="dflash", max_new_tokens=64)\n'
    "print(tokenizer.decode(output[0]))"
)


class TransformersDFlash(DFlash):
    name = "transformers"
    title = "a DFlash assistant of transformers"

    def matches(self, published: Published) -> bool:
        return published.config.get("model_type") == MODEL_TYPE

    def read(self, published: Published, target: Target) -> Imported:
        """The config has no sizes of a vocabulary: tokens are the target's."""
        config = {"vocab_size": target.vocab_size, **published.config}
        imported = super().read(replace(published, config=config, tensors=rename(published, _NAMES)), target)
        return replace(imported, names={**imported.names, **_NAMES})

    def limits(self, config: Any, has_own_mask: bool) -> tuple[tuple[bool, str], ...]:
        return (
            *super().limits(config, has_own_mask),
            (bool(config.markov_rank or config.has_confidence), "it knows DFlash only, without DSpark's parts"),
            (config.sliding_window is not None, "its window reaches as far after the block as before it"),
        )

    def write(self, config: Any, tensors: dict[str, Tensor], target: Target) -> Exported:
        exported = super().write(config, tensors, target)
        own = exported.config.pop("dflash_config")
        # Its class has tokens of another model as defaults.
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        keys = {
            **exported.config,
            **own,
            **tokens,
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": MODEL_TYPE,
        }
        renamed = {_NAMES.get(name, name): tensor for name, tensor in exported.tensors.items()}
        return replace(exported, config=keys, tensors=renamed, python=_PYTHON)
