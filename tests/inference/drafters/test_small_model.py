"""A small model that drafts, against the model's own forward without cache, one pass per path."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.inference import Decoder, DraftLogits, StagedDrafter, TreePolicy, chain, generate
from draftsmith.inference.drafters.small_model import SmallModelDrafter, compare_tokenizers
from draftsmith.inference.planning.planner import Planner
from tests.inference.plain_passes import calm_target, run_plainly
from tests.params import slow_but
from tests.tiny_targets import CORE_FAMILIES, pad_prompts, random_prompt, tiny_target


def rough_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model that agrees with `model` often, but not always: its weights are a little off."""
    copy: Any = type(model)(model.config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs * (1 + 0.02 * torch.randn(theirs.shape, generator=generator)))
    return copy


def check(draft: DraftLogits, model: PreTrainedModel, texts: list[list[int]], paths: list[list[list[int]]]) -> None:
    """Scores of all nodes [B][W] against a recompute of their paths; None = a row that is not compared."""
    assert draft.token_ids is None
    for row, nodes in enumerate(paths):
        for node, path in enumerate(nodes):
            wanted = run_plainly(model, texts[row] + path).logits[0, -1]
            torch.testing.assert_close(draft.logits[row, node], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "has_first"),
    slow_but(
        {"llama-True", "mistral-False", "gemma3-True"},
        {f"{family}-{place % 2 == 0}": (family, place % 2 == 0) for place, family in enumerate(CORE_FAMILIES)},
    ),
)
def test_every_level_is_a_recompute_of_its_paths(family: str, has_first: bool) -> None:
    """Ragged rows, arrears, a row that waits, trees of several levels; windows of 8."""
    model = calm_target(family)
    drafter = SmallModelDrafter(model)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(2, 128, shape, generator=generator)

    state = drafter.start(3, 64, 12)
    texts: list[list[int]] = [[], [], []]
    if has_first:
        first = draw(3)
        drafter.read_first(state, first)
        texts = [[token] for token in first.tolist()]
    for counts in ([11, 3, 20], [1, 5, 2], [4, 0, 1], [2, 9, 12]):
        slots = draw(3, max(counts) + 2)
        for row, count in enumerate(counts):
            texts[row] += slots[row, :count].tolist()
        longest = max(map(len, texts))
        draft = drafter.extend(state, None, slots, torch.tensor(counts), max_slots=longest - has_first)
        waits = [not count for count in counts]
        check(draft, model, texts, [[] if wait else [[]] for wait in waits])
        paths: list[list[list[int]]] = [[[]] for _ in texts]
        for depth, width in ((1, 3), (2, 5), (3, 4)):
            parents = torch.randint(0, len(paths[0]), (3, width), generator=generator)
            tokens = draw(3, width)
            paths = [
                [[*paths[row][int(parents[row, node])], int(tokens[row, node])] for node in range(width)]
                for row in range(3)
            ]
            check(drafter.expand(state, tokens, parents, depth), model, texts, paths)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(do_sample: bool) -> None:
    """Its chain is what it says itself, also at temperature 1, where it reads the target's noise."""
    model = tiny_target("gemma3", initializer_range=0.3)
    prompt = random_prompt(11)
    options: dict[str, Any] = {"max_new_tokens": 41, "do_sample": do_sample}
    expected = generate(model, None, prompt, seed=3, **options).sequences
    output = generate(model, SmallModelDrafter(model), prompt, tree=chain(4), seed=3, **options)
    assert torch.equal(output.sequences, expected)
    assert output.stats.accepted_histogram == [0, 0, 0, 0, 8]


class ScriptedChoice(Planner):
    """Drafts in these steps and not in others, always the whole tree."""

    def __init__(self, policy: TreePolicy, is_drafting: Sequence[bool]) -> None:
        super().__init__([policy])
        self.policy, self.turns = policy, itertools.cycle(is_drafting)

    def choose(self, *_: Any) -> TreePolicy | None:
        return self.policy if next(self.turns) else None

    def learn(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", ["small", "staged"])
def test_a_row_that_ends_within_a_step_may_have_taken_in_more(kind: str) -> None:
    """The longest row ends in the middle of a path, which the drafter has read whole; a plain step later, fewer tokens
    are in view than that."""
    model = tiny_target("llama", initializer_range=0.3)
    small = SmallModelDrafter(model)
    drafters = {"small": small, "staged": StagedDrafter(small)}
    prompts = [random_prompt(length, seed=seed) for seed, length in ((1, 58), (2, 10))]
    inputs = pad_prompts(prompts)
    free = [
        generate(model, None, one, max_new_tokens=40, do_sample=False).sequences[0, one.shape[1] :] for one in prompts
    ]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": int(free[0][1]), "pad_token_id": 0}
    assert options["eos_token_id"] not in [*free[0][:1], *free[1]]
    decoder = Decoder(model, drafters[kind], tree=chain(8))
    decoder.planner = ScriptedChoice(chain(8), [True, True, False, True])
    rows = decoder.generate(**inputs, **options).sequences[:, 58:].tolist()
    assert rows == [[*free[0][:2].tolist(), *[0] * 38], free[1].tolist()]


def test_vocabularies_may_differ_by_padding() -> None:
    """Columns the target does not have are never drafted, and tokens the small model does not know do no harm."""
    model = tiny_target("llama", initializer_range=0.3)
    small = tiny_target("llama", initializer_range=0.3, vocab_size=96)
    tokenizer = FakeTokenizer({"a": 0, "b": 1})
    drafter = SmallModelDrafter(small, tokenizer=tokenizer, target_tokenizer=FakeTokenizer({"b": 1, "a": 0}))
    prompt = random_prompt(12)
    for tree, options in (("chain", {"do_sample": False}), ("dynamic", {"do_sample": True, "seed": 1})):
        expected = generate(model, None, prompt, max_new_tokens=24, **options).sequences
        output = generate(model, drafter, prompt, tree=tree, max_new_tokens=24, **options)
        assert torch.equal(output.sequences, expected)
    assert int(expected.max()) >= 96, "tokens that a vocabulary of 96 does not have"


class FakeTokenizer:
    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_vocabularies_that_do_not_fit_are_refused() -> None:
    model, small = tiny_target("llama"), tiny_target("llama", vocab_size=96)
    with pytest.raises(ValueError, match=r"vocabulary of 128 .* one of 96: .* tokenizer="):
        Decoder(model, SmallModelDrafter(small))
    elsewhere = SmallModelDrafter(tiny_target("llama"))
    elsewhere.small.device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"target is on cpu, .* on cuda:1: .*to\('cpu'\)"):
        Decoder(model, elsewhere)
    one = FakeTokenizer({"a": 0, "b": 1, "c": 2})
    with pytest.raises(ValueError, match=r"2 ids \(1 is 'c' in the target's and 'b' .*; 2 is 'b'"):
        compare_tokenizers(one, FakeTokenizer({"a": 0, "b": 2, "c": 1}))
    for vocab in ({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2, "d": 3}, {"a": 0, "b": 1, "d": 3}):
        compare_tokenizers(one, FakeTokenizer(vocab))  # tokens that only one side has
        compare_tokenizers(FakeTokenizer(vocab), one)
    with pytest.raises(ValueError, match="pass both tokenizer and target_tokenizer"):
        SmallModelDrafter(small, tokenizer=one)


def test_texts_beyond_the_small_models_positions_stay_right() -> None:
    model = tiny_target("llama", initializer_range=0.3)
    small = SmallModelDrafter(tiny_target("llama", initializer_range=0.3, max_position_embeddings=32))
    decoder = Decoder(model, small, tree="chain")
    prompt = random_prompt(24)
    expected = generate(model, None, prompt, max_new_tokens=20, do_sample=False).sequences
    for _ in range(2):
        assert torch.equal(decoder.generate(prompt, max_new_tokens=20, do_sample=False).sequences, expected)
