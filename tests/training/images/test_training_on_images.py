"""Heads train on conversations with images: rows, masks, features, whole runs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from heads import DraftHeads
from inference import Target, generate
from inference.targets.encoding import encode
from tests.tiny_multimodal import multimodal_target
from tests.training.images.seeing_targets import WORDS, save_seeing_target, write_squares
from tests.training.runner import Runner
from training.data.collation import ConversationCollator
from training.data.options import DataArguments
from training.data.training_sets import load_datasets
from training.images.processor import ImageCollator, open_image

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3")
LAYERS = (1, 2, 4)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seeing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """The folder of a target, and its processor."""
    return tmp_path / "target", save_seeing_target(tmp_path / "target", family, monkeypatch)


def load_rows(folder: Path, path: Path, **options: Any) -> Any:
    args = DataArguments(dataset=[str(path)], validation_fraction=0.0, **{"max_length": 128, **options})
    return load_datasets(args, AutoTokenizer.from_pretrained(folder), seed=0)[0]


def ask_processor(processor: Any, record: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """A record as a user of the processor reads it."""
    messages = []
    for turn in record["conversations"]:
        text = turn["value"].removeprefix("<image>\n")
        parts = [{"type": "image"}] * (text != turn["value"]) + [{"type": "text", "text": text}]
        messages.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": parts})
    text = processor.apply_chat_template(messages, tokenize=False)
    images = [open_image(str(folder / record["image"]))] if "image" in record else None
    return dict(processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))


def test_rows_masks_and_features_are_those_of_the_processor_and_the_model(
    family: str, seeing: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, processor = seeing
    path = write_squares(tmp_path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    rows = load_rows(folder, path)
    target = multimodal_target(family)
    batch = ImageCollator(ConversationCollator(pad_token_id=0), processor)([rows[number] for number in range(5)])
    encoded = encode(target, batch["input_ids"], batch["attention_mask"], feature_layers=LAYERS, media=batch["media"])
    for number, record in enumerate(records[:5]):
        inputs = ask_processor(processor, record, tmp_path)
        ids = inputs["input_ids"][0]
        assert rows[number]["input_ids"] == ids.tolist()
        learned = [ids[place] for place, is_learned in enumerate(rows[number]["loss_mask"]) if is_learned]
        replies = " <|end|> ".join(turn["value"] for turn in record["conversations"] if turn["from"] == "gpt")
        assert processor.tokenizer.decode(learned).split() == [*replies.split(), "<|end|>"]
        expected = target.model(**inputs, output_hidden_states=True, use_cache=False)
        wanted = torch.cat([expected.hidden_states[layer] for layer in LAYERS], dim=-1)[0]
        assert torch.allclose(encoded.features[number, : len(ids)], wanted, atol=1e-4)
        assert torch.allclose(encoded.last_hidden[number, : len(ids)], expected.hidden_states[-1][0], atol=1e-4)


def test_another_image_gives_other_features(family: str, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = seeing
    row = load_rows(folder, write_squares(tmp_path))[0]
    collate = ImageCollator(ConversationCollator(pad_token_id=0), processor)
    other = {**row, "media": [row["media"][0].replace("square0", "square6")]}  # of the same size
    one, two = (
        encode(multimodal_target(family), batch["input_ids"], batch["attention_mask"], media=batch["media"])
        for batch in (collate([row]), collate([other]))
    )
    assert not torch.allclose(one.last_hidden, two.last_hidden, atol=1e-2)


def run_on_squares(folder: Path, tmp_path: Path, **options: Any) -> dict[str, float]:
    run = Runner(folder, write_squares(tmp_path), tmp_path / "heads")
    return run(**{"max_steps": 3, "max_length": 128, "num_eval_prompts": 3, "head_overrides": None, **options})


def test_heads_train_and_draft_behind_an_image(family: str, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    folder, processor = seeing
    metrics = run_on_squares(folder, tmp_path, report=family == "llava", do_eval=True, eval_strategy="epoch")
    assert metrics["eval_acceptance_length"] >= 1
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": WORDS[7]}]}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [open_image(str(tmp_path / "square1.png"))]
    inputs = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
    heads = DraftHeads.from_pretrained(tmp_path / "heads")
    target = multimodal_target(family)
    options = {"max_new_tokens": 20, "do_sample": False}
    output = generate(target, heads, **inputs, **options)
    assert torch.equal(output.sequences, generate(target, None, **inputs, **options).sequences)
    if family == "llava":
        assert "<image>" in (tmp_path / "heads" / "report.html").read_text().replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle", "mtp", "block", "parallel"])
def test_every_kind_trains(kind: str, family: str, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    metrics = run_on_squares(seeing[0], tmp_path, head_type=kind, max_steps=2)
    assert metrics["eval_acceptance_length"] >= 1
