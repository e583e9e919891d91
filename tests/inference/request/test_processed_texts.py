"""Whole texts with processors that read the text: transformers' own, and plain decoding that calls its classes."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from draftsmith.inference import Decoder, DynamicTree, StaticTree, Target, chain
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, pad_prompts, random_prompt, tiny_target

PROMPTS = [random_prompt(length, seed=length)[0] for length in (3, 17, 9)]
LONGEST = max(map(len, PROMPTS))
NEW_TOKENS, EOS = 40, 8
BAD_WORDS = [[token] for token in range(20, 60)] + [[1, 2], [3, 4, 5]]


def make_processors() -> list[Any]:
    """One of each kind, for prompts padded to the longest."""
    penalty = partial(stock.RepetitionPenaltyLogitsProcessor, 1.3)
    try:
        repetition = penalty(prompt_ignore_length=torch.tensor([LONGEST - len(prompt) for prompt in PROMPTS]))
    except ValueError:  # older releases take one number for all rows
        repetition = penalty(prompt_ignore_length=1)
    return [
        stock.SequenceBiasLogitsProcessor({(5,): 1.0, (7, 9): 2.0}),
        repetition,
        stock.NoRepeatNGramLogitsProcessor(2),
        stock.NoBadWordsLogitsProcessor(BAD_WORDS, EOS),
        stock.MinNewTokensLengthLogitsProcessor(LONGEST, 12, EOS),
        stock.ForcedEOSTokenLogitsProcessor(LONGEST + NEW_TOKENS, EOS),
    ]


def generate(decoder: Decoder, processors: Iterable[Any], **options: Any) -> Any:
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": EOS, "pad_token_id": 0, **options}
    return decoder.generate(**pad_prompts(PROMPTS), logits_processor=[*processors], **options)


def trim(sequences: Tensor) -> list[Tensor]:
    """Each row's text without padding."""
    rows = [row[LONGEST - len(prompt) :] for row, prompt in zip(sequences, PROMPTS, strict=True)]
    ends = [(row[len(prompt) :] == EOS).int() for row, prompt in zip(rows, PROMPTS, strict=True)]
    return [
        row[: len(prompt) + int(end.argmax()) + 1] if end.any() else row
        for row, prompt, end in zip(rows, PROMPTS, ends, strict=True)
    ]


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "seed": 5}


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
    """Processors of a type that nobody knows are called row by row."""
    target = Target(tiny_target("llama", num_hidden_layers=2, initializer_range=0.3))
    lazily = generate(Decoder(target), map(partial, make_processors()), **options)
    assert lazily.stats.num_host_syncs == 2 * lazily.stats.num_verify_passes
    drafter = ScriptedDrafter(trim(lazily.sequences), VOCAB_SIZE)
    output = generate(Decoder(target, drafter, tree=tree), make_processors(), **options)
    assert output.sequences.tolist() == lazily.sequences.tolist()
    assert output.stats.num_host_syncs == output.stats.num_verify_passes, "one read for the emitted tokens"
    assert sum(output.stats.accepted_histogram[2:]) > 0, "paths of several drafts were accepted"
    plainly = generate(Decoder(target), [], **options)
    assert plainly.sequences.tolist() != output.sequences.tolist()


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
