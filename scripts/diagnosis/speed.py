"""What drafting costs and gains on this machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, Target
from draftsmith.scripts.measuring.measure import WARM_UP_TOKENS


@dataclass(frozen=True)
class Speed:
    """Beside plain decoding, on the same prompts in turns.

    Attributes:
        auto: times as fast with the default tree; own_tree: with the user's `tree`, or None.
        costs: (nodes, steps of plain decoding that a step takes) of each tree that the default chooses from.
    """

    auto: float
    costs: list[tuple[int, float]]
    tree: str | None = None
    own_tree: float | None = None


def measure_speed(
    target: Target, heads: DraftHeads, prompts: Sequence[Tensor], *, max_new_tokens: int, tree: str | None = None
) -> Speed:
    """Decodes the prompts, [1, L] int64 each, greedily: plain, with the default tree, and with another one."""
    decoders = [Decoder(target, None), Decoder(target, heads), *([Decoder(target, heads, tree=tree)] if tree else [])]
    seconds = [0.0] * len(decoders)
    for decoder in decoders:
        decoder.generate(prompts[0].to(target.device), do_sample=False, max_new_tokens=WARM_UP_TOKENS)
    for prompt in prompts:
        for place, decoder in enumerate(decoders):
            start = time.perf_counter()
            output = decoder.generate(prompt.to(target.device), do_sample=False, max_new_tokens=max_new_tokens)
            seconds[place] += (time.perf_counter() - start) / output.stats.num_new_tokens
    planner, costs = decoders[1].planner, []
    if planner is not None:
        ratios = planner.costs(1, max(prompt.shape[1] for prompt in prompts) + max_new_tokens, do_sample=False)
        costs = [
            (policy.num_nodes, ratio) for policy, ratio in zip(planner.policies[1:], ratios[1:], strict=True) if policy
        ]
    plain, auto, *own = seconds
    return Speed(plain / auto, costs, tree, plain / own[0] if own else None)
