"""Heads of any kind score only the most frequent tokens: no bit of the text changes, and nothing else of the heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.draft_vocabulary import COUNTS_FILE, take_lm_head_rows
from draftsmith.inference import Decoder, DraftLogits, Target, generate
from draftsmith.inference.kernels.packed_weights import PackedLinear
from tests.heads.tiny_heads import FIRST_BY_DEFAULT, tiny_heads
from tests.tiny_targets import random_prompt, target_of, tiny_target

every_kind = pytest.mark.parametrize(("head_type", "overrides"), FIRST_BY_DEFAULT)
SIZE = 24
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0, "seed": 5}


def record_drafts(heads: DraftHeads, monkeypatch: pytest.MonkeyPatch) -> list[DraftLogits]:
    """The list of all scores that heads of this kind give from now on."""
    drafts: list[DraftLogits] = []

    def recorded(method: Callable[..., DraftLogits]) -> Callable[..., DraftLogits]:
        def record(*args: Any, **kwargs: Any) -> DraftLogits:
            drafts.append(method(*args, **kwargs))
            return drafts[-1]

        return record

    for name in ("extend", "expand"):
        monkeypatch.setattr(type(heads), name, recorded(getattr(type(heads), name)))
    return drafts


def scores_by_token(draft: DraftLogits) -> dict[int, float]:
    """Of the first node's children."""
    scores = draft.logits[0, 0]
    ids = torch.arange(len(scores)) if draft.token_ids is None else draft.token_ids.view(-1, len(scores))[0]
    return dict(zip(ids.tolist(), scores.tolist(), strict=True))


@every_kind
def test_the_text_is_that_of_plain_decoding(
    head_type: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frequent tokens are those of the target's own texts, so that drafts of random heads are accepted too. The
    scores are columns of those without a limit."""
    target, prompt = target_of("qwen2"), random_prompt(9)
    expected = [generate(target, None, prompt, **options).sequences for options in (GREEDY, SAMPLED)]
    counts = torch.cat([text[0, 9:] for text in expected]).bincount(minlength=128) * 1000 + 1
    heads = tiny_heads(head_type, target, **overrides)
    own_ids, whole = heads.draft_token_ids, {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    drafts = record_drafts(heads, monkeypatch)
    decode: dict[str, Any] = {"tree": "dynamic:3,12,36"}
    generate(target, heads, prompt, **GREEDY, **decode)
    first = scores_by_token(drafts[0])
    drafts.clear()

    heads.limit_vocabulary(SIZE, counts)
    decoder = Decoder(target, heads, **decode)
    for options, text in zip((GREEDY, SAMPLED), expected, strict=True):
        output = decoder.generate(prompt, **options)
        assert torch.equal(output.sequences, text)
        assert output.stats.acceptance_length > 1.05, "no draft was accepted, so this shows little"
    known = torch.arange(128) if own_ids is None else own_ids
    columns = counts[known].argsort(descending=True, stable=True)[:SIZE].sort().values
    limited, frequent = scores_by_token(drafts[0]), set(known[columns].tolist())
    assert {token: limited[token] for token in first if token in frequent} == pytest.approx(
        {token: score for token, score in first.items() if token in frequent}, rel=1e-4, abs=1e-5
    )
    for draft in drafts:
        is_of_each_node = draft.token_ids.dim() == 3  # the best of the frequent tokens
        assert is_of_each_node or draft.token_ids.tolist() == known[columns].tolist()
        assert {*draft.token_ids.flatten().tolist()} <= frequent
        assert draft.logits.shape[-1] == draft.token_ids.shape[-1]
    assert all(torch.equal(tensor, whole[name]) for name, tensor in heads.state_dict().items())


@pytest.mark.parametrize(("head_type", "is_packed"), [("medusa", True), ("mtp", False)], ids=["packed", "bfloat16"])
def test_in_another_dtype_and_packed(head_type: str, is_packed: bool) -> None:
    """Heads in float32; the target's view of them has the rows in its own dtype, packed where its weights are."""
    target = Target(tiny_target("llama", dtype=torch.float32 if is_packed else torch.bfloat16))
    target = target.with_packed_weights() if is_packed else target
    heads = tiny_heads(head_type, target_of("llama")).limit_vocabulary(SIZE, torch.arange(128))
    view = heads.for_target(target)
    matrices = [part for part in nn.Module.modules(view) if isinstance(part, nn.Linear) and len(part.weight) == SIZE]
    assert len(matrices) == (1 if heads.borrows_lm_head else heads.config.num_heads)
    for matrix in matrices:
        assert matrix.weight.dtype == target.dtype
        assert isinstance(matrix, PackedLinear) == is_packed
    again = view.for_target(target)  # of a view: it stays limited
    assert again.draft_token_ids is not None
    outputs = [generate(target, each, random_prompt(9), **GREEDY).sequences for each in (heads, again)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_rows_score_as_the_whole_lm_head(family: str) -> None:
    """With soft-capping; and with a bias."""
    model: Any = tiny_target(family)
    if family == "llama":
        model.lm_head = nn.Linear(model.lm_head.in_features, 128)
    target, ids = Target(model), torch.tensor([3, 50, 127])
    hidden = 3 * torch.randn(2, target.hidden_size)
    found = target.compute_logits(hidden, take_lm_head_rows(target, ids))
    torch.testing.assert_close(found, target.compute_logits(hidden)[:, ids])


class TestCounts:
    def test_stand_beside_the_weights(self, tmp_path: Path) -> None:
        target, counts = target_of("llama"), torch.arange(128).flip(0)
        heads = create_heads("mtp", target)
        heads.save_pretrained(tmp_path / "without")
        heads.fit_vocabulary(counts)
        heads.save_pretrained(tmp_path / "with")
        loaded = DraftHeads.from_pretrained(tmp_path / "with", draft_vocab_size=5)
        assert loaded.for_target(target).draft_token_ids.tolist() == [0, 1, 2, 3, 4]
        assert loaded.draft_token_ids is None, "training and exports use all tokens"
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(DraftHeads.from_pretrained(tmp_path / "again").token_counts, counts)
        create_heads("mtp", target).save_pretrained(tmp_path / "again")
        assert DraftHeads.from_pretrained(tmp_path / "again").token_counts is None, "they were other heads'"
        given = DraftHeads.from_pretrained(tmp_path / "without", draft_vocab_size=2, token_counts=counts.flip(0))
        assert given.for_target(target).draft_token_ids.tolist() == [126, 127]
        with pytest.raises(ValueError, match=f"got draft_vocab_size 5.*{COUNTS_FILE}.*--draft_vocab_data"):
            DraftHeads.from_pretrained(tmp_path / "without", draft_vocab_size=5)

    def test_of_heads_with_a_vocabulary_of_their_own(self, tmp_path: Path) -> None:
        target = target_of("llama")
        tiny_heads("eagle3", target, draft_vocab_size=40).save_pretrained(tmp_path)
        loaded = DraftHeads.from_pretrained(tmp_path, draft_vocab_size=7, target=target)
        ids: Tensor = loaded.for_target(target).draft_token_ids
        assert loaded.config.draft_vocab_size == len(loaded.draft_token_ids) == 40
        kept = loaded.token_counts[ids]
        assert (loaded.token_counts[loaded.draft_token_ids] > kept.min()).sum() == 6

    def test_what_is_refused(self, own_kind: Any) -> None:
        for kind, size, num_counts, message in (
            ("mtp", 0, 128, "draft_vocab_size is 0; allowed is 1 to 128"),
            ("mtp", 129, 128, "draft_vocab_size is 129; allowed is 1 to 128"),
            ("mtp", 5, 100, r"token_counts has the shape \[100\]; allowed is \[128\]"),
            ("bigram", 5, 128, "draft_vocab_size is 5, but the kind bigram"),
        ):
            with pytest.raises(ValueError, match=message):
                create_heads(kind, target_of("llama")).limit_vocabulary(size, torch.arange(num_counts))


def test_a_limit_after_learning_takes_the_most_frequent_tokens() -> None:
    target = target_of("llama", vocab_size=9000)
    heads = tiny_heads("mtp", target)
    heads.fit_vocabulary(torch.arange(9000))
    assert heads.learn_draft_vocabulary() == 8192
    assert torch.equal(heads.limit_vocabulary(16).for_target(target).draft_token_ids, torch.arange(9000 - 16, 9000))


def test_large_lm_heads_are_cut_by_default() -> None:
    """8,192 of 9,000 tokens, if there are counts, and nobody says another number."""
    target = target_of("llama", vocab_size=9000)
    heads = tiny_heads("mtp", target)
    assert heads.for_target(target).draft_token_ids is None
    heads.fit_vocabulary(torch.arange(9000))
    assert torch.equal(heads.for_target(target).draft_token_ids, torch.arange(9000 - 8192, 9000))
    prompt = random_prompt(9)
    assert torch.equal(
        generate(target, heads, prompt, **GREEDY).sequences, generate(target, None, prompt, **GREEDY).sequences
    )
    assert heads.limit_vocabulary(9000).for_target(target).draft_token_ids is None


def test_other_counts_are_other_rows_of_own_lm_heads() -> None:
    """Copies of LM heads follow counts that come later, and change."""
    target = target_of("llama", vocab_size=9000)
    heads = tiny_heads("medusa", target)
    assert heads.for_target(target).draft_token_ids is None
    for counts in (torch.arange(9000), torch.arange(9000).flip(0)):
        heads.fit_vocabulary(counts)
        view = heads.for_target(target)
        rows = dict(view.named_parameters())["heads.0.lm_head.weight"]
        assert torch.equal(rows, heads.heads[0].lm_head.weight[view.draft_token_ids])


@every_kind
def test_a_loss_of_drafted_tokens(head_type: str, overrides: dict[str, Any]) -> None:
    """It reads the columns that decoders draft; saved and decoding heads stay whole, and binding again ends it."""
    target, ids = target_of("qwen2"), random_prompt(9)
    heads = tiny_heads(head_type, target, **overrides)
    heads.limit_vocabulary(SIZE, torch.arange(128))
    features = torch.randn(1, 9, len(heads.feature_layers) * target.hidden_size)
    names = heads.state_dict().keys()
    states = [step.hidden for step in heads.unroll(features, ids)]
    whole = [step.head(state) for step, state in zip(heads.unroll(features, ids), states, strict=True)]
    own, wanted = heads.draft_token_ids, heads.for_target(target).draft_token_ids
    has_own = any(name.rpartition(".")[2] == "lm_head" for name, _ in nn.Module.named_modules(heads))
    assert heads.learn_draft_vocabulary() == (None if has_own else SIZE)
    assert heads.state_dict().keys() == names
    assert torch.equal(heads.for_target(target).draft_token_ids, wanted)
    if not has_own:
        assert torch.equal(heads.draft_token_ids, wanted)
        for step, state, logits in zip(heads.unroll(features, ids), states, whole, strict=True):
            torch.testing.assert_close(step.head(state), logits[..., wanted])
    again = heads.bind(target).draft_token_ids
    assert again is own or torch.equal(again, own)
