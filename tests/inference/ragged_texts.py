"""`TokenHistory` of different lengths, from lists."""

from collections.abc import Sequence

import torch

from draftsmith.inference.request.token_history import TokenHistory

ROOM = 16  # tokens that every text may grow by, unless another limit is given


def texts_of(rows: Sequence[Sequence[int]], num_new: Sequence[int] | None = None, junk: int = 0) -> TokenHistory:
    """Behind each text stands `junk`, which nothing may look at."""
    longest = max(map(len, rows))
    prompts = torch.tensor([[*row, *[junk] * (longest - len(row))] for row in rows])
    texts = TokenHistory.of_prompts(prompts, [ROOM] * len(rows) if num_new is None else num_new, longest + ROOM)
    texts.token_ids[:, longest:] = junk
    surplus = torch.tensor([longest - len(row) for row in rows])
    texts.lengths -= surplus
    texts.limits -= surplus
    return texts
