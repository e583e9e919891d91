"""Texts that arrive in pieces, and the samplers of several rows as one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers.generation import logits_process as stock

from draftsmith.inference.acceptance.sampler import Sampler, pick_token
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.request.text_processors import OccurrencePenalties, read_processors
from draftsmith.inference.request.token_history import TokenHistory
from draftsmith.inference.serving.reply import StopStrings


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strings", [["ENDE", "ND"], ["never"]])
def test_stop_strings_cut_a_text_in_pieces_of_any_size(strings: list[str], size: int) -> None:
    text = "aEaabENEND and more"
    places = [text.find(string) for string in strings if string in text]
    # Pieces may show a stop string before one that begins earlier is whole.
    expected = text[: min(places)] if places else text
    stops, shown = StopStrings(strings), ""
    for place in range(0, len(text), size):
        shown += stops.add(text[place : place + size])
        assert text.startswith(shown)
        if stops.is_found:
            break
    assert stops.is_found == bool(places)
    assert shown + stops.flush() == expected


def test_stop_strings_before_the_least_number_of_tokens_do_not_count() -> None:
    stops = StopStrings(["END"])
    assert [stops.add(piece, may_end=False) for piece in ("one END", " two E")] == ["one END", " two "]
    assert [stops.add(piece) for piece in ("ND", "END")] == ["", ""], "one that begins before them and ends after them"
    assert stops.is_found


def make_samplers() -> tuple[list[Sampler], list[TokenHistory]]:
    """Greedy, sampled alike twice, sampled otherwise, with processors that read the text, and with a lazy one."""
    warpers = [stock.TemperatureLogitsWarper(0.6), stock.TopPLogitsWarper(0.8)]
    settings = [
        ([], False),
        (warpers, True),
        ([stock.TemperatureLogitsWarper(0.6), stock.TopPLogitsWarper(0.8)], True),
        ([stock.TemperatureLogitsWarper(1.7), stock.TopKLogitsWarper(5)], True),
        ([stock.RepetitionPenaltyLogitsProcessor(1.9)], False),
        ([OccurrencePenalties(presence=1.0, frequency=1.0, begin=torch.tensor(2)), *warpers], True),
        ([stock.PrefixConstrainedLogitsProcessor(lambda _, text: [int(text[-1]), 3], 1)], False),
    ]
    samplers, texts = [], []
    for number, (processors, do_sample) in enumerate(settings):
        text = TokenHistory.of_prompts(torch.tensor([[5, 6, 7 + number, 5]]), [20], 64)
        samplers.append(
            Sampler(
                read_processors(processors, text, 30),
                do_sample=do_sample,
                row_seeds=row_seeds(number, 1, "cpu"),
                eos_token_ids=[number],
                texts=text if number > 3 else None,
            )
        )
        texts.append(text)
    return samplers, texts


def test_rows_of_a_joined_sampler_are_those_of_their_own_samplers() -> None:
    """In their order, and after some have left and one came."""
    samplers, texts = make_samplers()
    joined = Sampler.join(samplers, join(texts))
    check(joined, [*range(7)], join(texts))
    chosen = [6, 1, 3, 4]
    kept = joined.select(chosen, join(texts, chosen))
    check(kept, chosen, join(texts, chosen))
    more = [*chosen, 2]
    check(Sampler.join([kept, samplers[2]], join(texts, more)), more, join(texts, more))
    greedy = joined.select([0, 4], join(texts, [0, 4]))
    assert greedy.draw_noise(torch.tensor([3, 3]), 2, 30) is None


def join(texts: list[TokenHistory], chosen: Sequence[int] = range(7)) -> TokenHistory:
    names = ("token_ids", "lengths", "limits", "indices")
    return replace(texts[0], **{name: torch.cat([getattr(texts[one], name) for one in chosen]) for name in names})


def check(joined: Sampler, numbers: list[int], history: TokenHistory) -> None:
    samplers, texts = make_samplers()
    scores = torch.randn(len(numbers), 30, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(len(numbers)) + 10
    noise = joined.draw_noise(positions, 3, 30)
    drafted = torch.randn(len(numbers) * 4, 30, generator=torch.Generator().manual_seed(1))
    warped = joined.warp_draft(drafted).view(len(numbers), 4, 30)
    walking = torch.ones(len(numbers), dtype=torch.bool)
    picked = pick_token(joined.process(scores.clone(), history, walking), noise[:, 0])
    assert joined.are_ends(torch.tensor(numbers)).all()
    assert not joined.are_ends(torch.tensor(numbers) + 1).any()
    for place, number in enumerate(numbers):
        own, here = samplers[number], slice(place, place + 1)
        alone = own.draw_noise(positions[here], 3, 30)
        assert torch.equal(noise[here], torch.zeros_like(noise[here]) if alone is None else alone)
        processed = own.process(scores[here].clone(), texts[number], walking[here])
        assert torch.equal(pick_token(processed, None if alone is None else alone[:, 0]), picked[here]), number
        expected = own.warp_draft(drafted[4 * place : 4 * place + 4]) if own.do_sample else warped[place]
        assert torch.equal(warped[place], expected)
