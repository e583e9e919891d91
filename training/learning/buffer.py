"""A bounded buffer of decoded texts with their states: the newest, a sample of the older, and some to measure with.

Legend: N tokens of a batch, F feature width, D hidden size.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.learning import SeenText

HELD_BACK = 8  # one text in so many is never learned from
HELD_SHARE = 0.125  # of the memory, for those


@dataclass(frozen=True)
class TextBatch:
    """Texts, one after the other in a row.

    Attributes:
        input_ids: [1, N]. features: [1, N, F]. last_hidden: [1, N, D]; all on the target's device. States of a text's
            last token are zero where they are not known; nothing reads them.
        loss_mask, document_ids: [1, N] on the host.
    """

    input_ids: Tensor
    features: Tensor
    last_hidden: Tensor
    loss_mask: Tensor
    document_ids: Tensor


class TextBuffer:
    """Keeps texts in the memory that it is given.

    One text in `HELD_BACK` is held back, to measure heads with. Of the others, the newest have half of the memory, and
    the rest is a sample of those that came before: about as many of every time.

    Args:
        num_bytes: of states, all together; at least one text of each part is kept.

    Attributes:
        num_texts, num_tokens: taken so far, replies' tokens only.
        num_read: tokens taken so far, the ends of prompts included.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_texts = self.num_tokens = self.num_read = 0
        self._random = random.Random(0)
        self._recent, self._held, self._old = deque[SeenText](), deque[SeenText](), list[SeenText]()
        self._unseen: deque[SeenText] = deque()  # those of the recent ones that no batch had
        self._num_old = 0  # texts that have left the recent ones

    def add(self, text: SeenText) -> None:
        """Takes a text, unless nothing can be learned from it."""
        num_new = len(text.token_ids) - text.num_prompt
        if num_new < 2 or len(text.token_ids) < 3:
            return
        self.num_texts += 1
        self.num_tokens += num_new
        self.num_read += len(text.token_ids)
        if self.num_texts % HELD_BACK == 0:
            self._held.append(text)
            drop_oldest(self._held, HELD_SHARE * self.num_bytes)
            return
        self._recent.append(text)
        self._unseen.append(text)
        room = (1 - HELD_SHARE) / 2 * self.num_bytes
        for old in drop_oldest(self._recent, room):
            self._retire(old, room)

    def _retire(self, text: SeenText, room: float) -> None:
        """Reservoir sampling."""
        if self._unseen and self._unseen[0] is text:
            self._unseen.popleft()
        self._num_old += 1
        is_full = count_bytes([*self._old, text]) > room
        if is_full and self._random.randrange(self._num_old) >= len(self._old):
            return
        self._old.append(text)
        while len(self._old) > 1 and count_bytes(self._old) > room:
            del self._old[self._random.randrange(len(self._old) - 1)]

    @property
    def num_trainable(self) -> int:
        """Texts to learn from."""
        return len(self._recent) + len(self._old)

    def sample(self, num_tokens: int) -> list[SeenText]:
        """About so many tokens to learn from: half of them new, if there are so many, the rest of any age."""
        chosen: list[SeenText] = []
        size = 0
        while self._unseen and size < num_tokens / 2:
            chosen.append(self._unseen.popleft())
            size += len(chosen[-1].token_ids)
        known = [*self._recent, *self._old]
        while known and size < num_tokens:
            chosen.append(known[self._random.randrange(len(known))])
            size += len(chosen[-1].token_ids)
        return chosen

    def held_back(self, num_tokens: int) -> list[SeenText]:
        """The newest texts that nobody learned from, about so many tokens."""
        chosen: list[SeenText] = []
        size = 0
        for text in reversed(self._held):
            if chosen and size + len(text.token_ids) > num_tokens:
                break
            chosen.append(text)
            size += len(text.token_ids)
        return chosen


def count_bytes(texts: Iterable[SeenText]) -> int:
    """Of their states."""
    tensors = {id(tensor): tensor for text in texts for tensor in (text.features, text.last_hidden)}
    return sum(tensor.nbytes for tensor in tensors.values())


def drop_oldest(texts: deque[SeenText], room: float) -> list[SeenText]:
    """Takes out the oldest texts until the others fit, and returns them."""
    dropped = []
    while len(texts) > 1 and count_bytes(texts) > room:
        dropped.append(texts.popleft())
    return dropped


def join_texts(texts: Sequence[SeenText], device: torch.device) -> TextBatch:
    """The texts as one batch."""
    ids, masks, documents = list[int](), list[int](), list[int]()
    features, last = list[Tensor](), list[Tensor]()
    for number, text in enumerate(texts):
        size = len(text.token_ids)
        ids += text.token_ids
        first = max(1, text.num_prompt)
        masks += [0] * first + [1] * (size - first)
        documents += [number] * size
        for states, parts in ((text.features, features), (text.last_hidden, last)):
            parts.append(states[:size])
            parts.append(states.new_zeros(size - len(parts[-1]), states.shape[1]))
    return TextBatch(
        torch.tensor([ids], device=device),
        torch.cat(features)[None].to(device),
        torch.cat(last)[None].to(device),
        torch.tensor([masks]),
        torch.tensor([documents]),
    )
