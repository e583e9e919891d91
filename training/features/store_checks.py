"""Checks before the first step: do stored features belong to this target and these texts?"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
import xxhash

from draftsmith.heads import DraftHeads
from draftsmith.heads.adapter import find_adapter_hash
from draftsmith.inference.targets.target import Target
from draftsmith.training.data.collation import iterate_column
from draftsmith.training.features.store import FeatureStore, TargetIdentity, hash_text, name_tensors

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


def check_same_target(folder: Path, stored: TargetIdentity, found: TargetIdentity) -> None:
    """Raises ValueError, with the differences and the cure, when stored states are not this target's."""
    one, other = asdict(stored), asdict(found)
    if different := [f"{key} {one[key]} (now {other[key]})" for key in one if key != "name" and one[key] != other[key]]:
        raise ValueError(
            f"{folder} holds states of another target ({stored.name}) than this run's ({found.name}): they differ in "
            f"{', '.join(different)}. Give the target, --target_dtype and --init_heads of the extraction, or extract "
            "the states of this target into another folder (draftsmith features)"
        )


def explain_date(tokenizer: Any) -> str:
    """What to add about missing texts where the chat template writes today's date; "" where it writes none."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return ""
    return (
        ". The target's chat template writes today's date (strftime_now), so the texts of another day are other texts, "
        "and stored states do not fit them: save the target's tokenizer with a template that has a fixed date, and "
        "extract with it"
    )


def check_complete(store: FeatureStore, heads: DraftHeads, rows: Mapping[str, Any], hint: str = "") -> None:
    """Raises ValueError when a run needs tensors, shards or texts that the store lacks.

    Args:
        rows: by purpose; the texts of a stream cannot be checked before they are read.
        hint: of `explain_date`, for texts that are missing.
    """
    settings, kind = store.settings, heads.config.head_type
    wanted = name_tensors(heads.feature_layers, settings.target.num_layers)
    if lacking := [name for name in wanted if name not in settings.tensors]:
        raise ValueError(
            f"{store.folder} holds {', '.join(settings.tensors)}, and these {kind} heads read "
            f"{', '.join(wanted)}: extract again with --head_type {kind} to store {', '.join(lacking)}"
        )
    planned = settings.num_shards
    if store.num_finished < planned:
        raise ValueError(
            f"{store.folder} is not finished: it has {store.num_finished} of {planned} shards. Run the same "
            "draftsmith features command again to write the others"
        )
    for purpose, part in rows.items():
        known = iterate_column(part, "input_ids") if isinstance(part, datasets.Dataset) else ()
        if missing := sum(not store.has(ids) for ids in known):
            raise ValueError(
                f"{store.folder} lacks {missing} of the {len(part)} {purpose} texts of this run: train with the data, "
                f"the max_length and the chat template of the extraction, or extract again{hint}"
            )
