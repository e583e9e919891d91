"""Heads whose drafts are often accepted: trained ones, and ones that learn the texts of a test by heart in a minute."""

import torch

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.training.features.encoding import encode
from draftsmith.training.losses.draft_loss import draft_loss
from draftsmith.training.losses.teacher import compute_teacher
from draftsmith.training.run.optimizer import MuonWithAdamW
from tests.conftest import REPOSITORY
from tests.engines.chains import Texts


def load_trained(name: str, target: Target) -> DraftHeads:
    heads: DraftHeads = DraftHeads.from_pretrained(REPOSITORY / "examples" / "heads" / name, dtype=torch.float32)
    return heads.bind(target)


def learn_by_heart(heads: DraftHeads, texts: Texts, *, num_steps: int) -> DraftHeads:
    """Trains on the first half of the texts, so that drafts of the others are seldom accepted."""
    half = len(texts.prompts) // 2
    prompts, replies = texts.prompts[:half], texts.replies[:half]
    length = max(map(len, map(list.__add__, prompts, replies)))
    ids, mask, loss_mask = torch.zeros(3, len(prompts), length, dtype=torch.long)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        end = len(prompt) + len(reply)
        ids[row, :end] = torch.tensor([*prompt, *reply])
        mask[row, :end] = 1
        loss_mask[row, len(prompt) : end] = 1
    encoded = encode(heads.target, ids, mask, feature_layers=heads.feature_layers)
    teacher = compute_teacher(
        heads.target, encoded.last_hidden, ids, loss_mask, heads.draft_token_ids, loss_type=heads.default_loss
    )
    optimizer = MuonWithAdamW(heads.named_parameters(), muon_learning_rate=0.04, learning_rate=2e-3)
    heads.train()
    for _ in range(num_steps):
        steps = heads.unroll_where(encoded.features, ids, loss_mask)
        kwargs = {"loss_type": heads.default_loss, "step_decay": heads.default_step_decay}
        loss = draft_loss(steps, teacher, loss_mask, **kwargs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()
