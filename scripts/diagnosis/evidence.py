"""What a diagnosis looks at: texts that the target writes, what the heads draft at each of their tokens, and what the
decoder accepts.

The decoder keeps a cache and drafts node by node. Training runs over whole texts at once. The two must draft the same
tokens; where they do not, a convention (a shift, a position, a mask) is off in one of them.

Legend: T tokens of a text, L of its prompt, K depths. A root r is a token after which drafts begin; the draft of depth
d from it is meant for the token r + d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, GenerationStats, Target
from draftsmith.training.features.encoding import encode

DEPTH = 4  # of the chains that are decoded


@dataclass(frozen=True)
class Text:
    """A text of the target's own.

    Attributes:
        ids: [T] int64, prompt included.
        prompt_length: L.
        hits: [K, T] bool, whether the draft of depth d = row + 1 from root r is the token r + d.
        is_drafted: [K, T] bool, whether there is such a draft and such a token.
        accepted: root -> how many drafts the decoder accepted after it.
        entropies: [T] float32, of the target's distribution at each token after the first.
    """

    ids: Tensor
    prompt_length: int
    hits: Tensor
    is_drafted: Tensor
    accepted: dict[int, int]
    entropies: Tensor

    def count_hits(self, root: int) -> int | None:
        """How many drafts in a row are right after a root; None where the text or the drafts end before that is
        known."""
        for depth, (hit, is_drafted) in enumerate(zip(self.hits[:, root], self.is_drafted[:, root], strict=True)):
            if not is_drafted:
                return None
            if not hit:
                return depth
        return len(self.hits)


@dataclass(frozen=True)
class Evidence:
    """Texts at T = 0, decoded in chains, and samples at T = 1 with the same prompts.

    Attributes:
        depth: of the chains; K may be lower, where one step of the unroll serves every depth.
        greedy, sampled: counts of the decoder.
        own_losses: [texts] float32, the mean cross-entropy of each sample under the target.
        coverage: share of the tokens that the heads can draft at all.
    """

    depth: int
    texts: list[Text]
    greedy: GenerationStats
    sampled: GenerationStats
    own_losses: Tensor
    coverage: float

    @cached_property
    def agreement(self) -> tuple[float, int]:
        """The share of the decoder's steps that accepted what the training forward says, and their number."""
        same = []
        for text in self.texts:
            for root, accepted in text.accepted.items():
                expected = text.count_hits(root)
                if expected is not None:
                    same.append(min(accepted, len(text.hits)) == expected)
        return sum(same) / max(len(same), 1), len(same)

    def accuracy(self, depth: int) -> tuple[float, int]:
        """How often a draft of this depth is right where those before it are, and in how many places that is known."""
        right = known = 0
        for text in self.texts:
            before = text.hits[: depth - 1].all(0) & text.is_drafted[depth - 1]
            known += int(before[text.prompt_length :].sum())
            right += int((text.hits[depth - 1] & before)[text.prompt_length :].sum())
        return right / max(known, 1), known

    @property
    def num_depths(self) -> int:
        return len(self.texts[0].hits)


@torch.no_grad()
def gather_evidence(target: Target, heads: DraftHeads, prompts: Sequence[Tensor], *, max_new_tokens: int) -> Evidence:
    """Decodes the prompts, [1, L] int64 each, greedily and at T = 1."""
    depth = min(DEPTH, heads.max_depth or DEPTH)
    decoder, texts, greedy, sampled, losses = Decoder(target, heads, tree=f"chain:{depth}"), [], [], [], []
    options = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0}
    for number, prompt in enumerate(prompts):
        accepted: dict[int, int] = {}
        end = prompt.shape[1]
        stream = decoder.stream(prompt.to(target.device), do_sample=False, **options)
        for tokens in stream:
            accepted[end - 1] = tokens.num_drafted
            end += len(tokens)
        output = stream.output
        accepted.pop(prompt.shape[1] - 1, None)  # the token after the prompt is not drafted
        texts.append(read_text(target, heads, output.sequences, prompt.shape[1], accepted, depth))
        greedy.append(output.stats)
        sample = decoder.generate(
            prompt.to(target.device), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, seed=number, **options
        )
        sampled.append(sample.stats)
        losses.append(score(target, sample.sequences)[0][prompt.shape[1] :].mean())
    return Evidence(
        depth,
        texts,
        sum(greedy, GenerationStats()),
        sum(sampled, GenerationStats()),
        torch.stack(losses),
        find_coverage(heads, texts),
    )


def read_text(
    target: Target, heads: DraftHeads, ids: Tensor, prompt_length: int, accepted: dict[int, int], depth: int
) -> Text:
    """What the training forward drafts in a text [1, T]."""
    length, vocabulary = ids.shape[1], heads.draft_token_ids
    encoded = encode(target, ids, torch.ones_like(ids), feature_layers=heads.feature_layers)
    steps = heads.unroll(encoded.features, ids)[:depth]
    hits = torch.zeros(len(steps), length, dtype=torch.bool)
    is_drafted = torch.zeros_like(hits)
    for row, step in enumerate(steps):
        slots = torch.arange(length) if step.slots is None else step.slots[0]
        columns = ((slots >= 0) & (slots + step.shift < length)).nonzero()[:, 0]
        slots = slots[columns]
        drafts = step.score(step.hidden[0, columns.to(ids.device)]).argmax(-1)
        drafts = drafts if vocabulary is None else vocabulary[drafts]
        hits[row, slots + 1] = (drafts == ids[0, (slots + step.shift).to(ids.device)]).cpu()
        is_drafted[row, slots + 1] = True
    _, entropies = score(target, ids, encoded.last_hidden)
    return Text(ids[0].cpu(), prompt_length, hits, is_drafted, accepted, entropies)


@torch.no_grad()
def score(target: Target, ids: Tensor, last_hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token of a text [1, T] under the target, and the entropy of the distribution it was taken
    from: [T] float32 each, in nats; 0 for the first token.

    Args:
        last_hidden: [1, T, D] of `encode`; None = not known yet.
    """
    if last_hidden is None:
        last_hidden = encode(target, ids, torch.ones_like(ids)).last_hidden
    log_probs = target.compute_logits(last_hidden[0, :-1]).float().log_softmax(-1)
    losses = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    pad = torch.zeros(1, device=losses.device)
    return torch.cat([pad, losses]).cpu(), torch.cat([pad, entropies]).cpu()


def find_coverage(heads: DraftHeads, texts: Sequence[Text]) -> float:
    """The share of the texts' new tokens that the heads can draft."""
    if heads.draft_token_ids is None:
        return 1.0
    tokens = torch.cat([text.ids[text.prompt_length :] for text in texts])
    return float(torch.isin(tokens, heads.draft_token_ids.cpu()).float().mean())
