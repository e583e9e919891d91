"""Inside a step nothing may ask the device for a value: on a GPU each such question waits for all queued work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftsmith.inference.acceptance.exact import accept_exact
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.sampling import DraftSampling
from draftsmith.inference.drafters.small_model import SmallModelDrafter
from draftsmith.inference.generation import Decoder
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.request.text_processors import read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.targets.target import Target
from draftsmith.inference.trees.options import resolve_policy
from draftsmith.inference.trees.static import chain
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.params import slow_but
from tests.tiny_targets import random_prompt, target_of, tiny_target

# Operators whose result (a number, or a shape that depends on values) the host must wait for.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")


class RefuseHostReads(TorchDispatchMode):
    """Raises where a tensor's values would reach the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hands over whole what is made of other operators, as `item` is
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.name().split("::")[1].split(".")[0]
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or is_mask:
            raise AssertionError(f"{func} reads a value on the host")
        return func(*args, **kwargs)


@pytest.fixture
def no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU `tolist` and `numpy` read memory directly, past the dispatcher."""

    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("a tensor's values are read on the host")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)


def make_sampler(prompts: torch.Tensor, vocab_size: int, *, do_sample: bool) -> Sampler:
    """With one of each kind of processors that read the text."""
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(9), TopPLogitsWarper(0.9)] if do_sample else []
    reading = [
        stock.RepetitionPenaltyLogitsProcessor(1.2),
        stock.NoRepeatNGramLogitsProcessor(3),
        stock.NoBadWordsLogitsProcessor([[3], [5, 7]]),
        stock.MinNewTokensLengthLogitsProcessor(prompts.shape[1], 3, 2),
    ]
    seeds = row_seeds(0, len(prompts), "cpu") if do_sample else None
    texts = TokenHistory.of_prompts(prompts, [20] * len(prompts), 64)
    processors = read_processors([*reading, *warpers], texts, vocab_size)
    return Sampler(processors, do_sample=do_sample, row_seeds=seeds, texts=texts)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{
        name: lambda target, kind=kind, overrides=overrides: tiny_heads(kind, target, **overrides)
        for name, (kind, overrides) in zip(VARIANT_IDS, VARIANTS, strict=True)
        if name.endswith("-0")
    },
    "ngrams": lambda _: NgramDrafter(),
    "small model": lambda _: SmallModelDrafter(tiny_target("gemma3")),
}


STATIC = ([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]], 3, "gemma3")
SAMPLED = ("dynamic", 1, "llama")
STEPS = {f"{name}, static, batch": (make, *STATIC) for name, make in DRAFTERS.items()} | {
    f"{name}, dynamic, sampled": (make, *SAMPLED) for name, make in DRAFTERS.items()
}
QUICK = {name for name in STEPS if "static" in name} | {f"{name}, dynamic, sampled" for name in ("eagle3-0", "ngrams")}


@pytest.mark.usefixtures("no_lists")
@pytest.mark.parametrize(("make", "tree", "batch_size", "family"), slow_but(QUICK, STEPS))
def test_a_step_reads_nothing_on_the_host(
    make: Callable[[Target], Drafter], tree: Any, family: str, batch_size: int
) -> None:
    """Drafting as the decode loop does it; a second step, so that `extend` takes in what was accepted."""
    target, do_sample = target_of(family), batch_size == 1
    drafter = make(target).for_target(target)
    policy = resolve_policy(tree, drafter.max_depth)
    next_ids, counts = random_prompt(9, batch_size=batch_size), torch.tensor([9, 4, 7][:batch_size])
    sampler = make_sampler(next_ids, target.vocab_size, do_sample=do_sample)
    assert sampler.texts is not None
    with torch.inference_mode():
        cache = target.new_cache(batch_size, 128)
        state = drafter.start(batch_size, 128, policy.num_scratch)
        if drafter.shares_target_cache:
            drafter.share_cache(state, cache)
        with RefuseHostReads():
            features = target.prefill(
                cache, next_ids, counts, feature_layers=drafter.feature_layers, chunk_size=4
            ).features
            drafter.read_first(state, next_ids[:, 0])
            for max_slots in (9, 9 + policy.max_depth + 1):
                root_ids = next_ids.gather(1, counts[:, None] - 1)[:, 0]
                noise = sampler.draw_noise(cache.lengths, policy.max_depth + 1, target.vocab_size)
                draft = drafter.extend(state, features, next_ids, counts, max_slots=max_slots)
                sampling = DraftSampling(warp=sampler.warp_draft if do_sample else None, noise=noise)
                drafted = policy.grow(drafter, state, root_ids, draft, sampling)
                cache.open_slots(drafted.num_nodes, Span(4, max_slots))
                output = target.verify(cache, drafted, feature_layers=drafter.feature_layers)
                accepted = accept_exact(sampler, drafted, output.logits, cache.lengths, noise=noise)
                cache.commit(accepted.path, accepted.counts)
                for depth in range(accepted.path.shape[1]):  # as a state does
                    sampler.texts.extended(accepted.next_tokens[:, depth])
                    sampler.texts.lengths += (depth < accepted.counts).long()
                next_ids, counts = accepted.next_tokens, accepted.counts
                if output.features is None:
                    continue
                features = output.features.gather(1, accepted.path[..., None].expand(-1, -1, output.features.shape[-1]))


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
