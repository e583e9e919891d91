"""Identifies the target of stored features by hashes."""

from __future__ import annotations

import json

import torch
import xxhash

from draftsmith.heads.adapter import find_adapter_hash
from draftsmith.inference.targets.target import Target
from draftsmith.training.features.store import TargetIdentity, hash_text

_ROWS = 8192  # rows of the embedding to hash at a time
# Configuration keys that do not change the states: origin, how to run the model, where texts begin and end.
_NOT_OF_THE_MODEL = {
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
}


@torch.no_grad()
def identify_target(target: Target, name: str) -> TargetIdentity:
    """Returns the identity that stored states must share with this target.

    The layers are not hashed, because they may be offloaded or split over processes: the self-check compares their
    results.
    """
    digest = xxhash.xxh3_128()
    for start in range(0, target.num_embeddings, _ROWS):
        ids = torch.arange(start, min(start + _ROWS, target.num_embeddings), device=target.device)
        digest.update(target.embed_tokens(ids).cpu().contiguous().view(torch.uint8).numpy().data)
    for rows in target.lm_head_weight().split(_ROWS):
        digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().data)
    settings = {key: value for key, value in target.text_config.to_diff_dict().items() if key not in _NOT_OF_THE_MODEL}
    return TargetIdentity(
        name=name,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        dtype=str(target.dtype).removeprefix("torch."),
        config_hash=hash_text(json.dumps(settings, sort_keys=True, default=str)),
        weights_hash=digest.hexdigest(),
        adapter_hash=find_adapter_hash(target.model),
    )
