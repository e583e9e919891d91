"""Batch-invariant mode of a target, and the checks that it keeps its promise, on this machine and with this model.

Whether a row of a product depends on the number of rows is a matter of the library that computes it, and of the layer.

Legend: B batch, N tree nodes, V target vocabulary.
"""

import copy
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.kernels.attention import has_bfloat16_alone
from draftsmith.inference.kernels.split_rows import find_rows, fix_rows
from draftsmith.inference.targets.masks import Nodes, TreeMasks, plant
from draftsmith.inference.targets.model_config import chooses_experts, find_attention, has_attention_interface
from draftsmith.inference.targets.refusals import draw_ids

logger = logging.getLogger(__name__)

GRAPH_ROWS = 4  # from so many rows on, inductor's own products are alike; with bfloat16 alone they are oneDNN's
SUM_ROWS = 16  # on CUDA, torch adds up a row of numbers (in a norm) in one order from so many rows on (Reduce.cuh)
_NUM_NODES = 24
_MANY_ROWS = 24
_PATH = [0, 3, 9, 16, 22]  # far apart, and not in the first slots


def find_mode(target: Any) -> Any:
    """The target in batch-invariant mode, or the reason why there is none."""
    if target.is_batch_invariant:
        return target
    causal_lm = target.backbone.causal_lm
    if (reason := find_obstacle(causal_lm)) is not None:
        return reason
    mode = copy.copy(target)
    if (twin := fix_rows(target.model, target.dtype, target.device)) is not None:
        mode = type(target)(twin, capabilities=target.capabilities.of_a_twin())
    if not mode.masks.packs_all:  # the Triton kernels, whose numbers do not depend on the rest of the pass
        mode.masks = TreeMasks(target.masks.windows, torch.float64, target.masks.without)
    mode.is_batch_invariant = True
    if (least := find_min_pass_tokens(mode)) is None:
        return "on this CPU a row of a product with its matrices depends on the number of rows in any case"
    mode.min_pass_tokens = least
    if not mode.capabilities.is_known_invariant:
        if (reason := find_difference(mode)) is not None:
            return reason
        mode.capabilities.is_known_invariant.append(True)
    return mode


def prefer_mode(target: Any, *, warns: bool) -> Any:
    """See `Target.prefer_batch_invariant`."""
    is_low = target.dtype in (torch.bfloat16, torch.float16)
    if target.is_batch_invariant or target.device.type != "cpu" or not is_low:
        return target
    obstacles, told = target.capabilities.obstacles, target.capabilities.told
    if not obstacles:
        found = find_obstacle(target.backbone.causal_lm) or find_price(target) or find_mode(target)
        if not isinstance(found, str):
            return found
        obstacles.append(found)
    if warns and not told:
        told.append(True)
        logger.warning(
            "drafts may change a text at near-ties of two tokens in %s: %s. Load the target in float32 to exclude it, "
            "or give batch_invariant=False to accept it",
            str(target.dtype).removeprefix("torch."),
            obstacles[0],
        )
    return target


def find_obstacle(causal_lm: Any) -> str | None:
    """Why a model's attention cannot be replaced, or its products cannot be padded."""
    name = type(causal_lm).__name__
    if causal_lm.config.is_encoder_decoder or not has_attention_interface(causal_lm):
        return f"the mode replaces attention functions, and {name} has its own"
    if (implementation := find_attention(causal_lm)) != "sdpa":
        return (
            f"the mode replaces the attention implementation 'sdpa', and {name} has {implementation!r} "
            "(attn_implementation='sdpa' loads the other one, if the model has it)"
        )
    if chooses_experts(causal_lm):
        return (
            f"an expert of {name} multiplies as many rows as the router gives it, and products of a few rows round in "
            "another way"
        )
    return None


def find_price(target: Any) -> str | None:
    """Why the mode would cost more than some percent of a step, or refuse what the model can read."""
    causal_lm = target.backbone.causal_lm
    if causal_lm.config.get_text_config() is not causal_lm.config:
        return f"{type(causal_lm).__name__} also reads images or sounds, which the mode refuses"
    rows = find_rows(target.model, target.dtype)
    if rows is None or rows.most is None:  # None: `find_difference` says so
        return None
    return "products on this CPU must be split for it, so prompts would take longer"


def check_compiling(target: Any) -> None:
    """Refuses (ValueError) compiled steps whose numbers depend on the number of their rows, however few there are."""
    if target.device.type != "cpu":
        raise ValueError(
            f"batch_invariant=True cannot be kept with compile=True on {target.device}: inductor makes other kernels "
            "for other numbers of rows. Leave compile out; graphs=True captures the mode's own kernels"
        )
    rows = find_rows(target.model, target.dtype)
    if target.dtype != torch.float32 and (rows is None or rows.most is not None):
        raise ValueError(
            f"batch_invariant=True cannot be kept with compile=True in {target.dtype} on this CPU, whose compiled "
            "products (AMX) depend on the number of rows: leave compile out, or load the target in float32"
        )


def check_depth(target: Any, depth: int) -> None:
    """Refuses (ValueError) trees that are deeper than attention in Triton computes as plain text."""
    if not (target.is_batch_invariant and target.masks.packs_all):
        return
    from draftsmith.inference.kernels.triton_kernel import TILE

    if depth > TILE:
        raise ValueError(
            f"the tree is {depth} levels deep, and with batch_invariant=True attention in Triton takes at most {TILE}: "
            "choose a smaller tree"
        )


def find_min_pass_tokens(target: Any) -> int | None:
    """The smallest number of tokens of a pass with which no row of a product depends on their number; None = there is
    none."""
    if target.device.type == "cuda":  # where these are no slower than one row
        return SUM_ROWS
    if target.device.type != "cpu":
        return 1
    rows = find_rows(target.model, target.dtype)
    if rows is None:
        return None
    is_onednn = target.dtype == torch.bfloat16 and has_bfloat16_alone()
    return rows.least if is_onednn else max(rows.least, GRAPH_ROWS)


@torch.no_grad()
def find_difference(target: Any) -> str | None:
    """Compares the scores of tokens that are read one by one, after a prompt in parts, with those of the same tokens as
    a path of a tree in a batch, bit by bit, and says how they differ."""
    prompt = draw_ids(target.model, 1, target.device)
    tokens = prompt.repeat(1, 2)[:, : len(_PATH)]
    crowd = prompt.repeat(1, _NUM_NODES // prompt.shape[1])
    crowd[:, _PATH] = tokens
    batch = 2 if target.device.type == "cpu" else _MANY_ROWS  # cuBLAS has more kernels than CPUs' libraries
    parents = [-1] + [0] * (_NUM_NODES - 1)
    for parent, node in itertools.pairwise(_PATH):
        parents[node] = parent
    beside = _score(target, [prompt.expand(batch, -1)], plant(crowd.expand(batch, -1), parents))[_PATH]
    parts = prompt.split([1, prompt.shape[1] - 1], dim=1)
    alone = _score(target, parts, *(plant(token, [-1]) for token in tokens.split(1, dim=1)))
    if torch.equal(alone, beside):
        return None
    return (
        f"with {type(target.model).__name__} in {target.dtype} on {target.device}, a token's scores depend on the "
        f"other tokens of the pass (by up to {float((alone - beside).abs().max()):.2g}): its layers, or the kernels of "
        "this machine, compute a row in another way when there are more rows"
    )


def _score(target: Any, prompt: Sequence[Tensor], *passes: Nodes) -> Tensor:
    """The scores [P, V] of the last row's nodes in all passes; the first node of a pass is committed.

    Args:
        prompt: its parts, [B, L] long.
    """
    counts = prompt[0].new_ones(len(prompt[0]))
    cache = target.new_cache(len(counts), 64)
    length = 0
    for part in prompt:
        target.prefill(cache, part, part.shape[1] * counts, span=Span(length, length))
        length += part.shape[1]
    scores = []
    for nodes in passes:
        cache.open_slots(max(nodes.token_ids.shape[1], target.min_pass_tokens), Span(length, length))
        scores.append(target.verify(cache, nodes).logits[-1])
        cache.commit(torch.zeros_like(counts)[:, None], counts)
        length += 1
    return torch.cat(scores)
