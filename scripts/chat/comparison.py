"""A reply beside the plain decoding of its prompt, with the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder, GenerationStats
from draftsmith.inference.streaming.token_texts import TokenTexts
from draftsmith.scripts.chat.printer import speed_of

NEAR_TIE = 0.05  # between two log-probabilities that rounding in low precision may swap


@dataclass
class Reply:
    """A decoded reply.

    Attributes:
        input_ids: [1, L] the prompt; token_ids: of the reply.
        options: of the call that decoded it, with its seed.
        is_whole: it was not stopped.
    """

    input_ids: Tensor
    token_ids: list[int]
    options: dict[str, Any]
    stats: GenerationStats
    is_whole: bool


@dataclass
class Comparison:
    """text: what to say about the two replies. stats: of the plain decoding. plain: its text, where it differs."""

    text: str
    stats: GenerationStats
    plain: str | None = None


def compare_with_plain(reply: Reply, plain: Decoder, tokenizer: Any) -> Comparison:
    """Decodes the reply's prompt once more, without drafts."""
    length = len(reply.token_ids)
    options = reply.options if reply.is_whole else reply.options | {"max_new_tokens": length}
    output = _decode(plain, reply.input_ids, options)
    other: list[int] = output.sequences[0, reply.input_ids.shape[1] :].tolist()
    speeds = [speed_of(stats) for stats in (reply.stats, output.stats)]
    beside = f"plain decoding {speeds[1]:.1f} tokens/s, with drafts {speeds[0]:.1f} ({speeds[0] / speeds[1]:.2f} times)"
    if other == reply.token_ids:
        begins = "identical" if reply.is_whole else "identical so far"
        return Comparison(f"{begins}: the same {length} tokens; {beside}", output.stats)
    pairs = enumerate(zip(other, reply.token_ids, strict=False))
    place = next((place for place, (theirs, ours) in pairs if theirs != ours), min(len(other), length))
    both = [ids[place] if place < len(ids) else None for ids in (reply.token_ids, other)]
    texts = TokenTexts(tokenizer)
    ours, theirs = ("the end" if token is None else repr(texts.read(token)[0]) for token in both)
    text = f"token {place + 1} is the first that differs: {ours} with drafts, {theirs} plainly"
    if None not in both:
        text += _describe_tie(reply, plain, place, both)
    return Comparison(f"{text}; {beside}", output.stats, tokenizer.decode(other, skip_special_tokens=True))


def _describe_tie(reply: Reply, plain: Decoder, place: int, both: list[Any]) -> str:
    """The target's own log-probabilities of the two tokens."""
    options = reply.options | {"max_new_tokens": place + 1, "return_dict_in_generate": True, "output_logits": True}
    logits = _decode(plain, reply.input_ids, options).logits
    first, second = torch.log_softmax(logits[place][0].float(), -1)[both].tolist()
    is_near = not reply.options["do_sample"] and abs(first - second) < NEAR_TIE
    tie = ", a near-tie, which rounding decides" if is_near else ""
    return f" (log-probabilities {first:.4f} and {second:.4f}{tie})"


def _decode(plain: Decoder, input_ids: Tensor, options: dict[str, Any]) -> Any:
    return plain.generate(input_ids, torch.ones_like(input_ids), **options)
