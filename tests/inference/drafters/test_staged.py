"""A staged drafter drafts the same as its small model, in fewer passes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference import NgramDrafter, SmallModelDrafter, StagedDrafter, chain, generate
from tests.inference.drafters.test_small_model import check, rough_copy
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target


def count_passes(small: SmallModelDrafter, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the passes of a small model from now on, also those that views of the drafter make."""
    passes, score = Counter[str](), small.small.score_opened

    def count(*args: Any, **kwargs: Any) -> Tensor:
        passes["all"] += 1
        return score(*args, **kwargs)

    monkeypatch.setattr(small.small, "score_opened", count)
    return passes


@pytest.mark.parametrize(
    ("family", "is_agreeing"),
    slow_but(
        {"llama-False", "gemma3-True"},
        {f"{family}-{agrees}": (family, agrees) for family in ("llama", "gemma3") for agrees in (True, False)},
    ),
)
def test_scores_are_a_recompute_whatever_the_loop_picks(
    family: str, is_agreeing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows that pick guessed tokens at some levels and others at the rest; a row that waits."""
    model = tiny_target(family, initializer_range=0.3)
    drafter = StagedDrafter(SmallModelDrafter(model), NgramDrafter(max_ngram=2), num_guesses=3)
    state = drafter.start(3, 96, 7)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(2, 6, (3,), generator=generator)
    drafter.read_first(state, first)
    passes = count_passes(drafter.small, monkeypatch)
    texts = [[token] for token in first.tolist()]
    for counts in ([20, 11, 16], [2, 3, 1], [4, 0, 2]):
        slots = torch.randint(2, 6, (3, max(counts) + 1), generator=generator)  # few tokens, so much repeats
        for row, count in enumerate(counts):
            texts[row] += slots[row, :count].tolist()
        longest = max(map(len, texts)) - 1
        draft = drafter.extend(state, None, slots, torch.tensor(counts), max_slots=longest)
        active = [count > 0 for count in counts]
        check(draft, model, texts, [[[]] if is_on else [] for is_on in active])
        paths: list[list[int]] = [[] for _ in texts]
        for depth in range(1, 8):
            guessed = state.guesses[:, min(depth - state.first_depth, 3) - 1 : depth - state.first_depth][:, :1]
            tokens = torch.randint(2, 6, (3, 1), generator=generator)
            if is_agreeing and guessed.shape[1] and depth % 3:
                tokens = torch.where(guessed >= 0, guessed, tokens)
            paths = [[*path, int(token)] for path, token in zip(paths, tokens, strict=True)]
            draft = drafter.expand(state, tokens, torch.zeros(3, 1, dtype=torch.long), depth)
            check(draft, model, texts, [[path] if is_on else [] for path, is_on in zip(paths, active, strict=True)])
    num_saved = 3 * 8 - passes["all"]
    assert num_saved >= 0
    assert (num_saved > 3) == is_agreeing


def test_it_drafts_what_the_small_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens are accepted at every step, so the drafts were the same; the small model ran less often."""
    model = tiny_target("qwen3", initializer_range=0.3)
    prompt = random_prompt(6).repeat(1, 4)
    small = rough_copy(model)
    alone, drafter = SmallModelDrafter(small), StagedDrafter(SmallModelDrafter(small), num_guesses=4)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "seed": 4}
    passes, outputs, num_passes = count_passes(alone, monkeypatch), [], []  # both have the same model
    for one in (alone, drafter):
        passes.clear()
        outputs.append(generate(model, one, prompt, tree=chain(5), max_new_tokens=60, **options))
        num_passes.append(passes["all"])
    expected = generate(model, None, prompt, max_new_tokens=60, **options).sequences
    for output in outputs:
        assert torch.equal(output.sequences, expected)
    assert outputs[0].stats.accepted_histogram == outputs[1].stats.accepted_histogram
    assert num_passes[0] > num_passes[1]


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"give SmallModelDrafter\(model\)"):
        StagedDrafter(tiny_target("llama"))  # type: ignore[arg-type]
