"""Heads that learn while they draft: the text stays, the weights get better, and a folder keeps them."""

import copy
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.learning import MAX_TOKENS, SeenText, TextStates
from draftsmith.inference.runners.compiled import Compiler
from draftsmith.training.features.sources import OnlineFeatures
from draftsmith.training.learning.buffer import TextBuffer, join_texts
from draftsmith.training.learning.learner import MOST_PROMPT, OnlineLearner
from draftsmith.training.learning.trial import measure_acceptance
from tests.tiny_targets import pad_prompts, tiny_target

PROMPTS = [[5, 9, 2, 7], [3, 3, 8], [11, 4, 6, 2, 9, 1]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.of(tiny_target("llama", num_hidden_layers=2))


def make(kind: str, target: Target) -> DraftHeads:
    torch.manual_seed(0)
    heads = create_heads(kind, target)
    if heads.wants_token_counts:
        heads.fit_vocabulary(torch.arange(target.vocab_size, 0, -1))
    return heads


def decode(decoder: Decoder, prompt: list[int], **options: Any) -> list[int]:
    output = decoder.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=True, seed=len(prompt), **options)
    return output.sequences[0].tolist()


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "kangaroo"])
def test_states_of_decoding_are_those_of_a_pass_over_the_text(kind: str, target: Target) -> None:
    """Whatever is drafted and accepted, in a batch with rows of their own lengths."""
    heads, seen = make(kind, target), list[SeenText]()
    learner = OnlineLearner(target, heads)
    learner.see = seen.append
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    inputs, width = pad_prompts([torch.tensor([prompt]) for prompt in PROMPTS]), max(map(len, PROMPTS))
    texts = decoder.generate(**inputs, max_new_tokens=24, do_sample=True, seed=3).sequences
    wanted = {tuple(row[width - len(prompt) :].tolist()) for row, prompt in zip(texts, PROMPTS, strict=True)}
    assert {tuple(text.token_ids) for text in seen} == wanted
    for text in seen:
        batch = {"input_ids": torch.tensor([text.token_ids]), "attention_mask": torch.ones(1, len(text.token_ids))}
        states = OnlineFeatures(target, heads.feature_layers)(batch)
        size = len(text.features)
        assert len(text.token_ids) - 1 <= size <= len(text.token_ids)
        torch.testing.assert_close(text.features, states.features[0, :size], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(text.last_hidden, states.last_hidden[0, :size], rtol=1e-2, atol=1e-3)
        assert text.token_ids[: text.num_prompt] in PROMPTS


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "block"])
def test_learning_improves_the_heads_and_never_changes_the_text(kind: str, target: Target) -> None:
    """Of heads that draft level by level, all depths at once, path by path, and blocks. Weights change in the middle of
    streams, too."""
    heads = make(kind, target)
    learner = OnlineLearner(target, heads, muon_learning_rate=0.05, learning_rate=3e-3, tokens_per_step=128)
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    options = {"max_new_tokens": 24, "do_sample": False}
    wanted = [Decoder(target).generate(torch.tensor([prompt]), **options).sequences[0].tolist() for prompt in PROMPTS]
    for number in range(14):
        prompt = PROMPTS[number % 3]
        text = list(prompt)
        for tokens in decoder.stream(torch.tensor([prompt]), **options):
            text += tokens
            learner.swap()
            if number >= 8 and len(text) == len(prompt) + 4:
                learner.learn(5)
                learner.compare()
        assert text == wanted[number % 3]
    assert any(trial.is_swapped for trial in learner.progress.trials)
    assert all(trial.after > trial.before for trial in learner.progress.trials if trial.is_swapped)


@pytest.mark.parametrize("kind", ["mtp", "medusa", "eagle3", "eagle3-limited"])
def test_the_draft_vocabulary_follows_the_texts(kind: str, target: Target, tmp_path: Path) -> None:
    """To tokens that the texts have and the training data had not, in the middle of a stream; heads from the folder
    draft them, too."""
    everything, size = torch.arange(target.vocab_size, 0, -1), 24
    torch.manual_seed(0)
    if kind == "eagle3":
        heads = create_heads("eagle3", target, draft_vocab_size=size)
        heads.fit_vocabulary(everything)
        heads.token_counts = None  # not known of imported heads
    elif kind == "eagle3-limited":
        heads = create_heads("eagle3", target, draft_vocab_size=40)
        heads.fit_vocabulary(everything)
        heads.limit_vocabulary(size)
    else:
        heads = create_heads(kind, target)
        heads.limit_vocabulary(size, everything)
    folder = tmp_path / "learned"
    learner = OnlineLearner(target, heads, folder=folder, muon_learning_rate=0.05, learning_rate=3e-3)
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    high = torch.zeros(target.vocab_size).index_fill(0, torch.arange(target.vocab_size - 12, target.vocab_size), 20.0)

    class Biased(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + high

    def texts_of(of: Decoder) -> list[list[int]]:
        processors = LogitsProcessorList([Biased()])
        options = {"max_new_tokens": 24, "logits_processor": processors, "do_sample": True}
        return [of.generate(torch.tensor([p]), seed=p[0], **options).sequences[0].tolist() for p in PROMPTS]

    wanted = texts_of(Decoder(target))
    assert texts_of(decoder) == wanted
    used = {token for text, prompt in zip(wanted, PROMPTS, strict=True) for token in text[len(prompt) :]}
    assert not used & {*heads.find_drafted(target).tolist()}
    learner._next_look = 0
    learner.work()
    learner.learn(10)
    stream = decoder.stream(torch.tensor([PROMPTS[0]]), max_new_tokens=24, do_sample=False)
    text = next(stream)
    learner._in_use = learner._student.copy_weights()
    learner._better.append(learner._in_use)
    learner.swap()
    text += [token for tokens in stream for token in tokens]
    plain = Decoder(target).generate(torch.tensor([PROMPTS[0]]), max_new_tokens=24, do_sample=False)
    assert text == plain.sequences[0, len(PROMPTS[0]) :].tolist()
    assert used <= {*decoder.drafter.draft_token_ids.tolist()}
    assert decoder.drafter.draft_token_ids.numel() == size
    assert texts_of(decoder) == wanted
    learner.save()
    loaded = DraftHeads.from_pretrained(folder / "heads")
    if "limited" in kind or not kind.startswith("eagle3"):
        loaded.limit_vocabulary(size)
    fresh = Decoder(target, loaded, tree="chain:2")
    assert torch.equal(fresh.drafter.draft_token_ids, decoder.drafter.draft_token_ids)
    for name, tensor in fresh.drafter.state_dict().items():
        assert torch.equal(tensor, decoder.drafter.state_dict()[name]), name


def test_of_a_prompt_the_end_is_kept(target: Target) -> None:
    """Its states, too, without the memory of those that are left out."""
    learner = OnlineLearner(target, make("eagle3", target))
    size = MOST_PROMPT + 36
    features, last = torch.randn(size + 3, 3 * target.hidden_size), torch.randn(size + 3, target.hidden_size)
    learner.see(SeenText([*range(size), 1, 2, 3], size, features, last))
    (text,) = learner.buffer.sample(1)
    assert (text.token_ids, text.num_prompt) == ([*range(36, size), 1, 2, 3], MOST_PROMPT)
    for kept, given in ((text.features, features), (text.last_hidden, last)):
        torch.testing.assert_close(kept, given[36:])
        assert kept.untyped_storage().nbytes() == kept.nbytes


@pytest.mark.parametrize(("kind", "is_fast"), [("kangaroo", True), ("dflash2", False)])
def test_with_a_target_in_bfloat16_the_learned_weights_are_float32(
    kind: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether this CPU has instructions for bfloat16 or not."""
    monkeypatch.setattr("draftsmith.training.learning.learner.has_fast_bfloat16", lambda: is_fast)
    target = Target.of(tiny_target("llama", num_hidden_layers=2).to(torch.bfloat16))
    heads = make(kind, target).to(torch.bfloat16)
    learner = OnlineLearner(target, heads)
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    for number in range(8):
        decode(decoder, PROMPTS[0] + [number])
    assert learner.learn() > 0
    assert learner.compare() is not None
    assert {parameter.dtype for parameter in learner._student.parameters()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "is_packed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_decoders_draft_with_the_new_weights(dtype: torch.dtype, is_packed: bool) -> None:
    """Also those that draft with copies: of another dtype, of some columns, with packed weights."""
    model = tiny_target("llama").to(dtype)
    target, decoding = Target.of(model), Target.of(model)
    if is_packed:
        try:
            decoding = decoding.with_packed_weights()
        except ValueError:
            pytest.skip("this CPU packs no weights of this dtype")
    heads = make("mtp", target)
    heads.limit_vocabulary(32, torch.arange(target.vocab_size, 0, -1))
    decoder = Decoder(decoding, heads, tree="chain:2")
    torch.manual_seed(1)
    others = create_heads("mtp", target)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    others.limit_vocabulary(32, torch.arange(target.vocab_size))
    again = Decoder(decoding, decoder.drafter, tree="chain:2")  # a view of a view
    heads.write_weights(others.copy_weights())  # and other tokens to draft
    ids = torch.tensor([PROMPTS[0]])
    assert again.drafter is not None
    assert again.generate(ids, max_new_tokens=16, seed=0).stats.accepted_histogram
    wanted = Decoder(decoding, others, tree="chain:2").generate(ids, max_new_tokens=16, seed=0).stats
    found = decoder.generate(ids, max_new_tokens=16, seed=0).stats
    assert found.accepted_histogram == wanted.accepted_histogram
    state = decoder.drafter.state_dict()
    for name, tensor in Decoder(decoding, others, tree="chain:2").drafter.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.ci
@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_steps_read_the_new_weights(
    target: Target, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_drafting(compiler: Compiler, function: Any, *, drafts: bool = False, **options: Any) -> Any:
        return compile_all(compiler, function, drafts=True, **options) if drafts else function

    compile_all = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", compile_drafting)  # the target's graphs would take most of the time
    heads = make("medusa", target)
    decoder = Decoder(target, heads, tree="chain:1", compile=True, learner=OnlineLearner(target, heads))
    eager = Decoder(target, heads, tree="chain:1")
    ids = torch.tensor([PROMPTS[0]])

    def find_drafts(of: Decoder) -> list[int]:
        drafted = []
        verify = of.step.runner.verify

        def spy(step: Any, cache: Any, tree: Any) -> Any:
            drafted.append(tree.token_ids[0, 1:].tolist())
            return verify(step, cache, tree)

        monkeypatch.setattr(of.step, "runner", dataclasses.replace(of.step.runner, verify=spy))
        of.generate(ids, max_new_tokens=12, do_sample=False)
        return [tokens for tokens in drafted if tokens]

    before = find_drafts(decoder)
    assert before == find_drafts(eager)
    right = copy.deepcopy(heads)
    for parameter in right.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    heads.write_weights(dict(right.named_parameters()))
    after = find_drafts(decoder)
    assert after == find_drafts(eager)
    assert after != before
    assert "could not compile" not in caplog.text


def test_writing_refuses_weights_of_other_heads(target: Target) -> None:
    heads = make("mtp", target)
    weights = dict(heads.named_parameters())
    weights.pop(next(iter(weights)))
    with pytest.raises(ValueError, match="mtp heads, with other names"):
        heads.write_weights(weights)


def test_a_folder_keeps_what_was_learned(target: Target, tmp_path: Path) -> None:
    heads = make("mtp", target)
    learner = OnlineLearner(target, heads, folder=tmp_path / "learned", muon_learning_rate=0.05)
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    for number in range(8):
        decode(decoder, PROMPTS[0] + [number])
    learner.learn(6)
    assert learner.compare() is not None
    learner.swap()
    learner.save()
    again = make("mtp", target)
    other = OnlineLearner(target, again, folder=tmp_path / "learned")
    assert other.progress == learner.progress
    for name, parameter in heads.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])
    for part in ("state", "param_groups"):
        assert other._optimizer.state_dict()[part].__len__() == learner._optimizer.state_dict()[part].__len__()
    loaded = DraftHeads.from_pretrained(tmp_path / "learned" / "heads")
    assert decode(Decoder(target, loaded), PROMPTS[1]) == decode(Decoder(target), PROMPTS[1])
    assert not any(b"token_ids" in file.read_bytes() for file in (tmp_path / "learned").glob("*.safetensors"))


def test_folders_of_others_are_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"other files and no learner\.safetensors"):
        OnlineLearner(target, make("mtp", target), folder=tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        OnlineLearner(target, make("mtp", target), folder=tmp_path / "file")
    (tmp_path / "mtp").mkdir()
    left = tmp_path / "mtp" / ".learner.safetensors.7.tmp"  # by a process that was killed
    left.write_bytes(b"half")
    OnlineLearner(target, make("mtp", target), folder=tmp_path / "mtp").save()
    assert not left.exists()
    others = make("mtp", target)
    with torch.no_grad():
        next(others.parameters()).add_(1.0)
    for heads in (make("medusa", target), others):
        with pytest.raises(ValueError, match="what other heads than these"):
            OnlineLearner(target, heads, folder=tmp_path / "mtp")
    (tmp_path / "mtp" / "learner.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="is damaged"):
        OnlineLearner(target, make("mtp", target), folder=tmp_path / "mtp")


def test_decoding_goes_on_when_a_learner_fails(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    heads = make("mtp", target)
    learner = OnlineLearner(target, heads)
    learner.buffer = None
    text = decode(Decoder(target, heads, learner=learner), PROMPTS[0])
    assert text == decode(Decoder(target), PROMPTS[0])
    assert "could not take a text" in caplog.text


def test_the_first_weights_come_back_when_they_are_better(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make("mtp", target)
    first = {name: parameter.clone() for name, parameter in heads.named_parameters()}
    learner = OnlineLearner(target, heads)
    decoder = Decoder(target, heads, learner=learner)
    for number in range(8):
        decode(decoder, PROMPTS[0] + [number])
    lengths = iter([1.0, 1.2, 1.0, 1.1, 1.15, 1.3])  # in use, learned, first; twice
    monkeypatch.setattr(learner, "_measure", lambda batch, weights: next(lengths))
    learner.learn(2)
    assert learner.compare().is_swapped
    learner.swap()
    assert any(not torch.equal(parameter, first[name]) for name, parameter in heads.named_parameters())
    learner.learn(2)
    trial = learner.compare()
    assert trial.is_undone
    assert trial.length == 1.3
    learner.swap()
    for weights in (dict(heads.named_parameters()), dict(learner._student.named_parameters())):
        assert all(torch.equal(weights[name], tensor) for name, tensor in first.items())
    assert learner.progress.num_swaps == 2


def test_an_idle_learner_comes_to_rest(target: Target) -> None:
    heads = make("medusa", target)
    with OnlineLearner(target, heads, tokens_per_step=32) as learner:
        decode(Decoder(target, heads, learner=learner), PROMPTS[0])
        end = time.monotonic() + 60
        while learner.has_work or not learner.num_learned:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.2)
        learned = learner.num_learned
        time.sleep(0.3)
        assert learner.num_learned == learned


def test_a_thread_learns_beside_decoding(target: Target) -> None:
    heads = make("mtp", target)
    with OnlineLearner(target, heads, share=0.5, trial_seconds=0.0, tokens_per_step=64) as learner:
        decoder, plain = Decoder(target, heads, learner=learner, tree="chain:2"), Decoder(target)
        for number in range(200):
            prompt = PROMPTS[number % 3] + [number % 50]
            assert decode(decoder, prompt) == decode(plain, prompt)
            if learner.progress.trials:
                break
        assert learner.progress.trials
    assert learner.progress.num_learned > 0


def test_learners_fit_their_decoder(target: Target) -> None:
    learner = OnlineLearner(target, make("mtp", target))
    with pytest.raises(ValueError, match="give the heads that learn"):
        Decoder(target, make("eagle3", target), learner=learner)
    with pytest.raises(ValueError, match="only with exact acceptance"):
        Decoder(target, make("mtp", target), learner=learner, acceptance="rejection", tree="chain:2")
    for option, value in (("share", 0.0), ("num_bytes", 0), ("tokens_per_step", 0), ("trial_seconds", -1.0)):
        with pytest.raises(ValueError, match=f"got {option} {value}"):
            OnlineLearner(target, make("mtp", target), **{option: value})
    learner.start()
    with pytest.raises(RuntimeError, match="has been started"):
        learner.start()
    learner.stop()


def text_of(size: int, *, prompt: int = 2) -> SeenText:
    states = torch.zeros(size, 4)
    return SeenText([*range(size)], prompt, states, states)


def test_the_buffer_keeps_to_its_memory_and_holds_texts_back() -> None:
    buffer = TextBuffer(40_000)
    for _ in range(800):
        buffer.add(text_of(10))
    per_text = 10 * 4 * 4
    assert buffer.num_texts == 800
    assert buffer.num_trainable * per_text <= 40_000
    assert buffer.num_trainable * per_text > 25_000
    held, trained = buffer.held_back(10**6), buffer.sample(10**5)
    assert not {id(text) for text in held} & {id(text) for text in trained}
    assert len(held) * per_text <= 40_000 / 8


def test_a_batch_learns_replies_only() -> None:
    texts = [text_of(5), dataclasses.replace(text_of(4, prompt=0), features=torch.ones(3, 4))]
    batch = join_texts(texts, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0, 1, 1, 1]]
    assert batch.document_ids.tolist() == [[0] * 5 + [1] * 4]
    assert batch.features[0, :, 0].tolist() == [0] * 5 + [1, 1, 1, 0]


def test_acceptance_is_that_of_greedy_chains(target: Target) -> None:
    """On the target's own greedy texts the measured length is what a decoder has that begins at every slot."""
    heads, seen = make("mtp", target), list[SeenText]()
    learner = OnlineLearner(target, heads, muon_learning_rate=0.05, learning_rate=3e-3)
    learner.see = lambda text: (seen.append(text), learner.buffer.add(text))
    decoder = Decoder(target, heads, learner=learner, tree="chain:2")
    for prompt in PROMPTS:
        decoder.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    learner.learn(20)
    heads.write_weights({name: value.detach() for name, value in learner._student.named_parameters()})
    # A decoder's first token is the target's own: chains begin behind it.
    texts = [dataclasses.replace(text, num_prompt=text.num_prompt + 1) for text in seen]
    batch = join_texts(texts, target.device)
    steps = learner._forward(batch, None)[:2]
    measured = measure_acceptance(steps, batch, heads.draft_token_ids, serves_all_depths=False)
    lengths = []
    for text in seen:
        for size in range(text.num_prompt, len(text.token_ids) - 1):
            stream = Decoder(target, heads, tree="chain:2").stream(
                torch.tensor([text.token_ids[:size]]),
                torch.ones(1, size, dtype=torch.long),
                max_new_tokens=4,
                do_sample=False,
            )
            drafted = [tokens.num_drafted for tokens in stream]
            lengths.append(1 + min(drafted[1], len(text.token_ids) - 1 - size))
    assert measured > 1.2
    assert measured == pytest.approx(sum(lengths) / len(lengths))


def test_of_a_long_text_the_end_keeps_its_states() -> None:
    seen = list[SeenText]()
    states = TextStates(seen.append)
    parts = [500] * 3 + [1] * 1500
    for start, size in zip(itertools.accumulate([0, *parts]), parts, strict=False):
        states.add(start, torch.full((size, 2), float(start)), torch.zeros(size, 2))
    states.finish([*range(sum(parts) + 1)], 1000)
    (text,) = seen
    assert MAX_TOKENS <= len(text.features) < MAX_TOKENS + 500
    assert text.token_ids == [*range(sum(parts) - len(text.features), sum(parts) + 1)]
    assert text.num_prompt == max(0, 1000 - text.token_ids[0])
    assert text.features[-1, 0] == sum(parts) - 1
