"""What a step reads on the host, and what it counts. `runners` has each function's discipline, for every drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.generation import Decoder
from draftsmith.inference.trees.static import chain
from tests.tiny_targets import random_prompt, tiny_target


def add_nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that is not transformers' own."""
    return scores


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [7, 8]], "min_new_tokens": 9},
        {"logits_processor": [add_nothing]},
        {"max_time": 1000.0},
    ],
    ids=["none", "transformers' own", "foreign", "time"],
)
def test_what_is_counted_is_what_is_read(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From one step's report to the next, on tensors: one read a step, and no upload. With a processor that is not
    transformers' own, one read for each level, too."""
    num_reads, num_uploads, marks = 0, 0, []

    def counting(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def count(tensor: torch.Tensor) -> Any:
            nonlocal num_reads
            num_reads += 1
            return read(tensor)

        return count

    decoder = Decoder(tiny_target("llama"), NgramDrafter(), tree=chain(3))
    for name in ("tolist", "__int__", "item"):
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))

    def tensor(*args: Any, make: Any = torch.tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal num_uploads
        num_uploads += 1
        made: torch.Tensor = make(*args, **kwargs)
        return made

    monkeypatch.setattr(torch, "tensor", tensor)
    stats = decoder.generate(
        random_prompt(4).repeat(1, 4),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        on_step=lambda *_: marks.append((num_reads, num_uploads)),
        **options,
    ).stats
    assert len(marks) == stats.num_verify_steps + 1 > 2
    assert stats.num_host_syncs == marks[-1][0] - marks[0][0]
    assert stats.num_host_syncs == stats.num_verify_steps * (5 if "logits_processor" in options else 1)
    assert marks[-1][1] == marks[1][1], "the first step may write down what the policy needs"
    assert (stats + stats).num_host_syncs == 2 * stats.num_host_syncs
