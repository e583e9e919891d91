"""Training teaches what decoding uses: heads that know a text by heart draft it.

Legend: T text length, K depths.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads import HEAD_TYPES, DraftHeads, create_heads
from draftsmith.inference import GenerationStats, Target, chain, generate
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from tests.heads.tiny_heads import encode_for
from tests.tiny_targets import random_prompt

PROMPT_LENGTH, NUM_NEW = 8, 40
DEPTH_OF_ANY = 3  # of kinds that draft to any depth: the depth of their unroll


@pytest.fixture(scope="module")
def text(target: Target) -> Tensor:
    """A prompt and its reply [1, T], longer than what is decoded: the last steps draft beyond that."""
    return generate(target, None, random_prompt(PROMPT_LENGTH), max_new_tokens=NUM_NEW + 8, do_sample=False).sequences


def learn(
    heads: DraftHeads, text: Tensor, *, num_steps: int, loss_type: str, learning_rate: float = 1e-2
) -> list[float]:
    """Trains on the reply, as the trainer does; returns the losses."""
    loss_mask = torch.ones_like(text)
    loss_mask[:, :PROMPT_LENGTH] = 0
    if heads.wants_token_counts:
        heads.fit_vocabulary(text[0].bincount(minlength=heads.target.vocab_size))
    encoded = encode_for(heads, text)
    teacher = compute_teacher(
        heads.target, encoded.last_hidden, text, loss_mask, heads.draft_token_ids, loss_type=loss_type
    )
    optimizer, losses = torch.optim.AdamW(heads.parameters(), lr=learning_rate), []
    for _ in range(num_steps):
        steps = heads.train().unroll_where(encoded.features, text, loss_mask)
        decay = heads.default_step_decay
        loss = draft_loss(steps, teacher, loss_mask, loss_type=loss_type, step_decay=decay).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    heads.eval()
    return losses


def draft_text(heads: DraftHeads, text: Tensor, depth: int) -> GenerationStats:
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False}
    output = generate(heads.target, heads, text[:, :PROMPT_LENGTH], tree=chain(depth), **options)
    assert torch.equal(output.sequences, text[:, : PROMPT_LENGTH + NUM_NEW])
    return output.stats


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(HEAD_TYPES))
def test_every_kind_learns_a_text_by_heart(kind: str, target: Target, text: Tensor) -> None:
    torch.manual_seed(0)
    heads = create_heads(kind, target)
    learn(heads, text, num_steps=200, loss_type=heads.default_loss)
    depth = heads.max_depth or DEPTH_OF_ANY
    assert draft_text(heads, text, depth).acceptance_length > 0.9 * (depth + 1)
