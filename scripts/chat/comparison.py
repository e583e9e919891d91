"""A reply beside the plain decoding of its prompt, with the same seed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Decoder, GenerationStats
from draftsmith.inference.streaming.token_texts import TokenTexts
from draftsmith.inference.text_difference import find_difference
from draftsmith.scripts.chat.printer import speed_of

CURES = ("--batch_invariant true", "--dtype float32")  # options of the chat


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
    """text: what to say about the two replies. stats: of the plain decoding. plain: its text, where it differs.
    is_fault: rounding does not explain the difference."""

    text: str
    stats: GenerationStats
    plain: str | None = None
    is_fault: bool = False


def compare_with_plain(reply: Reply, plain: Decoder, tokenizer: Any) -> Comparison:
    """Decodes the reply's prompt once more, without drafts."""
    length = len(reply.token_ids)
    options = reply.options if reply.is_whole else reply.options | {"max_new_tokens": length}
    output = plain.generate(reply.input_ids, torch.ones_like(reply.input_ids), **options)
    other: list[int] = output.sequences[0, reply.input_ids.shape[1] :].tolist()
    speeds = [speed_of(stats) for stats in (reply.stats, output.stats)]
    beside = f"plain decoding {speeds[1]:.1f} tokens/s, with drafts {speeds[0]:.1f} ({speeds[0] / speeds[1]:.2f} times)"
    found = find_difference(plain.target, reply.input_ids, other, reply.token_ids, **options)
    if found is None:
        begins = "identical" if reply.is_whole else "identical so far"
        return Comparison(f"{begins}: the same {length} tokens; {beside}", output.stats)
    texts = TokenTexts(tokenizer)
    theirs, ours = ("the end" if token is None else repr(texts.read(token)[0]) for token in found.tokens)
    text = (
        f"token {found.place + 1} is the first that differs: {theirs} plainly, {ours} with drafts. "
        f"{found.explain(CURES)} {beside[0].upper()}{beside[1:]}"
    )
    decoded = tokenizer.decode(other, skip_special_tokens=True)
    return Comparison(text, output.stats, decoded, is_fault=not found.is_near_tie)
