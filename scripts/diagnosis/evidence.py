"""What a diagnosis looks at: texts that the target writes, what the heads draft at each of their tokens, and what the
decoder accepts.

The decoder keeps a cache and drafts node by node. Training runs over whole texts at once. The two must draft the same
tokens; where they do not, a convention (a shift, a position, a mask) is off in one of them.

Legend: T tokens of a text, L of its prompt, K depths. A root r is a token after which drafts begin; the draft of depth
d from it is meant for the token r + d.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, GenerationOutput, GenerationStats, Target
from draftsmith.scripts.measuring.contenders import OurDecoding
from draftsmith.scripts.measuring.measure import Batch, Prompt, Settings
from draftsmith.training.features.encoding import encode

DEPTH = 4  # of the chains that are decoded
STEPS_ALONE = 80  # of texts that are decoded one by one
ROWS = 16  # decoded together


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
def gather_evidence(
    target: Target,
    heads: DraftHeads,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    choose_number: Callable[[float], int],
) -> Evidence:
    """Decodes the prompts, [1, L] int64 each, greedily and at T = 1.

    The first ones are decoded one by one, until their steps are enough to compare the decoder with the training
    forward; the others together.

    Args:
        choose_number: how many of the prompts to take, given the seconds that a text of all new tokens takes.
    """
    depth = min(DEPTH, heads.max_depth or DEPTH)
    decode = OurDecoding(target, heads, tree=f"chain:{depth}")
    options = {"max_new_tokens": max_new_tokens, "repetition_penalty": 1.0}
    named = [Prompt(str(place), place, ids.to(target.device)) for place, ids in enumerate(prompts)]
    texts, stats, num_steps = [], GenerationStats(), 0
    while named[len(texts) :] and num_steps < STEPS_ALONE:
        start = time.perf_counter()
        ids = named[len(texts)].input_ids
        output, accepted = _decode_alone(decode.decoder, ids, do_sample=False, **options)
        texts.append(read_text(target, heads, output.sequences, ids.shape[1], accepted, depth))
        stats += output.stats
        num_steps += len(accepted)
        if len(texts) == 1:
            share = max(0.25, output.stats.num_new_tokens / max_new_tokens)  # its prompt takes time, too
            named = named[: choose_number((time.perf_counter() - start) / share)]
    for prompt, ids, more in _decode_together(decode, named[len(texts) :], Settings(**options)):
        texts.append(read_text(target, heads, ids, prompt.input_ids.shape[1], {}, depth))
        stats += more
    sampled, losses = GenerationStats(), []
    for prompt, ids, more in _decode_together(decode, named, Settings(**options, temperature=1.0)):
        losses.append(score(target, ids)[0][prompt.input_ids.shape[1] :].mean())
        sampled += more
    return Evidence(depth, texts, stats, sampled, torch.stack(losses), find_coverage(heads, texts))


def _decode_alone(decoder: Decoder, ids: Tensor, **options: Any) -> tuple[GenerationOutput, dict[int, int]]:
    """The output of a prompt [1, L], and how many drafts were accepted after each root."""
    accepted: dict[int, int] = {}
    end = ids.shape[1]
    stream = decoder.stream(ids, **options)
    for tokens in stream:
        accepted[end - 1] = tokens.num_drafted
        end += len(tokens)
    accepted.pop(ids.shape[1] - 1, None)  # the token after the prompt is not drafted
    return stream.output, accepted


def _decode_together(
    decode: OurDecoding, prompts: Sequence[Prompt], settings: Settings
) -> Iterator[tuple[Prompt, Tensor, GenerationStats]]:
    """Each prompt with its whole text [1, T], and the counts of its batch, once."""
    for first in range(0, len(prompts), ROWS):
        batch = Batch.of(*prompts[first : first + ROWS])
        run = decode(batch, settings)
        stats = run.stats or GenerationStats()
        for prompt, text in zip(batch.prompts, run.texts, strict=True):
            new = torch.tensor([text], dtype=torch.long, device=prompt.input_ids.device)
            yield prompt, torch.cat([prompt.input_ids, new], dim=1), stats
            stats = GenerationStats()


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
        columns, slots = step.find_predicted(torch.ones(1, length, dtype=torch.bool))
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
