"""`draftsmith diagnose` with planted faults: each is found, and named first. Without one, nothing is reported."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.inference import Decoder, Target
from draftsmith.inference.request.chat_template import render_probe
from draftsmith.scripts import diagnose as program
from draftsmith.scripts.conversion.conventions import compare_conventions, find_better
from draftsmith.scripts.diagnosis import evidence as gathering
from draftsmith.scripts.diagnosis.checks import Case, check_paths, find_faults
from draftsmith.scripts.diagnosis.evidence import Evidence
from draftsmith.scripts.diagnosis.speed import Speed
from draftsmith.scripts.diagnosis.training_data import read_data
from draftsmith.scripts.shared.model_loading import encode_messages, load_heads
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.training.conversation_cases import write

HEADS = REPOSITORY / "examples" / "heads"
QUESTIONS = (
    "What are the benefits of exercise?",
    "Write a story about a dog.",
    "How does a rainbow form?",
    "Tell me about the sea.",
)
TOKENS = 3_023_804


@pytest.fixture(scope="module")
def replies(chat_target: Any, chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations whose replies the target wrote, at T = 1."""
    decoder, lines = Decoder(Target.of(chat_target), None), []
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        prompt = encode_messages(chat_tokenizer, messages)
        output = decoder.generate(prompt, do_sample=True, temperature=1.0, top_k=0, seed=number, max_new_tokens=48)
        reply = chat_tokenizer.decode(output.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
        lines.append({"messages": [*messages, {"role": "assistant", "content": reply}]})
    return Path(write(tmp_path_factory.mktemp("replies") / "replies.jsonl", lines))


def change(path: Path, edit: Callable[[list[dict[str, Any]]], None]) -> str:
    """The conversations of a file with the same change in each."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        edit(line["messages"])
    return write(path.with_name("changed.jsonl"), lines)


Plant = Callable[..., Path]


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Plant:
    """Copies heads with changes of their config, their tensors and their record."""

    def copy_heads(kind: str, record: dict[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp("planted") / kind
        shutil.copytree(HEADS / kind, folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **config}))
        own = {"training": {"tokens": TOKENS}, "chat_format": render_probe(chat_tokenizer), **(record or {})}
        (folder / "training_record.json").write_text(json.dumps(own))
        return folder

    return copy_heads


def _add_pirate(messages: list[dict[str, Any]]) -> None:
    messages.insert(0, {"role": "system", "content": "You are a pirate."})


def _turn_words(messages: list[dict[str, Any]]) -> None:
    messages[1].update(content=" ".join(messages[1]["content"].split()[::-1]))


def examine(heads: Path, dataset: Path, **options: Any) -> Case:
    settings = {"dtype": "float32", "speed": False, "max_new_tokens": 32, "num_prompts": 2, **options}
    args = program.DiagnoseArguments(target=str(CHAT_TARGET), heads=str(heads), dataset=[str(dataset)], **settings)
    return program.examine(args)[0]


def faults_of(case: Case) -> list[str]:
    return [finding.fault for finding in find_faults(case)]


@pytest.fixture(autouse=True, scope="module")
def _targets_are_shared(chat_target: Any, chat_tokenizer: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "load_target", lambda *args, **options: (Target.of(chat_target), chat_tokenizer))
        yield


@pytest.fixture(scope="module")
def healthy(plant: Plant, replies: Path) -> Case:
    """Heads without a fault, on the prompts of the replies."""
    return examine(plant("mtp"), replies, prompts=str(replies))


def test_nothing_is_reported_of_heads_without_a_fault(healthy: Case) -> None:
    assert faults_of(healthy) == []


@pytest.mark.slow
def test_nothing_is_reported_of_other_heads(plant: Plant, replies: Path) -> None:
    assert faults_of(examine(plant("eagle3"), replies)) == []


def test_shifted_feature_layers(plant: Plant, replies: Path) -> None:
    layers = json.loads((HEADS / "eagle3" / "config.json").read_text())["feature_layers"]
    shifted = [layer + 1 for layer in layers]
    first = faults_of(examine(plant("eagle3", feature_layers=shifted), replies, num_prompts=4))[0]
    assert first == f"A setting is wrong: the heads fit better where feature layers are {layers}"


@pytest.mark.parametrize(
    ("config", "better"),
    [
        ({"norm_output": True}, "norm_output is false"),
        ({"norm_before_residual": True}, "norm_before_residual is false"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}, "positions rotate as in the target"),
    ],
    ids=["a norm too many", "a norm at another place", "positions of another model"],
)
def test_other_wrong_settings(
    config: dict[str, Any], better: str, plant: Plant, replies: Path, chat_target: Any, chat_tokenizer: Any
) -> None:
    target = Target.of(chat_target)
    texts = [
        chat_tokenizer.apply_chat_template(json.loads(line)["messages"], return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        for line in replies.read_text(encoding="utf-8").splitlines()
    ]
    heads = load_heads(str(plant("eagle3", **config)), target)
    found = find_better(compare_conventions(heads, target, texts, [text.shape[1] - 30 for text in texts]))
    assert found.name == better


def test_heads_of_a_sister_model(plant: Plant, replies: Path) -> None:
    """Its states have the same shape, and their numbers mean something else."""
    folder = plant("mtp")
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    name = next(name for name, tensor in tensors.items() if tensor.shape == (256, 512))
    tensors[name] = torch.cat([tensors[name][:, order], tensors[name][:, 256 + order]], dim=1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert faults_of(examine(folder, replies))[0] == "The heads do not know this target's states"


def test_untrained_depths(plant: Plant, replies: Path) -> None:
    """The second of Medusa's heads knows nothing."""
    folder = plant("medusa")
    tensors = load_file(folder / "model.safetensors")
    tensors["heads.1.lm_head.weight"] = tensors["heads.1.lm_head.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert faults_of(examine(folder, replies, num_prompts=4, max_new_tokens=96))[0] == "Depth 2 was not trained"


def test_a_vocabulary_of_other_data(plant: Plant, replies: Path) -> None:
    other = change(replies, lambda messages: messages[1].update(content="0123 4567 " * 30))
    found = examine(plant("mtp"), replies, draft_vocab_size=512, draft_vocab_data=[other])
    assert faults_of(found)[0] == "The draft vocabulary lacks tokens that the target writes"


@pytest.mark.parametrize(
    ("record", "edit", "fault"),
    [
        (
            {"chat_format": "<|user|>A<|assistant|>B<|user|>C<|assistant|>"},
            None,
            "Prompts are written in another chat format than in training",
        ),
        ({}, _add_pirate, "The training conversations have another system prompt"),
        ({}, _turn_words, "Someone else wrote the training replies"),
        ({"training": {"tokens": TOKENS // 2}}, None, "The heads have seen few tokens"),
    ],
    ids=["template", "system prompt", "author", "tokens"],
)
def test_faults_that_change_no_draft(
    record: dict[str, Any],
    edit: Callable[[list[dict[str, Any]]], None] | None,
    fault: str,
    healthy: Case,
    replies: Path,
    chat_target: Any,
    chat_tokenizer: Any,
) -> None:
    case = replace(healthy, record=healthy.record | record)
    if edit is not None:
        data = read_data([change(replies, edit)], Target.of(chat_target), chat_tokenizer, max_length=2048)
        case = replace(case, data=data)
    assert faults_of(case) == [fault]


def test_a_decoder_that_drafts_otherwise(healthy: Case) -> None:
    """The training forward of heads whose steps are one token off."""
    texts = [replace(text, hits=text.hits.roll(1, dims=1)) for text in healthy.evidence.texts]
    case = replace(healthy, evidence=replace(healthy.evidence, texts=texts))
    assert faults_of(case)[0] == "Training and decoding draft different tokens"


def test_a_slow_machine_and_the_page(
    plant: Plant, replies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record beside the heads is read, too."""
    monkeypatch.setattr(program, "measure_speed", lambda *args, **options: Speed(0.9, [(2, 1.5)], "chain:4", 0.7))
    page, heads = tmp_path / "page.html", plant("mtp", {"training": {"tokens": TOKENS // 2}})
    options = ["--heads", str(heads), "--dataset", str(replies), "--html", str(page), "--num_prompts", "2"]
    program.main(["--target", str(CHAT_TARGET), "--max_new_tokens", "24", *options])
    shown = capsys.readouterr().out
    for text in (shown, page.read_text(encoding="utf-8")):
        assert "1. The heads have seen few tokens" in text
        assert "2. The tree chain:4 does not fit this machine" in text
        assert "3. Drafting gains nothing on this machine" in text
        assert "2 nodes 1.50" in text


@pytest.mark.parametrize(("same", "is_fault"), [(32, True), (33, False)])
def test_agreement_may_be_low_by_chance(same: int, *, is_fault: bool) -> None:
    """Of 40 steps, 0.9 less two standard errors are 32.2."""
    case = SimpleNamespace(evidence=SimpleNamespace(agreement=(same / 40, 40)))
    assert bool(list(check_paths(case))) == is_fault


@pytest.mark.parametrize(("seconds", "number"), [(0.5, 16), (6.0, 5), (60.0, 4)])
def test_prompts_that_two_minutes_allow(seconds: float, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    args = program.DiagnoseArguments(target="T", heads="H")
    assert program._choose_number(args, seconds, num_prompts=16) == number
    assert f"{number} prompts of up to 96 tokens: about" in capsys.readouterr().err
    args.num_prompts = 12
    assert program._choose_number(args, seconds, num_prompts=12) == 12


def test_texts_decoded_together_are_those_decoded_alone(
    chat_target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.of(chat_target)
    heads = load_heads(str(HEADS / "mtp"), target).for_target(target)
    prompts = [encode_messages(chat_tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    alone, together = (
        _gather(steps, target, heads, prompts, monkeypatch)
        for steps in (10_000, 1)  # the first prompt alone, then two rows, then one
    )
    assert [text.ids.tolist() for text in alone.texts] == [text.ids.tolist() for text in together.texts]
    assert [bool(text.accepted) for text in together.texts] == [True, False, False, False]
    assert alone.greedy.accepted_histogram == together.greedy.accepted_histogram
    assert alone.sampled.accepted_histogram == together.sampled.accepted_histogram


def _gather(steps: int, target: Any, heads: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    monkeypatch.setattr(gathering, "STEPS_ALONE", steps)
    monkeypatch.setattr(gathering, "ROWS", 2)
    return gathering.gather_evidence(
        target, heads, prompts, max_new_tokens=12, choose_number=lambda seconds: len(prompts)
    )


def test_evidence_without_texts_has_no_agreement() -> None:
    assert Evidence(4, [], None, None, torch.zeros(0), 1.0).agreement == (0.0, 0)
