"""TargetServer: one copy of the target, its cache, and the answers to tasks.

Legend: N tokens of one pass, F feature width, V target vocabulary.
"""

import torch
from torch import Tensor, nn

from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.cache.kv_cache import KVCache, Span
from draftsmith.inference.distributed.messages import Answer, Prompt, Task
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.token_tree import TokenTree

MAX_MISSED = 64  # a server that missed more tokens reads them first, without scoring each


class TargetServer:
    """Answers tasks about one text at a time.

    Args:
        target: the same model in the same dtype as rank 0's.
    """

    def __init__(self, target: Target | nn.Module) -> None:
        self.target = Target.of(target).prefer_batch_invariant()
        self._cache: KVCache | None = None

    def begin(self, prompt: Prompt) -> None:
        """Reads a prompt, in the passes of plain decoding."""
        target, length = self.target, len(prompt.token_ids)
        capacity = length + prompt.max_new + target.min_pass_tokens
        if self._cache is None or self._cache.capacity < capacity:
            self._cache = None  # frees it first
            self._cache = target.new_cache(1, capacity)
        self.prompt, self.cache = prompt, self._cache
        self.sampler: Sampler = prompt.make_sampler(target, capacity)
        self.cache.reset(1)
        with target.without_autograd():
            self._read(self._as_row(prompt.token_ids), 0)

    def answer(self, task: Task) -> Answer:
        """The target's next token after every position that the task asks about."""
        missed = task.start - task.keep
        token_ids = self._as_row(task.token_ids)
        self._write_text(task, token_ids)
        with self.target.without_autograd():
            self.cache.lengths.fill_(task.keep)
            if missed > MAX_MISSED:
                self._read(token_ids[:, :missed], task.keep)
                token_ids, missed = token_ids[:, missed:], 0
            tokens, features = self._verify(token_ids, missed, task.start)
        return Answer(task.version, task.start, tokens, features)

    def _read(self, token_ids: Tensor, num_held: int) -> None:
        for part in token_ids.split(PREFILL_CHUNK, dim=1):
            counts = torch.tensor([part.shape[1]], device=part.device)
            self.target.prefill(self.cache, part, counts, span=Span(num_held, num_held))
            num_held += part.shape[1]

    def _verify(self, token_ids: Tensor, missed: int, start: int) -> tuple[list[int], Tensor | None]:
        """One pass over tokens [1, N]: the target's tokens after all but the first `missed`, and their features."""
        cache, num_tokens, device = self.cache, token_ids.shape[1], token_ids.device
        counts = torch.tensor([num_tokens], device=device)
        held = start - missed
        cache.open_slots(max(num_tokens, self.target.min_pass_tokens), Span(held, held))
        chain = TokenTree.from_prompts(token_ids, counts)
        output = self.target.verify(cache, chain, feature_layers=self.prompt.feature_layers)
        cache.advance(counts)
        asked = TokenTree.from_prompts(token_ids[:, missed:], counts - missed)
        scores = self.sampler.process_nodes(asked, output.logits[:, missed:])
        root_positions = torch.tensor([start], device=device)
        noise = self.sampler.draw_noise(root_positions, num_tokens - missed, scores.shape[-1])
        features = None if output.features is None else output.features[0, missed:].cpu()
        return pick_token(scores, noise)[0].tolist(), features

    def _write_text(self, task: Task, token_ids: Tensor) -> None:
        """Shows the processors the text up to the first position asked about."""
        texts = self.sampler.texts
        if texts is not None:
            first = self.prompt.num_hidden + task.keep
            texts.token_ids[0, first : first + token_ids.shape[1]] = token_ids[0]
            texts.lengths.fill_(self.prompt.num_hidden + task.start + 1)

    def _as_row(self, token_ids: list[int]) -> Tensor:
        return torch.tensor([token_ids], device=self.target.device)
