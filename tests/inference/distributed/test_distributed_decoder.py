"""Texts of a `DistributedDecoder` with servers in this process, whose answers come late and in a random order."""

import random
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from draftsmith.inference import Decoder, DistributedDecoder, Drafter, NgramDrafter, Target
from draftsmith.inference.distributed.server import TargetServer
from tests.inference.distributed import ranks
from tests.inference.distributed.fake_link import FakeLink
from tests.inference.distributed.test_drafting import DRAFTERS
from tests.inference.test_generation import Recorder
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.processes import start_ranks
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_multimodal import multimodal_target, prompts_with_media
from tests.tiny_targets import random_prompt, target_of

NUM_NEW = 24
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": SAMPLED,
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 20},
    "sampled with penalties": {**SAMPLED, "repetition_penalty": 1.3, "eos_token_id": 3},
}


@cache
def plain_decoder(family: str) -> Decoder:
    return Decoder(target_of(family), None)


def plain(family: str, prompt: Tensor, **kwargs: Any) -> Tensor:
    return plain_decoder(family).generate(prompt, **{"max_new_tokens": NUM_NEW, **kwargs}).sequences


def scripted(target: Target, text: Tensor) -> Drafter:
    """Mostly right, with features, and without a candidate beyond the text."""
    return ScriptedDrafter([text[0]], target.vocab_size, ranks=(0, 0, 0, 0, 0, 0, 1, 9), is_strict=False)


def decode(family: str, drafter: Any, number: int, call: dict[str, Any]) -> tuple[bool, DistributedDecoder]:
    """Whether the text is that of plain decoding."""
    generator = random.Random(number)
    prompt = random_prompt(generator.randint(1, 30), number)
    seeded = {**call, "seed": number} if call["do_sample"] else call
    expected = plain(family, prompt, **seeded)
    target = target_of(family)
    link = FakeLink(partial(TargetServer, target), generator.randint(1, 4), seed=number)
    lookahead, max_ahead = generator.choice((None, 1, 2, 4)), generator.randint(1, 12)
    made = drafter(target, expected)
    decoder = DistributedDecoder(target, made, lookahead=lookahead, max_ahead=max_ahead, link=link)
    output = decoder.generate(prompt, max_new_tokens=NUM_NEW, **seeded)
    return torch.equal(output.sequences, expected), decoder


@pytest.mark.parametrize("call", CALLS)
def test_texts_are_those_of_plain_decoding(call: str) -> None:
    """Targets with and without windows; a server that lags reads what it missed."""
    for number, family in enumerate(("llama", "gemma3")):
        is_same, decoder = decode(family, scripted, 10 * number + len(call), CALLS[call])
        assert is_same, (family, call)
        assert decoder.timeline.verifications


@pytest.mark.parametrize("name", ["n-grams", "small model", "eagle3", "kangaroo"])
def test_drafters_of_every_sort(name: str) -> None:
    assert decode("llama", lambda target, _: DRAFTERS[name](target), 3, CALLS["sampled"])[0]


def fake(target: Target) -> FakeLink:
    return FakeLink(partial(TargetServer, target), 2)


def test_ends_of_texts() -> None:
    """EOS, stopping criteria, padding and streams, as in `generate`; one decoder decodes them all."""

    class HasToken(StoppingCriteria):
        def __init__(self, token: int) -> None:
            self.token = token

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return (input_ids[:, 8:] == self.token).any(1)

    target, prompt = target_of("llama"), random_prompt(8, 2)
    text = plain("llama", prompt)
    token = int(text[0, 18])
    decoder = DistributedDecoder(target, scripted(target, text), link=fake(target))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(prompt)], dim=1)
    for inputs, call in (
        ((prompt,), {"eos_token_id": token}),
        ((prompt,), {"stopping_criteria": StoppingCriteriaList([HasToken(token)])}),
        ((padded, mask), {"repetition_penalty": 1.2}),
        ((prompt,), {"max_new_tokens": 1}),
    ):
        call = {"max_new_tokens": NUM_NEW, "do_sample": False, **call}
        expected = plain_decoder("llama").generate(*inputs, **call).sequences
        streamer = Recorder()
        drafter = scripted(target, expected[:, inputs[0].shape[1] - prompt.shape[1] :])
        decoder = DistributedDecoder(target, drafter, link=decoder.link)
        output = decoder.generate(*inputs, streamer=streamer, **call)
        assert torch.equal(output.sequences, expected)
        assert streamer.tokens == expected[0].tolist()
        assert streamer.ended == 1
        assert output.stats.num_new_tokens == expected.shape[1] - inputs[0].shape[1]
    decoder.close()
    assert decoder.link.is_closed


def test_streams() -> None:
    """A stream hands out the text of `generate`, tells drafts apart, and may be left before the end."""
    target, prompt = target_of("llama"), random_prompt(8, 2)
    text = plain("llama", prompt)
    decoder = DistributedDecoder(target, scripted(target, text), link=fake(target))
    for call in (CALLS["greedy"], {**CALLS["sampled"], "seed": 5}):
        with decoder.stream(prompt, max_new_tokens=NUM_NEW, **call) as stream:
            assert len(next(stream)) == 1, "the target's own token after the prompt"
            assert not torch.is_inference_mode_enabled()
        assert stream.output.stats.num_new_tokens == 1
        stream = decoder.stream(prompt, max_new_tokens=NUM_NEW, **call)
        steps = list(stream)
        expected = plain("llama", prompt, **call)
        assert [token for step in steps for token in step] == expected[0, prompt.shape[1] :].tolist()
        assert torch.equal(stream.output.sequences, expected)
        own = sum(len(step) - step.num_drafted for step in steps)
        assert own in (stream.output.stats.num_verify_steps, stream.output.stats.num_verify_steps + 1)
    assert any(step.num_drafted for step in steps)


def test_what_is_counted() -> None:
    target, prompt = target_of("llama"), random_prompt(8, 2)
    text = plain("llama", prompt)
    drafter = ScriptedDrafter([text[0]], target.vocab_size, ranks=(0,), feature_layers=())
    link = FakeLink(partial(TargetServer, target), 2, most_delay=0)
    decoder = DistributedDecoder(target, drafter, lookahead=4, link=link)
    stats = decoder.generate(prompt, max_new_tokens=NUM_NEW, do_sample=False).stats
    timeline = decoder.timeline
    assert stats.num_drafted == timeline.num_drafted > 0
    assert stats.num_verify_passes == len(timeline.verifications) == stats.num_target_forwards - 1
    assert stats.num_new_tokens == NUM_NEW
    assert timeline.num_wasted == 0, "all drafts are right"


def test_calls_that_are_refused() -> None:
    class Keeping(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    target, prompt = target_of("llama"), random_prompt(5)
    decoder = DistributedDecoder(target, NgramDrafter(), link=fake(target))
    for error, kwargs in (
        ("one at a time.*has 2 rows", {"num_return_sequences": 2, "do_sample": True}),
        ("not scores", {"return_dict_in_generate": True, "output_scores": True}),
        ("Keeping may keep a state", {"logits_processor": LogitsProcessorList([Keeping()])}),
    ):
        with pytest.raises(ValueError, match=error):
            decoder.generate(prompt, **{"max_new_tokens": 4, "do_sample": False, **kwargs})
    sees = multimodal_target("llava")
    with pytest.raises(ValueError, match=r"distributed decoding .* text only"):
        DistributedDecoder(sees, NgramDrafter(), link=fake(sees)).generate(
            **prompts_with_media("llava"), max_new_tokens=4
        )
    with pytest.raises(TypeError, match="drafter is str"):
        DistributedDecoder(target, "heads", link=fake(target))
    with pytest.raises(ValueError, match="lookahead is 0"):
        DistributedDecoder(target, NgramDrafter(), lookahead=0, link=fake(target))
    with pytest.raises(ValueError, match="encoder-decoder"):
        DistributedDecoder(tiny_encoder_decoder("t5"), NgramDrafter(), link=fake(target))


# Real processes: rank 0 and two servers over gloo, with every message late.


@pytest.mark.ci
@pytest.mark.slow
def test_texts_are_the_same_and_a_killed_server_ends_the_run(tmp_path: Path) -> None:
    first, second, third = start_ranks(3, tmp_path / "rank", ranks.run, 12)
    for rank in (first, second, third):
        rank.join(300)
        rank.kill()
    output = (tmp_path / "rank0").read_text()
    found = re.search(r"(\d+) of 12 texts are the same, and in (\d+) answers overtook", output)
    assert found, output
    assert found[1] == "12"
    assert found[2] != "0"
    assert first.exitcode == 1
    assert "RuntimeError: the target server of rank 2 has died" in output
    assert second.exitcode == 0, "the other server is told to end"
