"""Whether imported heads were read under the right conventions: how they draft under each known one.

A wrong convention (layer ids counted from the next layer, a norm at another place) breaks no shape, and the text stays
the target's. Only fewer drafts are accepted. Layer ids that are off by one cost so little that acceptance lengths of a
few texts do not show it. So conventions are compared token by token: by the cross-entropy of the first drafting steps
against the target's own distribution. On the embedded target ids that are off by one then differ by 8 standard errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.format import Format, Imported
from draftsmith.heads.importing import build_heads
from draftsmith.inference import GenerationStats, Target, generate
from draftsmith.scripts.shared.model_loading import encode_messages
from draftsmith.training.features.encoding import encode

QUESTIONS = (
    "What are the benefits of exercise?",
    "Write a short story about a dog.",
    "How does a rainbow form?",
    "Give me three ideas for dinner.",
)
NEW_TOKENS = 64
# Steps of drafting that are compared: the first step does not show what is fed back (norm_output).
NUM_STEPS = 3
# A convention is better if its cross-entropy is lower by this many standard errors of the difference.
NUM_ERRORS = 4.0
# Heads that accept less than this are hardly those of the target, under any convention.
USUAL_LENGTH = 1.3


@dataclass(frozen=True)
class Convention:
    """One way to read a checkpoint.

    Attributes:
        name: what it is, in words.
        changes: the settings that differ from those that were read.
        cross_entropy: [tokens] of the same tokens in every convention, in nats.
    """

    name: str
    changes: dict[str, Any]
    cross_entropy: Tensor

    def is_better_than(self, other: Convention) -> bool:
        """Whether the cross-entropy is lower by more than chance."""
        gain = other.cross_entropy - self.cross_entropy
        return float(gain.mean()) > NUM_ERRORS * float(gain.std()) / len(gain) ** 0.5


@dataclass(frozen=True)
class Finding:
    """What the comparison of conventions says.

    Attributes:
        conventions: the first is the checkpoint as it was read.
        best: the convention that fits.
        lengths: acceptance length (tokens per pass of the target) as it was read, and with the best convention.
    """

    conventions: list[Convention]
    best: Convention
    lengths: tuple[float, float]

    @property
    def advice(self) -> str | None:
        """What the user should do about it; None = nothing."""
        as_read, fitting = self.lengths
        if self.best is not self.conventions[0]:
            changes = (f"{key}={json.dumps(x, separators=(',', ':'))}" for key, x in self.best.changes.items())
            as_were, then = (float(one.cross_entropy.mean()) for one in (self.conventions[0], self.best))
            return (
                f"the heads fit better where {self.best.name}: their cross-entropy is {then:.3f} nats then, and "
                f"{as_were:.3f} as they were read (acceptance lengths of these few texts: {fitting:.2f} and "
                f"{as_read:.2f}). Import again with --settings {' '.join(changes)}"
            )
        if as_read < USUAL_LENGTH:
            return (
                f"only {as_read:.2f} tokens a pass under every known convention: is this the target that the heads "
                "were trained for?"
            )
        return None


def compare_conventions(
    known: Format, imported: Imported, target: Target, path: str, prompts: Sequence[Tensor]
) -> Finding:
    """Reads a checkpoint under each convention that its format knows, and drafts texts of the target with each.

    Args:
        path: where the checkpoint came from.
        prompts: [1, L] token ids each.
    """
    heads: DraftHeads = build_heads(imported, target, path)
    texts, as_read = decode(target, heads, prompts)
    lengths = [prompt.shape[1] for prompt in prompts]
    conventions = [Convention("they are as they were read", {}, measure_cross_entropy(target, heads, texts, lengths))]
    for name, changes in known.variants(imported.settings, target).items():
        variant = _with(imported, changes, target, path)
        conventions.append(Convention(name, changes, measure_cross_entropy(target, variant, texts, lengths)))
    best = min(conventions, key=lambda one: float(one.cross_entropy.mean()))
    if not best.is_better_than(conventions[0]):
        best = conventions[0]
    fitting = as_read if not best.changes else decode(target, _with(imported, best.changes, target, path), prompts)[1]
    return Finding(conventions, best, (as_read, fitting))


def _with(imported: Imported, changes: dict[str, Any], target: Target, path: str) -> DraftHeads:
    settings = {**imported.settings, **changes}
    return build_heads(replace(imported, settings=settings), target, path)


def decode(target: Target, heads: DraftHeads, prompts: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Greedy texts, [1, T] each with their prompts, and the acceptance length over all of them."""
    outputs = [
        generate(target, heads, prompt.to(target.device), max_new_tokens=NEW_TOKENS, do_sample=False)
        for prompt in prompts
    ]
    stats = sum((output.stats for output in outputs), GenerationStats())
    return [output.sequences for output in outputs], stats.acceptance_length


@torch.no_grad()
def measure_cross_entropy(target: Target, heads: DraftHeads, texts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """[tokens] cross-entropies of the drafts against the target, over the draft vocabulary.

    Args:
        lengths: of the prompts, whose tokens are left out.
    """
    found = []
    for ids, length in zip(texts, lengths, strict=True):
        encoded = encode(target, ids, torch.ones_like(ids), feature_layers=heads.feature_layers)
        logits = target.compute_logits(encoded.last_hidden)[0].float()
        if (vocabulary := heads.draft_token_ids) is not None:
            logits = logits[:, vocabulary]
        for step in heads.unroll(encoded.features, ids)[:NUM_STEPS]:
            slots = torch.arange(ids.shape[1], device=ids.device) if step.slots is None else step.slots[0]
            drafted = slots + step.shift
            counts = (slots >= 0) & (drafted >= length) & (drafted < ids.shape[1])
            teacher = logits[drafted[counts] - 1].softmax(-1)
            found.append(-(teacher * step.head(step.hidden[0, counts]).float().log_softmax(-1)).sum(-1))
    return torch.cat(found).cpu()


def question_prompts(tokenizer: Any) -> list[Tensor]:
    """The questions as the target reads them, [1, L] token ids each."""
    if tokenizer.chat_template:
        return [encode_messages(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer(question, return_tensors="pt")["input_ids"] for question in QUESTIONS]
