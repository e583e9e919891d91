"""Where a way to decode leaves a text, over all of that text.

Behind a difference two texts have nothing to do with each other. So the text is held fixed: at each divergence the
decoding is called anew with the text's own tokens up to and including the place where they parted, and goes on from
there. Every position of the text is compared once, with the text's own prefix in front of it.

Legend: L tokens of a prefix, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decoded:
    """New tokens, and the row of logits [T, V] each of them is the maximum of; passes of the target it took."""

    token_ids: list[int]
    logits: Tensor
    num_passes: int


Decode = Callable[[tuple[int, ...], int], Decoded]  # a prefix, and how many tokens at most


@dataclass(frozen=True)
class Divergence:
    """One place where a decoding chose another token than the text.

    Attributes:
        prompt: its id.
        position: of the token in the text.
        is_first: no call was made anew before it, so that its prefix was decoded as the text's was.
        token, other: the text's token, and that of the decoding.
        plain: both tokens' logits in the pass that wrote the text.
        own: both tokens' logits in the decoding's own pass.
        step: the distance of neighbouring numbers of the dtype at the size of the larger logit of `plain`.
    """

    prompt: str
    position: int
    is_first: bool
    token: int
    other: int
    plain: tuple[float, float]
    own: tuple[float, float]
    step: float

    @property
    def plain_gap(self) -> float:
        """How far the text's token was ahead in the pass that wrote the text, in steps of the dtype; 0 = equal."""
        return (self.plain[0] - self.plain[1]) / self.step

    @property
    def own_gap(self) -> float:
        """How far the other token was ahead in the decoding's own pass, in steps of the dtype."""
        return (self.own[1] - self.own[0]) / self.step


@dataclass
class Tally:
    """What comparing a decoding with texts has shown so far.

    Attributes:
        num_tokens: positions compared.
        num_until_first: those up to a text's first divergence, it included, or to its end.
        num_emitted, num_passes: tokens and passes of the target of all calls, those behind a divergence included.
        num_equal_rows: agreeing positions at which all V logits are bitwise those of the text.
        changes: at agreeing positions, how much the lead of the text's token over the runner-up differs between the
            two passes, in steps of the dtype.
    """

    num_tokens: int = 0
    num_until_first: int = 0
    num_emitted: int = 0
    num_passes: int = 0
    num_equal_rows: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)

    @property
    def per_10000(self) -> float:
        return 1e4 * len(self.divergences) / self.num_tokens

    @property
    def first_per_10000(self) -> float:
        """The same from first divergences alone: none of their prefixes was read in one pass as a prompt."""
        return 1e4 * sum(one.is_first for one in self.divergences) / self.num_until_first


def find_step(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at the size of `value`.

    >>> find_step(15.9, torch.bfloat16), find_step(-16.0, torch.bfloat16)
    (0.0625, 0.125)
    """
    # Numbers from 2**e to 2**(e + 1) stand eps * 2**e apart; frexp's exponent is e + 1.
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)


def count_divergences(
    tally: Tally,
    decode: Decode,
    prompt: str,
    prompt_ids: Sequence[int],
    text: Decoded,
    dtype: torch.dtype,
    *,
    segment: int | None = None,
) -> None:
    """Adds one text to the tally.

    Args:
        segment: call the decoding anew after so many tokens, whether it diverged or not.

    Raises:
        RuntimeError: when the decoding stops where the text goes on.
    """
    length, start, is_first = len(text.token_ids), 0, True
    while start < length:
        budget = length - start if segment is None else min(segment, length - start)
        run = decode((*prompt_ids, *text.token_ids[:start]), budget)
        tally.num_emitted += len(run.token_ids)
        tally.num_passes += run.num_passes
        pairs = zip(text.token_ids[start : start + budget], run.token_ids, strict=False)
        same = next((place for place, (token, other) in enumerate(pairs) if token != other), None)
        if same is None and len(run.token_ids) != budget:
            raise RuntimeError(f"{prompt}: asked for {budget} tokens behind {start}, got {len(run.token_ids)}")
        agreed = budget if same is None else same
        _compare_rows(tally, text, run, start, agreed, dtype)
        if same is not None:
            place = start + same
            tokens = [text.token_ids[place], run.token_ids[same]]
            plain, own = text.logits[place, tokens].tolist(), run.logits[same, tokens].tolist()
            step = find_step(plain[0], dtype)
            tally.divergences.append(Divergence(prompt, place, is_first, *tokens, tuple(plain), tuple(own), step))
        compared = agreed + (same is not None)
        tally.num_tokens += compared
        tally.num_until_first += compared if is_first else 0
        is_first = is_first and same is None
        start += compared


def _compare_rows(tally: Tally, text: Decoded, run: Decoded, start: int, count: int, dtype: torch.dtype) -> None:
    """The logits of `count` positions at which both agree, from position `start` of the text."""
    plain, own = text.logits[start : start + count].float(), run.logits[:count].float()
    tally.num_equal_rows += int((plain == own).all(dim=1).sum())
    top, places = plain.topk(2, dim=1)
    rows = own.gather(1, places)
    change = ((top[:, 0] - top[:, 1]) - (rows[:, 0] - rows[:, 1])).abs().tolist()
    sizes = top[:, 0].tolist()
    tally.changes += [one / find_step(size, dtype) for one, size in zip(change, sizes, strict=True)]


def find_gaps(texts: Iterable[Decoded], dtype: torch.dtype) -> list[float]:
    """How far the best token is ahead of the runner-up at each position of the texts, in steps of the dtype."""
    gaps: list[float] = []
    for text in texts:
        top = text.logits.float().topk(2, dim=1).values.tolist()
        gaps += [(best - second) / find_step(best, dtype) for best, second in top]
    return gaps
