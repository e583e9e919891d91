"""Tiny targets that see, each saved with a processor, and conversations about squares of one colour."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from draftsmith.training.data import chat_tokens
from draftsmith.training.run import preparation
from tests.tiny_multimodal import END, IMAGE, START, VIDEO, tiny_multimodal
from tests.tiny_targets import VOCAB_SIZE

# The tokens of images stand where the configurations of `tests.tiny_multimodal` have them.
_PLACEHOLDERS = {"gemma3": "<image_soft_token>", "llava": "<image>", "qwen2_5_vl": "<|image_pad|>"}
_MARKS = {"gemma3": "<start_of_image>", "llava": "<image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {% for part in m.content %}{% if part.type == 'image' %}MARK"
    "{% else %}{{ part.text }}{% endif %}{% endfor %} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
_ROLES = ("<|user|>", "<|assistant|>", "<|end|>")
WORDS = [f"word{number}" for number in range(4, IMAGE)]
COLOURS = ((250, 10, 10), (10, 240, 20), (20, 20, 230), (240, 230, 10))


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", *_ROLES, *WORDS])}
    is_qwen = family == "qwen2_5_vl"
    starts = ("<|vision_start|>", "<|vision_end|>") if is_qwen else ("<start_of_image>", "<end_of_image>")
    media = {_PLACEHOLDERS[family]: IMAGE, "<|video_pad|>": VIDEO}
    media |= {starts[0]: START, starts[1]: END}
    vocabulary |= media
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), VOCAB_SIZE)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    names = {"boi_token": starts[0], "eoi_token": starts[1], "image_token": _PLACEHOLDERS["gemma3"]}
    named = {"extra_special_tokens": names} if family == "gemma3" else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>", **named)
    tokenizer.add_tokens([*_ROLES, *media], special_tokens=True)
    return tokenizer


def _image_processor(name: str, **options: Any) -> Any:
    try:
        return getattr(transformers, name)(**options)
    except (AttributeError, ImportError):
        pytest.skip(f"this transformers has no {name} that works without torchvision")


def make_processor(family: str) -> Any:
    """The family's processor, without torchvision."""
    tokenizer = make_tokenizer(family)
    square = {"height": 16, "width": 16}
    if family == "llava":
        images = _image_processor("CLIPImageProcessorPil", size={"shortest_edge": 16}, crop_size=square)
        options: dict[str, Any] = {"patch_size": 4, "vision_feature_select_strategy": "default"}
        processor: Any = transformers.LlavaProcessor(images, tokenizer, num_additional_image_tokens=1, **options)
    elif family == "gemma3":
        images = _image_processor("Gemma3ImageProcessorPil", size=square)
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    else:
        images = _image_processor(
            "Qwen2VLImageProcessorPil",
            patch_size=4,
            merge_size=2,
            temporal_patch_size=2,
            min_pixels=64,
            max_pixels=1024,
        )

        class WithoutVideos(transformers.Qwen2_5_VLProcessor):
            """Its processor of videos needs torchvision."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                return type(argument)

        processor = WithoutVideos(images, tokenizer)
    processor.chat_template = _TEMPLATE.replace("MARK", _MARKS[family])
    return processor


def save_seeing_target(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves a tiny target with its processor; returns the processor."""
    processor = make_processor(family)
    tiny_multimodal(family).save_pretrained(folder)
    if family == "qwen2_5_vl":
        processor.tokenizer.save_pretrained(folder)
        load: Callable[[str], Any] = lambda name: processor  # noqa: E731
        monkeypatch.setattr(chat_tokens, "load_processor", load)
        monkeypatch.setattr(preparation, "load_processor", load)
    else:
        processor.save_pretrained(folder)
    return processor


def write_squares(folder: Path, *, count: int = 12) -> Path:
    """LLaVA's records about squares, their answers named by the colour. Every fourth has no image, every fourth two."""
    lines = []
    for number in range(count):
        colour = number % len(COLOURS)
        path = folder / f"square{colour}.png"
        Image.new("RGB", (16 + 8 * (number % 3), 16), COLOURS[colour]).save(path.with_stem(f"square{number}"))
        question, answer = f"{WORDS[number]} {WORDS[9]}", " ".join(WORDS[20 + 5 * colour + step] for step in range(5))
        record: dict[str, Any] = {"image": f"square{number}.png"} if number % 4 != 3 else {}
        turns = [f"<image>\n{question}" if record else question, answer, WORDS[40], answer]
        if number % 4 == 1:
            record = {"images": [f"square{number}.png", "square0.png"]}
            turns[2] = f"<image>\n{turns[2]}"
        names = ("human", "gpt") * 2
        record["conversations"] = [{"from": name, "value": turn} for name, turn in zip(names, turns, strict=True)]
        lines.append(json.dumps(record))
    path = folder / "squares.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path
