"""Where two texts of one prompt first differ, and whether rounding decided that.

A pass over several tokens rounds differently than a pass over one. Two tokens whose scores are closer than that are a
near-tie: either of them may win. Any other difference is a fault.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.noise import gumbel_noise, row_seeds
from draftsmith.inference.prefix_cache import count_shared
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.request import Request
from draftsmith.inference.targets.target import Target

# In bfloat16, two passes over the same text move the lead of one token over another by up to 3 steps where both choose
# the same token (chat-13m, 10,000 positions); a fault in the code moves the lead by up to 300.
NEAR_TIE_STEPS = 4.0
FLOAT32_STEPS = 64.0  # where the sums of many products, not the results, are rounded (up to 17 steps there)


@dataclass(frozen=True)
class Difference:
    """The first place where a text differs from the expected one. Pairs: of the expected token and the found one.

    Attributes:
        place: of the tokens among the new ones, from 0.
        tokens: None = that text has ended.
        log_probs: the target's own, before logits processors; None if a text has ended.
        gap: how far the expected token's score leads; scores are what tokens are picked by: processed logits, plus
            noise when sampling. None if a text has ended, or a processor forbids one of the tokens.
        resolution: the distance of neighbouring numbers of the target's dtype at the size of the scores; 0 in
            batch-invariant mode, where passes do not round differently.
        dtype: the target's, as "bfloat16".
    """

    place: int
    tokens: tuple[int | None, int | None]
    log_probs: tuple[float, float] | None = None
    gap: float | None = None
    resolution: float = 0.0
    dtype: str = ""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may have decided."""
        steps = FLOAT32_STEPS if self.dtype == "float32" else NEAR_TIE_STEPS
        return self.gap is not None and self.resolution > 0 and abs(self.gap) <= steps * self.resolution

    def explain(self, cures: Sequence[str] = ()) -> str:
        """Sentences for the reader of both texts, who sees the tokens already.

        Args:
            cures: options of the program with which near-ties are decided alike.
        """
        if self.log_probs is None:
            return "One text ends here, and the other goes on."
        numbers = "The target gives them the log-probabilities {:.4f} and {:.4f}".format(*self.log_probs)
        if self.gap is None:
            return f"{numbers}, and its logits processors (such as top_k and top_p) forbid one of them."
        numbers += f"; their scores are {abs(self.gap):.2g} apart"
        if not self.is_near_tie:
            return f"{numbers}. Rounding does not explain that."
        told = f"{numbers}, and {self.dtype} resolves {self.resolution:.2g}: a near-tie, which rounding decides."
        own = [cure for cure in cures if not cure.endswith(self.dtype)]
        return f"{told} With {' or '.join(own)} the texts are the same." if own else told


def find_difference(
    target: Target,
    prompt: Tensor,
    expected: Sequence[int],
    found: Sequence[int],
    *,
    seed: int | Sequence[int] | None = None,
    **options: Any,
) -> Difference | None:
    """Where `found` first differs from `expected`; None if the texts are the same. Another plain pass over what they
    have in common gives the target's scores of the two tokens there.

    Args:
        prompt: [1, L] int64, of a decoder-only target.
        expected, found: the new tokens. One that is a part of the other has ended.
        seed, options: of the call of `Decoder.generate` that gave them.
    """
    place = count_shared([[*expected], [*found]])
    if place == len(expected) == len(found):
        return None
    first, second = (text[place] if place < len(text) else None for text in (expected, found))
    if first is None or second is None:
        return Difference(place, (first, second))
    text = torch.cat([prompt, torch.tensor([list(expected[:place])], dtype=torch.long, device=prompt.device)], dim=1)
    request = make_request(target, text, torch.ones_like(text), **{**options, "max_new_tokens": 1})
    return judge(target, request, place, (first, second), seed=seed)


def judge(
    target: Target, request: Request, place: int, tokens: tuple[int, int], *, seed: int | Sequence[int] | None = None
) -> Difference:
    """The difference of two texts that have the tokens of a request in common, and go on with these `tokens`.

    Args:
        request: of one row and one new token.
        place: of the tokens in the texts.
    """
    request.keeps_logits = request.keeps_scores = True
    output = Decoder(target, batch_invariant=False).decode(request, seed=seed)
    assert output.logits is not None
    assert output.scores is not None
    ids = torch.tensor(tokens, device=target.device)
    logits, scores = output.logits[0][0], output.scores[0][0, ids].float()
    warpers = (one for one in request.processors if isinstance(one, TemperatureLogitsWarper))
    temperature = next((one.temperature for one in warpers), 1.0)
    if request.do_sample:
        position = torch.tensor([[request.input_ids.shape[1]]], device=target.device)
        scores += gumbel_noise(row_seeds(seed, 1, target.device), position, ids)[0, 0]
    gap = float(scores[0] - scores[1])
    step = find_step(float(logits[ids].abs().max()), target.dtype) / temperature
    first, second = logits.float().log_softmax(-1)[ids].tolist()
    return Difference(
        place,
        tokens,
        log_probs=(first, second),
        gap=gap if math.isfinite(gap) else None,
        resolution=0.0 if target.is_batch_invariant else step,
        dtype=str(target.dtype).removeprefix("torch."),
    )


def find_step(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of `dtype` at the size of `value`.

    >>> find_step(15.9, torch.bfloat16), find_step(-16.0, torch.bfloat16)
    (0.0625, 0.125)
    """
    # Numbers from 2**e to 2**(e + 1) are eps * 2**e apart; frexp's exponent is e + 1.
    return torch.finfo(dtype).eps * 2.0 ** (math.frexp(value)[1] - 1)
