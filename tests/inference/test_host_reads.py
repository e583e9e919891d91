"""Inside a step nothing may ask the device for a value: on a GPU each such question waits for all queued work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, Drafter, NgramDrafter, SmallModelDrafter, Target, chain
from draftsmith.inference.step import Step
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.inference.runners.recorder import RefuseHostReads
from tests.tiny_targets import pad_prompts, random_prompt, target_of, tiny_target

DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{
        name: lambda target, kind=kind, overrides=overrides: tiny_heads(kind, target, **overrides)
        for name, (kind, overrides) in zip(VARIANT_IDS, VARIANTS, strict=True)
        if name.endswith("-0")
    },
    "ngrams": lambda _: NgramDrafter(),
    "small model": lambda _: SmallModelDrafter(tiny_target("gemma3")),
}
PROCESSORS = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[5], [7, 8]], "min_new_tokens": 4}


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_step_reads_nothing_on_the_host(make: Callable[[Target], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first one, which may write tables down. On the CPU `tolist` and `numpy` read memory directly, past the
    dispatcher."""
    target, call, begun = target_of("llama", num_hidden_layers=2), Step.__call__, list[Step]()

    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("a tensor's values are read on the host")

    def run(step: Step, *args: Any, **options: Any) -> Any:
        begun.append(step)
        if begun.count(step) == 1:
            return call(step, *args, **options)
        with RefuseHostReads(), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", refuse)
            patch.setattr(torch.Tensor, "numpy", refuse)
            return call(step, *args, **options)

    monkeypatch.setattr(Step, "__call__", run)
    prompts = pad_prompts([random_prompt(9 - row, seed=row) for row in range(3)])
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "max_new_tokens": 5, **PROCESSORS}
    for tree in ("dynamic:3,2,6", [[0], [1], [0, 0], [0, 1], [1, 0]]):
        Decoder(target, make(target), tree=tree).generate(**prompts, **sampled)
    assert len(begun) > 4


def add_nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that is not transformers' own."""
    return scores


@pytest.mark.parametrize(
    "options",
    [{}, PROCESSORS, {"logits_processor": [add_nothing]}, {"max_time": 1000.0}],
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
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
    stream = decoder.stream(
        random_prompt(4).repeat(1, 4), max_new_tokens=12, do_sample=False, eos_token_id=None, **options
    )
    for _ in stream:
        marks.append((num_reads, num_uploads))
    stats = stream.output.stats
    assert len(marks) == stats.num_verify_steps + 1 > 2
    assert stats.num_host_syncs == marks[-1][0] - marks[0][0]
    assert stats.num_host_syncs == stats.num_verify_steps * (5 if "logits_processor" in options else 1)
    assert marks[-1][1] == marks[1][1], "the first step may write down what the policy needs"
    assert (stats + stats).num_host_syncs == 2 * stats.num_host_syncs
