"""What every drafter promises the decode loop: every kind of heads, and the drafters without training.

`tests/heads/test_contract.py` compares what heads draft with a full unroll; the files beside this one compare the other
drafters with slow references.

Legend: B batch, S slots of one call, W frontier nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Drafter, DraftLogits, NgramDrafter, SmallModelDrafter, StagedDrafter, Target
from draftsmith.inference.cache.kv_cache import Span
from draftsmith.training.features.encoding import encode
from tests.heads.formats.test_native_mtp import CASES, load
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.memory_tracker import find_tensors
from tests.params import slow_but
from tests.tiny_targets import target_of


def make_native(case: str, path: Path) -> tuple[Target, Drafter]:
    model, _, heads = load(CASES[case], path)
    return Target(model), heads


def make_heads(kind: str, overrides: dict[str, Any]) -> tuple[Target, Drafter]:
    # Two masks in one pass, for the kind that runs the target's layers.
    target = target_of("gemma3" if kind == "kangaroo" else "llama")
    return target, tiny_heads(kind, target, **overrides)


def make_other(make: Callable[[Target], Drafter]) -> tuple[Target, Drafter]:
    target = target_of("llama")
    return target, make(target)


Maker = Callable[[Path], tuple[Target, Drafter]]
DRAFTERS: dict[str, Maker] = {
    **{
        name: lambda _, kind=kind, overrides=overrides: make_heads(kind, overrides)
        for name, (kind, overrides) in zip(VARIANT_IDS, VARIANTS, strict=True)
    },
    "latent-attention": lambda path: make_native("deepseek", path),
    "two-native-modules": lambda path: make_native("glm, two modules", path),
    "ngrams": lambda _: make_other(lambda _: NgramDrafter(max_ngram=2)),
    "small-model": lambda _: make_other(lambda _: SmallModelDrafter(target_of("gemma3", initializer_range=0.2))),
    "staged": lambda _: make_other(
        lambda _: StagedDrafter(
            SmallModelDrafter(target_of("qwen3", initializer_range=0.2)), NgramDrafter(max_ngram=2), num_guesses=2
        )
    ),
}
# By default one configuration of each kind of heads: `test_contract.py` drafts with all of them.
QUICK = {name for name in DRAFTERS if name not in VARIANT_IDS or name.endswith("-0")}
every_drafter = pytest.mark.parametrize("make", slow_but(QUICK, DRAFTERS))


class Batch:
    """Rows of known texts that a drafter reads as in a decode loop, with a cache of the target.

    Args:
        texts: [B, length] tokens; few different ones, so that n-grams repeat.
    """

    def __init__(self, target: Target, drafter: Drafter, texts: Tensor, *, max_length: int, num_scratch: int) -> None:
        self.target, self.drafter, self.texts = target, drafter, texts
        mask = torch.ones_like(texts)
        self.features = encode(target, texts, mask, feature_layers=drafter.feature_layers).features
        self.ends = [0] * len(texts)
        self.state = drafter.start(len(texts), max_length, num_scratch)
        self.cache = target.new_cache(len(texts), max_length + texts.shape[1])  # room for padding
        if drafter.shares_target_cache:
            drafter.share_cache(self.state, self.cache)

    def read_first(self) -> Self:
        if self.drafter.reads_first_token:
            self.drafter.read_first(self.state, self.texts[:, 0])
        return self

    def extend(self, ends: Sequence[int]) -> DraftLogits:
        """Every row takes in the slots up to `ends`; what pads shorter hand-overs is garbage."""
        counts = [end - begin for begin, end in zip(self.ends, ends, strict=True)]
        width = max(counts) + 1
        tokens = torch.full((len(counts), width + 1), 3)
        features = torch.full((len(counts), width, self.features.shape[-1]), 70.0)
        for row, (begin, end) in enumerate(zip(self.ends, ends, strict=True)):
            tokens[row, : end - begin + 1] = self.texts[row, begin : end + 1]
            features[row, : end - begin] = self.features[row, begin:end]
        if self.drafter.shares_target_cache and any(counts):
            begins = [begin for begin, count in zip(self.ends, counts, strict=True) if count]
            span = Span(min(begins), max(self.ends))
            self.target.prefill(self.cache, tokens[:, :-1], torch.tensor(counts), span=span)
        self.ends = list(ends)
        has_features = len(self.drafter.feature_layers) > 0
        return self.drafter.extend(
            self.state, features if has_features else None, tokens[:, 1:], torch.tensor(counts), max_slots=max(ends)
        )

    def draft(self, ends: Sequence[int], seed: int) -> list[DraftLogits]:
        """Extends, and expands two levels."""
        drafts = [self.extend(ends)]
        for depth, (tokens, parents) in enumerate(draw_levels(self.drafter, seed), start=1):
            rows = len(self.texts)
            drafts.append(self.drafter.expand(self.state, tokens[:rows], parents[:rows], depth))
        return drafts

    def copy(
        self, rows: list[int], lengths: list[int], texts: Tensor, *, max_length: int, num_scratch: int
    ) -> tuple[Batch, Batch]:
        """A batch of copied rows whose texts go on as `texts`, and one of the same texts that has yet to begin."""
        sizes = {"max_length": max_length, "num_scratch": num_scratch}
        copied, fresh = (Batch(self.target, self.drafter, texts, **sizes) for _ in range(2))
        index, counts = torch.tensor(rows), torch.tensor(lengths)
        assert self.drafter.can_copy_rows
        self.drafter.copy_rows(copied.state, self.state, index, counts, max_slots=max(lengths))
        if self.drafter.shares_target_cache:
            copied.cache.copy_rows(self.cache, index, counts, max_length=max(lengths))
        copied.ends = list(lengths)
        index.zero_()  # the drafter keeps no reference to its arguments
        counts.zero_()
        return copied, fresh.read_first()

    def keep_rows(self, rows: list[int]) -> None:
        """Row i becomes the present row rows[i]."""
        self.drafter.keep_rows(self.state, rows)
        if self.drafter.shares_target_cache:
            self.cache.keep_rows(rows)
            self.drafter.share_cache(self.state, self.cache)
        self.texts, self.features = self.texts[rows], self.features[rows]
        self.ends = [self.ends[row] for row in rows]

    def restart(self) -> None:
        """Nothing of the texts has been read."""
        self.drafter.restart(self.state, len(self.texts))
        self.cache.reset(len(self.texts))
        if self.drafter.shares_target_cache:
            self.drafter.share_cache(self.state, self.cache)
        self.ends = [0] * len(self.texts)
        self.read_first()

    def add_rows(self, other: Batch) -> None:
        """The rows of another batch come after the present ones."""
        self.drafter.add_rows(self.state, other.state, max_slots=max(other.ends))
        if self.drafter.shares_target_cache:
            self.cache.add_rows(other.cache, max_length=max(other.ends))
            self.drafter.share_cache(self.state, self.cache)
        self.texts = torch.cat([self.texts, other.texts])
        self.features = torch.cat([self.features, other.features])
        self.ends = [*self.ends, *other.ends]


def draw_levels(drafter: Drafter, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and parents of two levels, for more rows than any batch has: all batches draw the same."""
    generator = torch.Generator().manual_seed(seed)
    widths = [1, 1, 1] if drafter.drafts_chains_only else [1, 2, 3]
    levels = []
    for depth in range(1, min(drafter.max_depth or 3, 3)):
        shape = (8, widths[depth])
        tokens = torch.randint(2, 9, shape, generator=generator)
        levels.append((tokens, torch.randint(0, widths[depth - 1], shape, generator=generator)))
    return levels


def assert_same_drafts(found: list[DraftLogits], expected: list[DraftLogits], rows: list[int]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits[rows], other.logits[rows], rtol=1e-5, atol=1e-5)
        if one.token_ids is not None and other.token_ids is not None and one.token_ids.dim() == 3:
            assert torch.equal(one.token_ids[rows], other.token_ids[rows])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw_texts(batch_size: int, length: int, seed: int) -> Tensor:
    return torch.randint(2, 9, (batch_size, length), generator=torch.Generator().manual_seed(seed))


@every_drafter
def test_copied_rows_are_rows_read_from_the_start(make: Maker, tmp_path: Path) -> None:
    """Rows taken twice, left out, cut short, cut to nothing, in another order, into a larger state; then into a smaller
    one. The source goes on as one that was never copied, until a row is full and another still gets many slots."""
    target, drafter = make(tmp_path)
    texts = draw_texts(3, 30, seed=0)
    sizes = {"max_length": 23, "num_scratch": 6}
    source = Batch(target, drafter, texts, **sizes).read_first()
    # A prompt in parts, of which not every row has one, then one slot of every row.
    for ends in ([6, 6, 6], [12, 8, 12], [12, 8, 19], [13, 9, 20]):
        drafts = source.draft(ends, seed=1)
    at_once = Batch(target, drafter, texts, **sizes).read_first()
    assert_same_drafts(at_once.draft([13, 9, 20], seed=1), drafts, [0, 1, 2])

    rows, lengths = [2, 0, 2, 1, 0], [20, 5, 7, 0, 13]
    continued = draw_texts(5, 48, seed=2)
    for row, (origin, length) in enumerate(zip(rows, lengths, strict=True)):
        continued[row, : length + 1] = texts[origin, : length + 1]
    copied, fresh = source.copy(rows, lengths, continued, max_length=47, num_scratch=9)
    smaller, small_fresh = copied.copy([4], [11], continued[4:], max_length=20, num_scratch=5)

    ends = [21, 5, 19, 4, 17]
    found = copied.draft(ends, seed=3)
    assert_same_drafts(found, fresh.draft(ends, seed=3), [0, 2, 3, 4])
    ends = [26, 9, 20, 5, 18]  # the row that waited reads again
    assert_same_drafts(copied.draft(ends, seed=4), fresh.draft(ends, seed=4), [0, 1, 2, 3, 4])
    assert_same_drafts(smaller.draft([13], seed=5), small_fresh.draft([13], seed=5), [0])

    source.draft([14, 10, 22], seed=6)
    ends = [15, 20, 23]
    untouched = Batch(target, drafter, texts, **sizes | {"max_length": 29}).read_first()
    assert_same_drafts(source.draft(ends, seed=7), untouched.draft(ends, seed=7), [0, 1, 2])


@every_drafter
def test_kept_rows_stay_in_their_memory_and_go_on(make: Maker, tmp_path: Path) -> None:
    """Two of four rows leave, one of them in front, then one more. The rest goes on as in a batch of its own."""
    target, drafter = make(tmp_path)
    texts = draw_texts(4, 40, seed=0)
    sizes = {"max_length": 39, "num_scratch": 6}
    batch = Batch(target, drafter, texts, **sizes).read_first()
    batch.draft([9, 6, 9, 9], seed=1)
    batch.draft([12, 9, 10, 13], seed=2)
    for rows, ends in (([3, 1], [15, 9]), ([1], [12])):
        memory, last = find_memory(batch.state), batch.ends
        batch.keep_rows(rows)
        assert find_memory(batch.state) <= memory, "nothing large is allocated"
        fresh = Batch(target, drafter, batch.texts, **sizes).read_first()
        fresh.draft([last[row] for row in rows], seed=2)
        kept = [place for place, (row, end) in enumerate(zip(rows, ends, strict=True)) if end > last[row]]
        assert_same_drafts(batch.draft(ends, seed=3), fresh.draft(ends, seed=3), kept)


@every_drafter
def test_added_rows_go_on_as_if_they_had_been_there(make: Maker, tmp_path: Path) -> None:
    """Rows join where others have left, and more than there have ever been; the state has held other texts. The rows'
    own batch goes on by itself."""
    target, drafter = make(tmp_path)
    texts = draw_texts(4, 40, seed=0)
    sizes = {"max_length": 39, "num_scratch": 6}
    batch, other = (Batch(target, drafter, part, **sizes).read_first() for part in (texts[:2], texts[2:]))
    if drafter.has_static_state:
        batch.draft([7, 11], seed=0)
        batch.restart()
    batch.draft([9, 6], seed=1)
    other.draft([4, 12], seed=2)
    batch.keep_rows([1])
    batch.add_rows(other)
    batch.draft([7, 6, 13], seed=3)
    batch.add_rows(other)
    fresh = Batch(target, drafter, batch.texts, **sizes).read_first()
    fresh.draft([7, 6, 13, 4, 12], seed=4)
    ends = [8, 9, 14, 7, 13]
    assert_same_drafts(batch.draft(ends, seed=5), fresh.draft(ends, seed=5), [0, 1, 2, 3, 4])
    alone = Batch(target, drafter, texts[2:], **sizes).read_first()
    alone.draft([4, 12], seed=6)
    assert_same_drafts(other.draft([9, 13], seed=7), alone.draft([9, 13], seed=7), [0, 1])
    batch.keep_rows([3])
    batch.add_rows(other)
    fresh = Batch(target, drafter, batch.texts, **sizes).read_first()
    ends = [8, 10, 14]
    fresh.draft([7, 9, 13], seed=8)
    assert_same_drafts(batch.draft(ends, seed=9), fresh.draft(ends, seed=9), [0, 1, 2])


def find_memory(state: Any) -> set[int]:
    """The addresses of what a state's large tensors are stored in."""
    return {x.untyped_storage().data_ptr() for x in find_tensors(state) if x.numel() > 1000}


@pytest.mark.parametrize("num_scratch", [0, 4])
def test_a_row_may_end_within_a_part_of_a_prompt(num_scratch: int) -> None:
    """The target then holds the prompt's last token, whose slot the drafter lacks until the next token is known. What
    is drafted until then means nothing, and harms nothing."""
    target, drafter = make_heads("kangaroo", {"exit_layer": 4})
    assert drafter.shares_target_cache
    texts, ends = draw_texts(2, 18, seed=0), [9, 16]
    sizes = {"max_length": 20, "num_scratch": num_scratch}
    batch, at_once = (Batch(target, drafter, texts, **sizes) for _ in range(2))
    for begin, counts, taken in ((0, [8, 8], [8, 8]), (8, [1, 8], [8, 15])):
        target.prefill(batch.cache, texts[:, begin : begin + 8], torch.tensor(counts), span=Span(begin, begin))
        held = [plane.clone() for plane in (*batch.cache._keys, *batch.cache._values)]
        given = [end - start for start, end in zip(batch.ends, taken, strict=True)]
        parts = texts[:, begin + 1 : begin + 9], torch.tensor(given)
        drafter.extend(batch.state, batch.features[:, begin : begin + 8], *parts, max_slots=max(taken))
        batch.ends = taken
        for plane, before in zip((*batch.cache._keys, *batch.cache._values), held, strict=True):
            for row, length in enumerate(batch.cache.lengths.tolist()):
                assert torch.equal(plane[row, :, :length], before[row, :, :length])
    assert batch.cache.lengths.tolist() == ends
    last = torch.tensor([8, 15])[:, None]
    features = batch.features.gather(1, last[..., None].expand(-1, -1, batch.features.shape[-1]))
    found = drafter.extend(batch.state, features, texts.gather(1, last + 1), torch.tensor([1, 1]), max_slots=16)
    torch.testing.assert_close(found.logits, at_once.extend(ends).logits, rtol=1e-5, atol=1e-5)
