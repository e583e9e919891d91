"""ChainDrafting: grows a chain with any `Drafter`, token by token, ahead of the committed text.

Legend: S slots, F feature width, V target vocabulary.
"""

import itertools

import torch
from torch import Tensor

from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.drafters.base import Drafter, DraftLogits
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.state import DecodeState
from draftsmith.inference.step import Step


class ChainDrafting:
    """One text's drafter. It has read `base` tokens of the text for certain, and expanded `path` after them.

    Args:
        step: the drafter, and a chain policy as deep as its reach.
        state: holds the prompt; only a drafter with `shares_target_cache` reads its cache.
        num_tokens: tokens of the prompt.
    """

    def __init__(self, step: Step, sampler: Sampler, state: DecodeState, num_tokens: int) -> None:
        assert step.drafter is not None
        assert step.policy is not None
        self.drafter: Drafter = step.drafter
        self.reach = step.policy.num_scratch  # nodes that can be expanded
        self.vocab_size = step.target.vocab_size
        self.sampler, self.cache, self.state = sampler, state.cache, state.draft
        self.device = step.target.device
        self.base, self.version = num_tokens, -1
        self.path: list[int] = []
        self.held = num_tokens  # positions of the text whose keys and values are in rank 0's cache
        self.is_stuck = False  # the drafter has no candidate
        self.scores: DraftLogits

    def draft(self, chain: DraftChain) -> int | None:
        """The token after the chain's last one; None when the text must grow first."""
        is_spent = self.is_stuck or len(self.path) >= self.reach
        if self.version != chain.version or (is_spent and len(chain.text) > self.base):
            self._extend(chain)
        while (position := self.base + len(self.path)) < chain.end:
            if len(self.path) == self.reach:
                return None
            self._expand(chain.token(position))
        token = None if self.is_stuck else self._pick(chain.end)
        self.is_stuck = token is None
        return token

    def _extend(self, chain: DraftChain) -> None:
        """Gives the drafter all committed tokens. Drafts that wait are expanded again, after the new states.

        A drafter in the target's cache (Kangaroo) finds there what it wrote when it expanded the tokens. The target's
        own tokens it has not expanded, so it reads these one by one.
        """
        new = chain.text[self.base :]
        agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new, self.path, strict=False)))
        self.held = self.base + agreed if self.version >= 0 else self.held
        while self.base < len(chain.text):
            base = len(chain.text)
            if self.drafter.shares_target_cache:
                base = min(base, self.held + 1)
                self.cache.lengths.fill_(base - 1)
            next_ids = torch.tensor([chain.text[self.base : base]], device=self.device)
            features = self._take_features(chain, self.base - 1, base - 1)
            counts = torch.tensor([base - self.base], device=self.device)
            self.scores = self.drafter.extend(self.state, features, next_ids, counts, max_slots=base - 1)
            self.base = self.held = base
        self.path, self.version, self.is_stuck = [], chain.version, False

    def _take_features(self, chain: DraftChain, first: int, last: int) -> Tensor | None:
        """Features [1, S, F] of the positions first .. last - 1."""
        if not self.drafter.feature_layers:
            return None
        return torch.stack([chain.features.pop(position).to(self.device) for position in range(first, last)])[None]

    def _expand(self, token: int) -> None:
        self.path.append(token)
        token_ids = torch.tensor([[token]], device=self.device)
        self.scores = self.drafter.expand(self.state, token_ids, torch.zeros_like(token_ids), len(self.path))
        self.is_stuck = False

    def _pick(self, position: int) -> int | None:
        """The best token at a position, as the target would pick its own."""
        sampler = self.sampler
        noise = sampler.draw_noise(torch.tensor([position - 1], device=self.device), 1, self.vocab_size)
        sampling = DraftSampling(warp=sampler.warp_draft if sampler.do_sample else None, noise=noise)
        scores, token_ids = sampling.take_best(self.scores, 1)
        score, token = scores.flatten().tolist(), token_ids.flatten().tolist()
        return int(token[0]) if score[0] > float("-inf") else None
