"""Writes a target and heads as the authors' code reads them."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target

SHARD_SIZE = "16MB"  # their EAGLE reads the embedding through the index of several files


def write_target(target: Target, eos_token_id: int, folder: Path) -> None:
    """Writes a Llama under a config of older transformers.

    Token ids are the only interface, so its tokenizer has numbers for words. Older tokenizers read this file, too.

    Raises:
        ValueError: the authors' code would read another model.
    """
    settings = target.text_config.to_dict()
    rope = settings["rope_parameters"]
    if settings["model_type"] != "llama" or rope["rope_type"] != "default":
        shown = f"{settings['model_type']} with RoPE of type {rope['rope_type']}"
        raise ValueError(f"the target is a {shown}; give a Llama with default RoPE")
    target.model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    old = {**settings, "architectures": ["LlamaForCausalLM"], "rope_theta": rope["rope_theta"], "rope_scaling": None}
    del old["rope_parameters"], old["dtype"]
    old["torch_dtype"] = str(target.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(old, indent=1), encoding="utf-8")
    words = {str(token): token for token in range(target.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")))
    tokenizer.save_pretrained(folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(eos_token_id)}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def write_heads(heads: DraftHeads, target: Target, form: str, folder: Path) -> None:
    """Exports heads for the target in the folder "target" beside them.

    Args:
        form: as `draftsmith export` names formats.
    """
    exported = find_format(form, heads.config.head_type).write(heads.config, heads.state_dict(), target)
    named = {name: "target" for name in exported.config if name == "base_model_name_or_path"}  # Medusa reads it
    folder.mkdir()
    replace(exported, config={**exported.config, **named}).save(folder)
