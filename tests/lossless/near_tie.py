"""Losslessness is token identity; a difference counts as rounding only when it is shown to be a near-tie.

There are two kinds. In the logits: the two tokens have nearly equal scores, and nothing else scores higher. In an
expert router: a plain pass says one of the two tokens, and the same pass says the other one when a single choice of
experts whose two scores are nearly equal is made the other way. Anything else is a bug.

Routers are found by what they do: whatever a model's forward takes the top k of is a choice of that kind. So are the
choices of expert groups (DeepSeek-V3), whether the scores are logits (gpt-oss), softmax probabilities (Mixtral, Qwen)
or sigmoids with a bias.

Legend: L tokens of a text, V vocabulary, R rows of scores that the top k is taken of, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.noise import row_seeds

# Between one float32 pass over a text of 80 tokens and a pass for each token, the scores of small random routers of
# 6 layers differ by up to 4e-6 (probabilities) and 1.5e-5 (gpt-oss's logits), relative to their spread.
ROUTER_TOLERANCE = 2e-5
MAX_FLIPS = 64

# Logits [V] after a text [L] -> the scores [V] that the token is picked by.
Scores = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """One row of one `topk` of a forward pass: its number in the pass, the row, the last expert taken and the first one
    left, with their scores; margin: between the two, relative to the spread of the row's scores where that is more
    than 1 (they are logits then)."""

    call: int
    row: int
    taken: int
    left: int
    taken_score: float
    left_score: float
    margin: float


class RouterWatch(TorchDispatchMode):
    """Within this block, writes down the choices of `topk` with a margin below `tolerance`, and makes `flip` the other
    way."""

    def __init__(self, tolerance: float, flip: Choice | None = None) -> None:
        super().__init__()
        self.tolerance, self.flip = tolerance, flip
        self.choices: list[Choice] = []
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            scores, num_taken = args[:2]
            if num_taken < scores.shape[-1] and list(args[2:4]) in ([], [-1], [-1, True], [scores.dim() - 1, True]):
                self._watch(scores.reshape(-1, scores.shape[-1]), num_taken, *result)
            self.num_calls += 1
        return result

    def _watch(self, scores: Tensor, num_taken: int, values: Tensor, indices: Tensor) -> None:
        """scores [R, E]; values and indices [..., num_taken] are what the model goes on with."""
        best, experts = scores.topk(num_taken + 1, dim=-1)
        lowest = scores.masked_fill(~scores.isfinite(), torch.inf).amin(-1)  # of groups not chosen: minus infinity
        margins = (best[:, -2] - best[:, -1]) / (best[:, 0] - lowest).clamp(min=1.0)
        for row in (margins < self.tolerance).nonzero()[:, 0].tolist():
            taken, left = experts[row, -2:].tolist()
            pair = best[row, -2:].tolist()
            self.choices.append(Choice(self.num_calls, row, taken, left, *pair, margins[row].item()))
        if self.flip is not None and self.flip.call == self.num_calls:
            own = indices.view(-1, num_taken)[self.flip.row]
            place = own == self.flip.taken
            values.view(-1, num_taken)[self.flip.row][place] = scores[self.flip.row, self.flip.left]
            own[place] = self.flip.left


@torch.no_grad()
def score_plainly(model: Any, text: Tensor, scores: Scores | None, watch: RouterWatch | None = None) -> Tensor:
    """The scores [V] in float32 that the token after `text` [L] is picked by, from a plain pass without cache."""
    ids = text[None]
    if watch is None:
        logits = model(ids, use_cache=False).logits
    else:
        with watch:
            logits = model(ids, use_cache=False).logits
    last: Tensor = logits[0, -1].float()
    return last if scores is None else scores(last, text)


def explain_difference(
    model: Any,
    expected: Tensor,
    got: Tensor,
    *,
    scores: Scores | None = None,
    tolerance: float = 1e-4,
    router_tolerance: float = ROUTER_TOLERANCE,
) -> tuple[int, float, str] | None:
    """None when two token rows [L] are equal; else (position, gap, a sentence with the numbers) of the difference.

    The gap is how far the lower of the two tokens' scores is below the best one, on the common prefix, in a plain pass
    without cache. If that is no near-tie and a router's near-tie is shown to make the difference, it is that margin.

    Args:
        scores: what tokens are picked by; None = the logits, for greedy texts without processors.
        tolerance: smaller gaps are near-ties, and routers are then not examined.
        router_tolerance: the same for the margin between two experts.
    """
    if torch.equal(expected, got):
        return None
    length = min(len(expected), len(got))
    different = (expected[:length] != got[:length]).nonzero()
    position = int(different[0]) if len(different) else length
    if position >= length:
        return position, float("inf"), f"one text ends at {position}, the other goes on"
    prefix, pair = expected[:position], [int(expected[position]), int(got[position])]
    watch = RouterWatch(router_tolerance)
    plain = score_plainly(model, prefix, scores, watch)
    first, second = plain[pair].tolist()
    gap = plain.max().item() - min(first, second)
    sentence = f"position {position}: token {pair[0]} has score {first:.6f}, token {pair[1]} has {second:.6f}"
    if gap < tolerance:
        return position, gap, sentence
    if max(first, second) < plain.max().item() - tolerance:
        return position, gap, f"{sentence}, and token {int(plain.argmax())} has {plain.max().item():.6f}"
    other = pair[1] if first > second else pair[0]
    for choice in sorted(watch.choices, key=lambda choice: choice.margin)[:MAX_FLIPS]:
        flipped = score_plainly(model, prefix, scores, RouterWatch(router_tolerance, choice))
        if flipped.max() - flipped[other] < tolerance:
            sentence += (
                f"; but in choice {choice.call} of the pass, row {choice.row}, expert {choice.taken} scores "
                f"{choice.taken_score:.9f} and expert {choice.left} {choice.left_score:.9f}, and with the latter taken "
                f"the tokens have {flipped[pair[0]].item():.6f} and {flipped[pair[1]].item():.6f}"
            )
            return position, choice.margin, sentence
    return position, gap, f"{sentence}; {len(watch.choices)} choices of experts were near-ties, and explain nothing"


def assert_same_text(
    model: Any, expected: Tensor, got: Tensor, *, tolerance: float = 1e-4, scores: Scores | None = None
) -> list[str]:
    """Rows [B, L] are equal, or differ first at a near-tie (printed with its numbers, and returned)."""
    assert expected.shape[0] == got.shape[0]
    ties = []
    for row in range(expected.shape[0]):
        difference = explain_difference(model, expected[row], got[row], scores=scores, tolerance=tolerance)
        if difference is not None:
            _, gap, sentence = difference
            assert gap < tolerance, sentence
            ties.append(f"near-tie, {sentence}")
            print(ties[-1])
    return ties


def picking_scores(model: Any, seed: int | None = None, **options: Any) -> Scores:
    """The scores by which a row with these options picks its tokens: processed logits, plus its noise when it samples.

    Args:
        seed: the row's own, as in a list of seeds; only needed to sample.
        options: those of `generate`, such as do_sample, temperature and repetition_penalty.
    """
    found: list[Any] = []

    def keep_processors(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Tensor:
        found.append(logits_processor)
        return input_ids

    def scores(logits: Tensor, text: Tensor) -> Tensor:
        model.generate(text[None], custom_generate=keep_processors, **options)
        do_sample = bool(options.get("do_sample"))
        seeds = row_seeds([seed], 1, text.device) if do_sample and seed is not None else None
        sampler = Sampler(do_sample=do_sample, row_seeds=seeds)
        processed = found.pop()(text[None], logits[None].float())
        noise = sampler.draw_noise(torch.tensor([len(text) - 1]), 1, logits.shape[-1])
        return processed[0] if noise is None else processed[0] + noise[0, 0]

    return scores
