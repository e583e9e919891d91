"""Whole texts with processors that read the text: transformers' own, and plain decoding that calls its classes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from draftsmith.inference import Decoder, DynamicTree, GenerationStats, StaticTree, Target, chain
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

# torch's compiler warns about parts of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
PROMPTS = [random_prompt(length, seed=length)[0] for length in (3, 17, 9)]
NEW_TOKENS, EOS = 40, 8
BAD_WORDS = [[token] for token in range(20, 60)] + [[1, 2], [3, 4, 5]]


def make_processors(num_rows: int) -> list[Any]:
    """One of each kind, for prompts padded to the longest."""
    lengths = [len(prompt) for prompt in PROMPTS[:num_rows]]
    longest = max(lengths)
    padding = torch.tensor([longest - length for length in lengths])
    return [
        stock.SequenceBiasLogitsProcessor({(5,): 1.0, (7, 9): 2.0}),
        stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=padding if TAKES_ONE_PER_ROW else 1),
        stock.NoRepeatNGramLogitsProcessor(2),
        stock.NoBadWordsLogitsProcessor(BAD_WORDS, EOS),
        stock.MinNewTokensLengthLogitsProcessor(longest, 12, EOS),
        stock.ForcedEOSTokenLogitsProcessor(longest + NEW_TOKENS, EOS),
    ]


def _takes_one_per_row() -> bool:
    try:
        stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([1, 2]))
    except ValueError:  # older releases
        return False
    return True


TAKES_ONE_PER_ROW = _takes_one_per_row()


class Foreign:
    """Hides a processor's type, so that it is called row by row."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processor(input_ids, scores)


def generate(decoder: Decoder, num_rows: int, processors: Sequence[Any], **options: Any) -> Any:
    inputs = pad_prompts(PROMPTS[:num_rows])
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "pad_token_id": 0, **options}
    return decoder.generate(**inputs, logits_processor=[*processors], **options)


def trim(sequences: Tensor, num_rows: int) -> list[Tensor]:
    """Each row's text without padding."""
    width = max(map(len, PROMPTS[:num_rows]))
    rows = [row[width - len(prompt) :] for row, prompt in zip(sequences, PROMPTS, strict=False)]
    ends = [(row[len(prompt) :] == EOS).int() for row, prompt in zip(rows, PROMPTS, strict=False)]
    return [
        row[: len(prompt) + int(end.argmax()) + 1] if end.any() else row
        for row, prompt, end in zip(rows, PROMPTS, ends, strict=False)
    ]


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "seed": 5}


def check(
    num_rows: int, options: dict[str, Any], make_decoder: Callable[[Target, list[Tensor]], Decoder]
) -> GenerationStats:
    target = Target(tiny_target("llama", num_hidden_layers=2, initializer_range=0.3))
    lazily = generate(Decoder(target), num_rows, [Foreign(one) for one in make_processors(num_rows)], **options)
    assert lazily.stats.num_host_syncs == 2 * lazily.stats.num_verify_passes
    output = generate(
        make_decoder(target, trim(lazily.sequences, num_rows)), num_rows, make_processors(num_rows), **options
    )
    assert output.sequences.tolist() == lazily.sequences.tolist()
    assert output.stats.num_host_syncs == output.stats.num_verify_passes, "one read for the emitted tokens"
    plainly = generate(Decoder(target), num_rows, [], **options)
    assert plainly.sequences.tolist() != output.sequences.tolist()
    return output.stats


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (chain(3), {"do_sample": False}),
        (StaticTree([[0], [1], [0, 0], [1, 0]]), SAMPLED),
        (DynamicTree(3, 3, 10), SAMPLED),
    ],
    ids=["chain", "static", "dynamic"],
)
def test_the_text_is_that_of_transformers_processors(tree: Any, options: dict[str, Any]) -> None:
    stats = check(3, options, lambda target, texts: Decoder(target, ScriptedDrafter(texts, VOCAB_SIZE), tree=tree))
    assert sum(stats.accepted_histogram[2:]) > 0, "paths of several drafts were accepted"


def test_rows_of_one_prompt_and_a_cache_that_is_used_again() -> None:
    """num_return_sequences, and a second turn that finds the first one in the cache."""
    target = Target(tiny_target("llama", num_hidden_layers=2, initializer_range=0.3))
    options: dict[str, Any] = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2}
    options |= {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    prompt, seeds = random_prompt(9), [3, 4, 5]
    texts = Decoder(target).generate(prompt, seed=seeds, **options).sequences
    drafter = ScriptedDrafter([*texts], VOCAB_SIZE)
    output = Decoder(target, drafter, tree=chain(3)).generate(prompt, seed=seeds, **options)
    assert output.sequences.tolist() == texts.tolist()
    decoder, options = Decoder(target), {**options, "do_sample": False, "num_return_sequences": 1}
    first = decoder.generate(prompt, **options).sequences
    more = torch.cat([first, random_prompt(4, seed=9)], dim=1)
    expected = Decoder(target).generate(more, **options).sequences
    assert decoder.generate(more, reuse_cache=True, **options).sequences.tolist() == expected.tolist()
