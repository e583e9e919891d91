"""Proves that a target's recurrent states are rolled back as they must be, before anything is decoded."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.targets.forward_names import ForwardNames, read_cache
from draftsmith.inference.targets.masks import plant
from draftsmith.inference.targets.refusals import WrongNumbersError, is_single, relative_error, try_tokens

_LENGTHS = (5, 3)  # of the two rows' prompts
_PARENTS = (-1, 0, 0, 1)
_KEPT = ((0, 1, 3), (0, 2, 2))  # the accepted nodes of each row, padded
_COUNTS = (3, 2)


@torch.no_grad()
def check_rollback(target: Any) -> None:
    """Reads two prompts of different lengths, a tree in which each row keeps another branch, and a chain. The chain's
    scores must be those of transformers' own passes of single tokens.

    Raises:
        ValueError: they differ.
    """
    try_tokens(target.model, (30, 59, 1), partial(_check_with, target))


def _check_with(target: Any, first: int) -> None:
    device = target.device
    ids = (first + torch.arange(24, device=device).view(2, 12)) % target.num_embeddings
    prompts, tree_ids, chain_ids = ids.split([max(_LENGTHS), len(_PARENTS), 3], dim=1)
    cache = target.new_cache(2, 16)
    target.prefill(cache, prompts, torch.tensor(_LENGTHS, device=device))
    cache.open_slots(max(len(_PARENTS), target.min_pass_tokens), Span(min(_LENGTHS), max(_LENGTHS)))
    target.verify(cache, plant(tree_ids, _PARENTS))
    cache.commit(torch.tensor(_KEPT, device=device), torch.tensor(_COUNTS, device=device))
    lengths = [length + count for length, count in zip(_LENGTHS, _COUNTS, strict=True)]
    cache.open_slots(max(chain_ids.shape[1], target.min_pass_tokens), Span(min(lengths), max(lengths)))
    found = target.verify(cache, plant(chain_ids, (-1, 0, 1))).logits
    for row, (length, kept, count) in enumerate(zip(_LENGTHS, _KEPT, _COUNTS, strict=True)):
        later = torch.cat([tree_ids[row, list(kept[:count])], chain_ids[row]])
        wanted = _read_in_steps(target, prompts[row, :length], later)[-chain_ids.shape[1] :]
        error = relative_error(found[row], wanted)
        if not error <= (1e-3 if is_single(wanted, target.backbone.causal_lm) else 0.1):
            raise WrongNumbersError(
                f"the recurrent states of {type(target.model).__name__} cannot be rolled back after a rejected draft: "
                f"after one, scores differ by {error:.2g} of their size from those of transformers' own passes"
            )


def _read_in_steps(target: Any, prompt: Tensor, later: Tensor) -> Tensor:
    """Logits [T, V] after each of the later tokens [T], one pass each, as transformers' generate computes them."""
    model = target.backbone.causal_lm
    names = ForwardNames(model)
    cache: Any = None
    logits = []
    start = 0
    for tokens in (prompt, *later.split(1)):
        positions = torch.arange(start, start + len(tokens), device=tokens.device)[None]
        with target.backbone.attention():
            output = model(**names.name(tokens[None], None, positions, cache), use_cache=True, return_dict=True)
        cache = read_cache(output)
        start += len(tokens)
        logits.append(output.logits[0, -1].to(target.device))
    return torch.stack(logits[1:])
