"""The reduced draft vocabulary: a drafter scores only the frequent tokens, and a map gives their target ids.

Legend: Vd draft vocabulary, V target vocabulary, D hidden size.

Worked example: V = 6, the chosen target ids are [1, 4, 5]. Then
    d2t = [1, 3, 3]                        (OFFSETS: target id = draft index + d2t)
    t2d = [False, True, False, False, True, True]
"""

import math

import torch
from torch import Tensor

from draftsmith.inference.targets.target import Target


def most_frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids in ascending order ([size] int64); ties go to the lower id.

    Args:
        counts: [V] how often each token is to be predicted.
    """
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def map_tensors(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ascending target ids [Vd] -> d2t [Vd] int64 offsets and t2d [V] bool (the layout EAGLE-3 checkpoints use)."""
    d2t = token_ids - torch.arange(token_ids.numel(), device=token_ids.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    t2d[token_ids] = True
    return d2t, t2d


def move_rows(rows: Tensor, before: Tensor, after: Tensor, table: Tensor) -> Tensor:
    """The rows [Vd, D] of an LM head for other tokens. Those of tokens that stay are kept; the others are the target's,
    mapped as those of the tokens before are mapped to `rows`, by least squares.

    Args:
        rows: [Vd, D] of the tokens `before` [Vd]; `after` [Vd] are the other tokens.
        table: [V, D'], the rows of the target's LM head.
    """
    known, table = table[before].float(), table.to(rows.device)
    products = known.T @ known
    products.diagonal().add_(1e-3 * products.diagonal().mean())
    moved = (table[after].float() @ torch.linalg.solve(products, known.T @ rows.float())).to(rows.dtype)
    return keep_rows(rows, before, after, moved)


def keep_rows(rows: Tensor, before: Tensor, after: Tensor, others: Tensor) -> Tensor:
    """Rows [Vd, D] for the tokens `after`: those of `rows`, which belong to `before`, where a token is in both, and of
    `others` elsewhere."""
    place = before.new_full((int(max(before.max(), after.max())) + 1,), -1)
    place[before] = torch.arange(len(before), device=before.device)
    found = place[after]
    return torch.where(found[:, None] >= 0, rows[found], others)


def seldom_token(target: Target) -> int:
    """A token that texts have seldom: the padding token, or the last one where that has another use."""
    config = target.text_config
    pad, eos = config.pad_token_id, config.eos_token_id
    used = {config.bos_token_id, *(eos if isinstance(eos, list) else [eos])}
    return pad if pad is not None and pad not in used and 0 <= pad < target.vocab_size else target.vocab_size - 1


def mean_embedding(target: Target) -> Tensor:
    """[D] float32: the mean embedding of the first 1,024 tokens, from which mask embeddings start."""
    token_ids = torch.arange(min(target.vocab_size, 1024), device=target.device)
    embedded: Tensor = target.embed_tokens(token_ids)
    return embedded.float().mean(0)


def balance_embeddings(target: Target) -> float:
    """The power of two nearest to the root mean square of the target's last states over that of its embeddings; 1 where
    the target has no final norm. (A power of two, so that multiplying it into a weight rounds nothing.)"""
    if (gain := target.final_norm_gain()) is None:
        return 1.0
    # Some 4,096 of the tokens.
    token_ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 4096), device=target.device)
    embedded: Tensor = target.embed_tokens(token_ids)
    ratio = gain.float().square().mean().sqrt() / embedded.float().square().mean().sqrt().clamp(min=1e-6)
    return 2.0 ** round(math.log2(float(ratio.clamp(min=1e-6))))


def principal_embeddings(target: Target, rank: int) -> Tensor:
    """[V, min(rank, D)] float32: the target's token embeddings along their principal directions, each row scaled to a
    root mean square of 1."""
    table: Tensor = target.embed_tokens(torch.arange(target.vocab_size, device=target.device))
    table = table.float() - table.float().mean(0)
    if rank < table.shape[1]:
        table = table @ torch.linalg.eigh(table.T @ table).eigenvectors[:, -rank:]
    return table / table.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
