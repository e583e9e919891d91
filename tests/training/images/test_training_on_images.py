"""Heads train on conversations with images: rows, masks, features, whole runs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.inference import generate
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.training_sets import load_datasets
from draftsmith.training.features.encoding import encode
from draftsmith.training.images.processor import ImageCollator, open_image
from tests.tiny_multimodal import IMAGE, multimodal_target
from tests.training.images.seeing_targets import WORDS, save_seeing_target, write_squares
from tests.training.runner import Runner, extract, save_chat_target, write_conversations

FAMILIES = ("llava", "qwen2_5_vl", "gemma3")
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
    names = record.get("images") or [name for name in (record.get("image"),) if name]
    images = [open_image(str(folder / name)) for name in names] or None
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


def run_on_squares(folder: Path, tmp_path: Path, **options: Any) -> dict[str, float]:
    run = Runner(folder, write_squares(tmp_path), tmp_path / "heads")
    return run(**{"max_steps": 3, "max_length": 128, "num_eval_prompts": 3, "head_overrides": None, **options})


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_heads_train_and_draft_behind_an_image(
    kind: str, family: str, seeing: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, processor = seeing
    metrics = run_on_squares(folder, tmp_path, head_type=kind, do_eval=True, eval_strategy="epoch")
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


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava"], indirect=True)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_a_target_that_is_trained_too(family: str, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    metrics = run_on_squares(seeing[0], tmp_path, lora_r=2, dataloader_num_workers=1, max_steps=2)
    assert metrics["eval_target_loss"] > 0


only_llava = pytest.mark.parametrize("family", ["llava"], indirect=True)


@only_llava
@pytest.mark.usefixtures("family")
class TestSets:
    def test_text_and_images_mix(self, seeing: tuple[Path, Any], tmp_path: Path) -> None:
        text, other = (write_conversations(tmp_path / f"{seed}.jsonl", words=WORDS[:60], seed=seed) for seed in (1, 2))
        squares = write_squares(tmp_path)
        args = DataArguments(dataset=[str(squares), str(text)], eval_dataset=[str(other)], max_length=128)
        rows, held_out = load_datasets(args, AutoTokenizer.from_pretrained(seeing[0]), seed=0)
        batch = ImageCollator(ConversationCollator(pad_token_id=0), seeing[1])([rows[n] for n in range(-4, 4)])
        assert 0 < len(batch["media"]["pixel_values"]) < 8
        assert not any(held_out.with_format(None)[:].get("media", []))

    def test_images_are_not_cut(self, seeing: tuple[Path, Any], tmp_path: Path) -> None:
        rows = load_rows(seeing[0], write_squares(tmp_path), max_length=20)
        assert all(IMAGE not in row["input_ids"] or row["input_ids"].count(IMAGE) == 16 for row in rows)
        with pytest.raises(ValueError, match=r"images end after max_length=10"):
            load_rows(seeing[0], write_squares(tmp_path, count=3), max_length=10)

    def test_missing_images(self, seeing: tuple[Path, Any], tmp_path: Path, caplog: Any) -> None:
        path = write_squares(tmp_path)
        (tmp_path / "square5.png").unlink()
        (tmp_path / "square6.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"square5.png does not exist: .*--skip_bad_lines"):
            load_rows(seeing[0], path)
        assert len(load_rows(seeing[0], path, skip_bad_lines=True)) == 10
        assert "dropped 2 of 12 conversations: an image cannot be read" in caplog.text

    def test_options_that_do_not_go_with_images(self, seeing: tuple[Path, Any], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"have images: leave packing out .*; leave features out"):
            run_on_squares(seeing[0], tmp_path, packing=True, features=tmp_path / "features")
        with pytest.raises(ValueError, match=r"got streaming, .* has images"):
            run_on_squares(seeing[0], tmp_path, streaming=True, validation_fraction=0, num_eval_prompts=0)
        options = {"target": seeing[0], "dataset": write_squares(tmp_path), "output_dir": tmp_path / "features"}
        with pytest.raises(ValueError, match="images, whose states"):
            extract(**options, head_type="eagle3")

    def test_targets_that_read_text_only(self, tmp_path: Path, seeing: tuple[Path, Any]) -> None:
        folder = save_chat_target(tmp_path / "text")
        with pytest.raises(ValueError, match=r"have images, and the target .* reads text only"):
            load_rows(folder, write_squares(tmp_path))
