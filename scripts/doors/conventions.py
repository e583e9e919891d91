"""Whether imported heads were read under the right conventions: their acceptance length under each known one.

A wrong convention (layer ids counted from the next layer, a norm at another place) breaks no shape, and the text stays
the target's. Only fewer drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from heads import DraftHeads
from heads.formats.format import Format, Imported
from inference import GenerationStats, Target, generate
from scripts.model_loading import encode_messages

QUESTIONS = (
    "What are the benefits of exercise?",
    "Write a short story about a dog.",
    "How does a rainbow form?",
    "Give me three ideas for dinner.",
)
NEW_TOKENS = 64
# A convention that accepts this many times more is named; texts this short differ by less from chance.
MARGIN = 1.1
# Heads that accept less than this are hardly those of the target, under any convention.
USUAL_LENGTH = 1.3


@dataclass(frozen=True)
class Convention:
    """One way to read a checkpoint.

    Attributes:
        name: what it is, in words.
        changes: the settings that differ from those that were read.
        acceptance_length: tokens per forward pass of the target, its own token included.
    """

    name: str
    changes: dict[str, Any]
    acceptance_length: float


def measure_conventions(
    known: Format, imported: Imported, target: Target, path: str, prompts: Sequence[Tensor]
) -> list[Convention]:
    """The checkpoint as it was read, and then under each other convention that its format knows.

    Args:
        prompts: [1, L] token ids each.
    """
    ways = {"as it was read": {}, **known.variants(imported.settings, target)}
    found = []
    for name, changes in ways.items():
        variant = replace(imported, settings={**imported.settings, **changes})
        heads = DraftHeads.from_imported(variant, target, path)
        found.append(Convention(name, changes, measure_acceptance(target, heads, prompts)))
    return found


def measure_acceptance(target: Target, heads: DraftHeads, prompts: Sequence[Tensor]) -> float:
    """Tokens per verify step of greedy texts, over all prompts together."""
    outputs = (
        generate(target, heads, prompt.to(target.device), max_new_tokens=NEW_TOKENS, do_sample=False)
        for prompt in prompts
    )
    return sum((output.stats for output in outputs), GenerationStats()).acceptance_length


def judge(conventions: Sequence[Convention]) -> str | None:
    """What the user should do about it; None = nothing.

    >>> judge([Convention("as it was read", {}, 2.0), Convention("b is true", {"b": True}, 3.0)])
    'b is true: accepts 3.00 tokens a pass, and 2.00 as it was read. Import again with --settings b=true'
    >>> judge([Convention("as it was read", {}, 2.0), Convention("b is true", {"b": True}, 2.1)])
    """
    as_read, *others = conventions
    best = max(others, key=lambda one: one.acceptance_length, default=as_read)
    if best.acceptance_length > MARGIN * as_read.acceptance_length:
        changes = " ".join(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in best.changes.items())
        return (
            f"{best.name}: accepts {best.acceptance_length:.2f} tokens a pass, and {as_read.acceptance_length:.2f} as "
            f"it was read. Import again with --settings {changes}"
        )
    if as_read.acceptance_length < USUAL_LENGTH:
        return (
            f"only {as_read.acceptance_length:.2f} tokens a pass under every known convention: is this the target that "
            "the heads were trained for, and its dtype?"
        )
    return None


def question_prompts(tokenizer: Any) -> list[Tensor]:
    """The questions as the target reads them, [1, L] token ids each."""
    if tokenizer.chat_template:
        return [encode_messages(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer(question, return_tensors="pt")["input_ids"] for question in QUESTIONS]
