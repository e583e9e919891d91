"""The mask of block drafters in published checkpoints, and the copies of the target's tensors that these hold.

Legend: V target vocabulary, D hidden size.
"""

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.formats.eagle.llama_keys import Reading
from draftsmith.heads.formats.tensors import as_wide_as, count_rows, is_targets_table, take_copies
from draftsmith.heads.modules.vocabulary import seldom_token
from draftsmith.inference.targets.target import Target

EMBEDDING = "embed_tokens.weight"
_MASK_FILE = "mask_embedding.pt"


def embedding_of(target: Target) -> Tensor:
    """[V, D], which a row of the target's embedding is read from."""
    embedding: Any = target.embed_tokens
    table: Tensor = embedding.weight.detach()
    first = torch.arange(min(8, len(table)), device=table.device)
    with torch.no_grad():
        is_plain = torch.equal(embedding(first), table[first])
    if not is_plain:
        raise ValueError(
            f"{type(target.model).__name__} scales its embeddings, and engines read the mask from the table: heads for "
            "this target are not written in this format"
        )
    return table


@torch.no_grad()
def embed_token(target: Target, token: int) -> Tensor:
    """[D] on the CPU: what the target's embedding gives for a token."""
    row: Tensor = target.embed_tokens(torch.tensor([token], device=target.device))[0]
    return row.cpu()


def find_token(mask: Tensor, target: Target) -> int | None:
    """The token whose embedding the mask [D] is; None = it has one of its own."""
    same = (embedding_of(target).to(mask) == mask).all(dim=1).nonzero()
    return int(same[0, 0]) if same.numel() else None


def write_tensors(
    tensors: Mapping[str, Tensor], target: Target, names: Mapping[str, str]
) -> tuple[int, dict[str, Tensor]]:
    """The mask's token, and tensors by their published names. The target's embeddings are among them where none is the
    mask's: then the mask is in the place of a token that texts have seldom."""
    written = {names.get(name, name): x for name, x in tensors.items() if name != "mask_embedding"}
    mask = tensors["mask_embedding"].detach()
    if (same := find_token(mask, target)) is not None:
        return same, written
    token = seldom_token(target)
    table = embedding_of(target).to(mask).clone()
    table[token] = mask
    return token, {**written, EMBEDDING: table}


def take_mask(reading: Reading, tensors: dict[str, Tensor]) -> Tensor:
    """Takes the embeddings out of `tensors`, which must be the target's but for the mask's row; returns that row."""
    published, target = reading.published, reading.target
    mask_id, table = published.setting("mask_token_id"), tensors.pop(EMBEDDING, None)
    if not isinstance(mask_id, int):
        reading.refuse(
            "config.json has no mask_token_id" if mask_id is None else f"mask_token_id is {mask_id!r}, and no token"
        )
    if not 0 <= mask_id < (target.num_embeddings if table is None else count_rows(table)):
        where = "the target" if table is None else f"tensor {EMBEDDING}"
        reading.refuse(f"mask_token_id is {mask_id}, which has no embedding in {where}")
    if (mask := _read_mask_file(reading, mask_id)) is None:
        mask = embed_token(target, mask_id) if table is None else table[mask_id]
    if table is not None:
        shape = embedding_of(target).shape
        table = table[: shape[0]]  # there may be more rows, for the mask
        if table.shape != shape:
            reading.refuse(f"tensor {EMBEDDING} is {list(table.shape)}, and the target's own is {list(shape)}")
        if not is_targets_table(table, target, but=mask_id):
            reading.refuse(
                f"tensor {EMBEDDING} differs from the target's own in more than the mask's row: give the target that "
                "the heads were trained for"
            )
    return as_wide_as(mask, tensors.get("fc.weight"))


def find_fixed_mask(reading: Reading, mask: Tensor) -> int | None:
    """The mask's token, unless the mask [D] has an embedding of its own."""
    token: int = reading.published.setting("mask_token_id")
    target = reading.target
    is_tokens = token < target.num_embeddings and torch.equal(embed_token(target, token).to(mask), mask)
    return token if is_tokens else None


def _read_mask_file(reading: Reading, mask_id: int) -> Tensor | None:
    """vLLM reads the mask's embedding from this file where there is one."""
    if (file := reading.published.find(_MASK_FILE)) is None:
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reading.refuse(f"{_MASK_FILE} is damaged, or holds more than tensors ({error})")
    if isinstance(content, dict):
        if content.get("mask_token_id", mask_id) != mask_id:
            reading.refuse(f"{_MASK_FILE} is of token {content['mask_token_id']}, and mask_token_id is {mask_id}")
        content = content.get("embedding")
    if not isinstance(content, Tensor):
        reading.refuse(f"{_MASK_FILE} has no tensor 'embedding'")
    return content.reshape(-1)


def take_vocabulary(reading: Reading, tensors: dict[str, Tensor]) -> None:
    """Takes out the maps of a draft vocabulary that is the target's own, and speculators' copy of the target's norm."""
    target = reading.target
    whole = {"d2t": torch.zeros(target.vocab_size), "t2d": torch.ones(target.vocab_size)}
    for name, expected in whole.items():
        if (given := tensors.pop(name, None)) is not None and not torch.equal(given.to(expected), expected):
            reading.refuse(f"tensor {name} maps a reduced vocabulary, and block drafters here score the target's own")
    if (gain := target.final_norm_gain()) is not None:
        take_copies(reading.published.path, tensors, {"verifier_norm.weight": gain})
