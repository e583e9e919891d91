"""Under which settings heads fit their target, of those that change no tensor's shape.

A wrong convention (layer ids counted from the next layer, a norm at another place) breaks no shape, and the text stays
the target's. Only fewer drafts are accepted. Layer ids that are off by one cost so little that acceptance lengths of a
few texts do not show it. So conventions are compared token by token: by the cross-entropy of the first drafting steps
against the target's own distribution. On the embedded target ids that are off by one then differ by 8 standard errors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
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
# Settings that change no tensor's shape.
SWITCHES = (
    "norm_output",
    "norm_before_residual",
    "norm_before_fc",
    "reads_before_final_norm",
    "hidden_first",
    "zero_first_embedding",
)


@dataclass(frozen=True)
class Convention:
    """One way to read heads.

    Attributes:
        name: what it is, in words.
        changes: the settings that differ from the heads' own.
        cross_entropy: [tokens] of the same tokens in every convention, in nats.
    """

    name: str
    changes: dict[str, Any]
    cross_entropy: Tensor

    @property
    def mean(self) -> float:
        """Of the cross-entropy."""
        return float(self.cross_entropy.mean())

    def is_better_than(self, other: Convention) -> bool:
        """Whether the cross-entropy is lower by more than chance."""
        gain = other.cross_entropy - self.cross_entropy
        return float(gain.mean()) > NUM_ERRORS * float(gain.std()) / len(gain) ** 0.5


def compare_conventions(
    heads: DraftHeads, target: Target, texts: Sequence[Tensor], lengths: Sequence[int]
) -> list[Convention]:
    """The heads as they are, then every other reading of them, the best first.

    Args:
        texts: [1, T] each, of the target; lengths: of their prompts.
    """
    as_they_are = Convention("they are as they were read", {}, measure_cross_entropy(target, heads, texts, lengths))
    others = [
        Convention(name, changes, measure_cross_entropy(target, variant, texts, lengths))
        for name, changes in list_variants(heads, target)
        if (variant := with_settings(heads, target, changes)) is not None
    ]
    return [as_they_are, *sorted(others, key=lambda one: one.mean)]


def find_better(conventions: Sequence[Convention]) -> Convention | None:
    """The reading that fits better than the heads as they are, from `compare_conventions`."""
    as_they_are, *others = conventions
    return next((one for one in others if one.is_better_than(as_they_are)), None)


def compare_on_texts(heads: DraftHeads, target: Target, prompts: Sequence[Tensor]) -> tuple[list[Convention], float]:
    """`compare_conventions` on the target's greedy texts of prompts, [1, L] token ids each; the heads' acceptance
    length there, in tokens a pass."""
    outputs = [
        generate(target, heads, prompt.to(target.device), max_new_tokens=NEW_TOKENS, do_sample=False)
        for prompt in prompts
    ]
    texts, lengths = [output.sequences for output in outputs], [prompt.shape[1] for prompt in prompts]
    stats = sum((output.stats for output in outputs), GenerationStats())
    return compare_conventions(heads, target, texts, lengths), stats.acceptance_length


def advise(conventions: Sequence[Convention], length: float) -> str | None:
    """What the user of imported heads should do; None = nothing.

    Args:
        conventions, length: as from `compare_on_texts`.
    """
    if (better := find_better(conventions)) is not None:
        changes = (f"{key}={json.dumps(x, separators=(',', ':'))}" for key, x in better.changes.items())
        return (
            f"the heads fit better where {better.name}: their cross-entropy is {better.mean:.3f} nats then, and "
            f"{conventions[0].mean:.3f} as they were read. Import again with --settings {' '.join(changes)}"
        )
    if length < USUAL_LENGTH:
        return (
            f"only {length:.2f} tokens a pass under every known convention: is this the target that the heads were "
            "trained for?"
        )
    return None


def list_variants(heads: DraftHeads, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each other reading of the heads: in words, and the settings that differ."""
    config = heads.config
    for name in SWITCHES:
        if isinstance(value := getattr(config, name, None), bool):
            yield f"{name} is {str(not value).lower()}", {name: not value}
    layers = list(config.feature_layers)
    for step in (-1, 1) if not heads.runs_target_layers else ():
        moved = [layer + step for layer in layers]
        if layers and min(moved) >= 0 and max(moved) <= target.num_layers:
            yield f"feature layers are {moved}", {"feature_layers": moved}
    theirs, own = (getattr(one, "rope_parameters", None) for one in (target.text_config, config))
    if isinstance(theirs, dict) and isinstance(own, dict) and "rope_theta" in theirs and theirs != own:
        yield "positions rotate as in the target", {"rope_parameters": dict(theirs)}


def with_settings(heads: DraftHeads, target: Target, changes: dict[str, Any]) -> DraftHeads | None:
    """The heads under other settings; None where their weights do not fit these."""
    config = copy.deepcopy(heads.config)
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        variant = type(heads)(config)
        variant.load_state_dict(heads.state_dict(), strict=True)
    except (RuntimeError, ValueError):
        return None
    return variant.to(heads.dtype).eval().bind(target)


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
        is_reply = torch.arange(ids.shape[1])[None] >= length
        for step in heads.unroll(encoded.features, ids)[:NUM_STEPS]:
            columns, slots = step.find_predicted(is_reply)
            teacher = logits[slots + step.shift - 1].softmax(-1)
            found.append(-(teacher * step.head(step.hidden[0, columns]).float().log_softmax(-1)).sum(-1))
    return torch.cat(found).cpu()


def question_prompts(tokenizer: Any) -> list[Tensor]:
    """The questions as the target reads them, [1, L] token ids each."""
    if tokenizer.chat_template:
        return [encode_messages(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer(question, return_tensors="pt")["input_ids"] for question in QUESTIONS]
