"""generate(): the options of transformers' generate, what is counted, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftsmith.inference import Decoder, chain, generate, stream
from draftsmith.inference import decoder as decoding
from draftsmith.inference.targets.forward_names import CACHE_NAMES
from tests.conftest import DEFAULT_TREE
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

PROMPT = random_prompt(6)
MODEL = tiny_target("llama", initializer_range=0.3)
GREEDY = {"max_new_tokens": 24, "do_sample": False}


def truth(**options: Any) -> torch.Tensor:
    return MODEL.generate(PROMPT, **{**GREEDY, **options})


def scripted(**options: Any) -> ScriptedDrafter:
    return ScriptedDrafter([truth(max_new_tokens=40)[0]], VOCAB_SIZE, **options)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


class StopAt(StoppingCriteria):
    """Stops once the text is `length` tokens long; sees every prefix, one token at a time."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize(
    ("width", "acceptance", "size"),
    [
        (3, "exact", (6, 32)),
        (1, "exact", (8, 9)),
        (3, "typical", (6, 32)),
        (3, "rejection", (5, 6)),
        (1, "typical", (5, 6)),
    ],
)
def test_the_default_tree_is_fixed_where_texts_depend_on_it(
    width: int, acceptance: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_default_tree", DEFAULT_TREE)
    drafter = scripted()
    drafter.drafts_chains_only = width == 1
    decoder = Decoder(MODEL, drafter, acceptance=acceptance)
    assert (decoder.policy.max_depth, decoder.policy.num_nodes) == size
    assert (decoder.planner is not None) == (acceptance == "exact")
    monkeypatch.setattr(MODEL, "_tp_size", 2, raising=False)
    assert Decoder(MODEL, drafter, acceptance=acceptance).planner is None


def test_streamer_gets_each_token_once_and_an_end() -> None:
    streamer = Recorder()
    output = generate(MODEL, scripted(), PROMPT, streamer=streamer, **GREEDY)
    assert streamer.tokens == output.sequences[0].tolist()
    assert streamer.ended == 1
    # A reader in another thread must not wait for ever.
    with pytest.raises(ValueError, match="the ids 0 to"):
        generate(MODEL, None, PROMPT + VOCAB_SIZE, streamer=streamer, **GREEDY)
    assert streamer.ended == 2


def test_stopping_criteria_see_every_prefix_and_trim_within_a_step() -> None:
    criterion = StopAt(6 + 11)
    drafter = scripted(ranks=(0,))
    output = generate(MODEL, drafter, PROMPT, stopping_criteria=StoppingCriteriaList([criterion]), **GREEDY)
    assert torch.equal(output.sequences, truth(max_new_tokens=11))
    assert criterion.seen == list(range(7, 18))


def test_seed_none_draws_from_torchs_generator() -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(generate(MODEL, None, PROMPT, **options).sequences)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_counts() -> None:
    """A chain that is always right: each verify step emits depth + 1 tokens; the last is trimmed after counting."""
    output = generate(MODEL, scripted(ranks=(0,)), PROMPT, tree=chain(3), max_new_tokens=11, do_sample=False)
    stats = output.stats
    # 1 token from the prefill, then 3 steps of 4 = 13 tokens, of which 11 are kept.
    assert (stats.num_verify_steps, stats.num_target_forwards, stats.num_new_tokens) == (3, 4, 11)
    assert stats.accepted_histogram == [0, 0, 0, 3]
    assert stats.acceptance_length == 4.0
    assert stats.acceptance_by_depth == [1.0, 1.0, 1.0]
    assert stats.num_drafted == 9
    assert stats.seconds["total"] >= sum(stats.seconds[name] for name in ("prefill", "draft", "verify"))


# Options of transformers' own drafting that this release has.
SPECULATION = {
    name: value
    for name, value in {"use_mtp": True, "speculation_type": "dflash"}.items()
    if hasattr(GenerationConfig(), name)
}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams=2.*num_beams=1"),
        ({"synced_gpus": True}, "synced_gpus is not supported by this decode loop: leave it out"),
        ({"inputs": PROMPT}, "got input_ids and inputs, two names of the prompts: give one of them"),
        ({"prompt_lookup_num_tokens": 3}, "NgramDrafter"),
        ({"stop_strings": ["a"]}, "needs the tokenizer, and tokenizer is None: pass"),
        ({"stop_strings": ["a"], "tokenizer": "x"}, "needs the tokenizer, and tokenizer is 'x': pass"),
        *(({name: value}, f"{name}={value!r}.*: pass heads as the drafter") for name, value in SPECULATION.items()),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"assistant_model": MODEL}, "assistant_model .*: pass a draftsmith.SmallModelDrafter"),
        *(({name: DynamicCache()}, f"{name} is not supported") for name in CACHE_NAMES),
    ],
)
def test_refused_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        generate(MODEL, scripted(), PROMPT, **GREEDY, **options)


@pytest.mark.parametrize(
    "name", ["is_coupled", "batch_invariant", "is_synchronised", "compile", "pack_weights", "graphs", "reuse_cache"]
)
@pytest.mark.parametrize("value", ["yes", 0, 1])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    also = {"compile": ", or a compiled Decoder,", "batch_invariant": ", or None,"}.get(name, "")
    with pytest.raises(TypeError, match=f"^{name} is {value!r}; True or False{also} is expected"):
        generate(MODEL, None, PROMPT, **GREEDY, **{name: value})


def test_a_learner_is_expected() -> None:
    with pytest.raises(TypeError, match=r"^learner is 5; a draftsmith\.OnlineLearner, another Learner, or None is"):
        Decoder(MODEL, learner=5)


def never(input_ids: torch.Tensor, scores: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(
            ({name: value}, f"^{name} is .*; a list of functions is expected")
            for name in ("logits_processor", "stopping_criteria")
            for value in (never, ["x"], "x", 5)
        ),
        ({"generation_config": {"max_new_tokens": 3}}, "^generation_config is {'max_new_tokens': 3}; GenerationConfig"),
        ({"streamer": print}, r"^streamer is <built-in function print>; an object with put\(\) and end\(\)"),
    ],
)
def test_arguments_of_wrong_types(options: dict[str, Any], match: str) -> None:
    decoder = Decoder(MODEL)
    with pytest.raises(TypeError, match=match):
        decoder.generate(PROMPT, **GREEDY, **options)
    if "streamer" not in options:
        with pytest.raises(TypeError, match=match):
            decoder.stream(PROMPT, **GREEDY, **options)
    assert torch.equal(decoder.generate(PROMPT, stopping_criteria=(never,), **GREEDY).sequences, truth())


def test_neutral_and_other_names_of_arguments() -> None:
    given = {**GREEDY, "inputs": PROMPT, "synced_gpus": False, "custom_generate": None}
    with stream(MODEL, None, **given) as steps:
        assert [*steps]
        outputs = (steps.output, generate(MODEL, None, **given))
    assert all(torch.equal(output.sequences, truth()) for output in outputs)


def test_a_streamer_is_refused_for_more_than_one_text() -> None:
    streamer = Recorder()
    with pytest.raises(ValueError, match="batch of 1"):
        generate(MODEL, None, random_prompt(4, batch_size=2), streamer=streamer, **GREEDY)
    several = {"num_return_sequences": 2, "max_new_tokens": 4, "do_sample": True}
    with pytest.raises(ValueError, match="batch of 1"):
        generate(MODEL, None, PROMPT, streamer=streamer, **several)
    assert streamer.tokens == []
