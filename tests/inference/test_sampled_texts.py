"""Chi-square of sampled texts against the target's exact distribution, through generate.

Each test draws 20,000 rows, whose second and third new tokens are compared, and fails a correct rule with a chance of
1e-6 (cells of fewer than 5 expected rows are pooled).
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.inference import Drafter, DraftLogits, DynamicTree, StaticTree, TreePolicy, chain, generate
from tests.inference.acceptance.test_rejection import VOCAB, chi_square
from tests.tiny_targets import tiny_target

NUM_ROWS = 20_000
PAD, EOS = 0, 4
TREES: dict[str, TreePolicy] = {
    "chain": chain(2),
    "static": StaticTree([[0], [1], [0, 0], [1, 0]]),
    "dynamic": DynamicTree(2, 3, 8),
}
PROMPT = torch.tensor([[2, 5, 3]])


class LastButOne(LogitsProcessor):
    """A user's own processor that reads the prefix: the last token but one is twice as likely to come again."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full_like(scores[:, :1], 0.7))


@dataclass(frozen=True)
class Setting:
    """options: of `generate`; processors: what transformers makes of them."""

    options: dict[str, Any]
    processors: list[Any] = field(default_factory=list)


SETTINGS = {
    "T=1.3": Setting({"temperature": 1.3}, [TemperatureLogitsWarper(1.3)]),
    "top-p": Setting({"temperature": 1.3, "top_p": 0.8}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
    "eos": Setting({"eos_token_id": EOS}),
    "custom": Setting({"logits_processor": LogitsProcessorList([LastButOne()])}, [LastButOne()]),
    "several": Setting(
        {"repetition_penalty": 2.0, "bad_words_ids": [[5, 1]], "temperature": 0.9, "top_k": 4},
        [
            RepetitionPenaltyLogitsProcessor(2.0),
            NoBadWordsLogitsProcessor([[5, 1]]),
            TemperatureLogitsWarper(0.9),
            TopKLogitsWarper(4),
        ],
    ),
}
# All cases take a minute; these are quick, one for each rule. `test_rejection.py` has quick tests of processors that
# read the text. With exact acceptance the text is plain decoding's, whatever the processors.
FAST = [("exact", "dynamic", "T=1.3"), ("rejection", "static", "eos")]
CASES = [*FAST, ("rejection", "chain", "T=1.3"), *(("rejection", "static", name) for name in SETTINGS if name != "eos")]


class FixedDrafter(Drafter):
    """Gives every node the same distribution, whatever the text: rows disagree with it, and with each other, often."""

    feature_layers: tuple[int, ...] = ()
    max_depth: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.scores = torch.linspace(0, 2, vocab_size)

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> None:
        return None

    def extend(self, state: None, features: None, next_token_ids: Any, counts: Any, *, max_slots: int) -> DraftLogits:
        return DraftLogits(self.scores.expand(next_token_ids.shape[0], 1, -1))

    def expand(self, state: None, token_ids: Any, parents: Any, depth: int) -> DraftLogits:
        return DraftLogits(self.scores.expand(token_ids.shape[0], 1, -1))


def make_target() -> PreTrainedModel:
    return tiny_target(
        "llama", vocab_size=VOCAB, initializer_range=0.5, num_hidden_layers=1, pad_token_id=PAD, bos_token_id=1
    )


@torch.no_grad()
def expect(model: PreTrainedModel, setting: Setting) -> Tensor:
    """The chance of each pair of second and third new tokens, [V, V] float64, from every text there can be."""

    def probabilities(input_ids: Tensor) -> Tensor:
        scores = model(input_ids).logits[:, -1]
        for processor in setting.processors:
            scores = processor(input_ids, scores)
        return torch.softmax(scores.double(), -1)

    def after(num_tokens: int) -> Tensor:
        new = torch.cartesian_prod(*[torch.arange(VOCAB)] * num_tokens).view(-1, num_tokens)
        shape = (VOCAB,) * (num_tokens + 1)
        chances = probabilities(torch.cat([PROMPT.expand(len(new), -1), new], 1)).view(shape)
        if "eos_token_id" in setting.options:  # after EOS there is padding
            has_ended = (new == EOS).any(1).view(shape[:-1])
            only_pad = torch.nn.functional.one_hot(torch.tensor(PAD), VOCAB).double()
            chances = torch.where(has_ended[..., None], only_pad, chances)
        return chances

    first = probabilities(PROMPT)[0]
    return (first[:, None, None] * after(1)[:, :, None] * after(2)).sum(0)


def measure(acceptance: str, tree: str, setting: Setting) -> float:
    """Chi-square of the second and third new token together, as a share of its bound."""
    model = make_target()
    options: dict[str, Any] = {"top_k": 0, "temperature": 1.0} | setting.options
    output = generate(
        model,
        FixedDrafter(VOCAB),
        PROMPT.expand(NUM_ROWS, -1),
        tree=TREES[tree],
        acceptance=acceptance,
        seed=11,
        max_new_tokens=3,
        do_sample=True,
        **options,
    )
    assert sum(output.stats.accepted_histogram[1:]) > NUM_ROWS / 10
    return chi_square(output.sequences[:, 4:], expect(model, setting))


@pytest.mark.parametrize(
    ("acceptance", "tree", "setting"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_texts_have_the_targets_distribution(acceptance: str, tree: str, setting: str) -> None:
    assert measure(acceptance, tree, SETTINGS[setting]) < 1
