"""The target's processor: makes a placeholder token for each part of an image, and the model's inputs from it.

Legend: B batch, T tokens of a row.
"""

import base64
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoProcessor

from draftsmith.inference.targets.files import read_config

_SEPARATOR = "@@image-4b1e@@"  # no text that a processor could write
_TEXT_INPUTS = ("input_ids", "attention_mask")


class ImageError(ValueError):
    """An image that cannot be read; the message names its file."""


def load_processor(name: str) -> Any:
    """Loads the processor of a target that sees. Code of the processor's own is not run.

    Raises:
        ValueError: the target reads text only, or its processor does not load.
    """
    config: Any = read_config(name)
    if config.get_text_config() is config:
        raise ValueError(
            f"the conversations have images, and the target {name} reads text only: give a target that sees, or leave "
            "these conversations out"
        )
    try:
        processor: Any = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"the conversations have images, and the processor of {name} does not load ({error}). Save it with the "
            "target; some processors need pip install torchvision"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"the conversations have images, and {name} has no processor of images saved with it")
    return processor


def open_image(reference: str) -> Any:
    """The image of a reference (`draftsmith.training.images.references`), turned as its camera says, in RGB.

    Raises:
        ImageError: it cannot be read.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImageError("reading images needs pillow: pip install 'draftsmith[vision]'") from error

    try:
        source = reference if not reference.startswith("data:") else io.BytesIO(_decode_url(reference))
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError as error:
        raise ImageError(
            f"the image {reference} does not exist: relative paths begin in the folder of the data file, or in "
            "--media_folder"
        ) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"the image {reference:.80} cannot be read ({error})") from error


def _decode_url(url: str) -> bytes:
    header, _, data = url.partition(",")
    if not header.endswith(";base64"):
        raise ValueError("expected data:...;base64,...")
    return base64.b64decode(data)


@dataclass(frozen=True)
class Expanded:
    """A text in which each image's mark is replaced by its placeholders.

    Attributes:
        places: of each mark, (its end in the text before, the characters added up to here).
    """

    text: str
    places: list[tuple[int, int]]

    def move(self, place: int) -> int:
        """The place in this text of a character of the text before."""
        return place + max((added for end, added in self.places if end <= place), default=0)


def expand_images(processor: Any, text: str, media: Sequence[str]) -> Expanded:
    """Replaces the marks of images as the processor does it: the number of placeholders depends on the image's size.

    Raises:
        ValueError: the text has not one mark for each image; an image that cannot be read.
    """
    mark = _find_mark(processor, text, len(media))
    recorder = _Recorder(processor.tokenizer)
    own = copy.copy(processor)
    own.tokenizer = recorder
    _run(own, _SEPARATOR.join([mark] * len(media)), media)
    pieces = recorder.text.split(_SEPARATOR)
    before = text.split(mark)
    expanded, places, end = before[0], [], len(before[0])
    for piece, following in zip(pieces, before[1:], strict=True):
        end += len(mark)
        expanded += piece
        places.append((end, len(expanded) - end))
        expanded += following
        end += len(following)
    return Expanded(expanded, places)


def _find_mark(processor: Any, text: str, count: int) -> str:
    names = ("boi_token", "image_token")
    found = {str(mark): text.count(str(mark)) for name in names if (mark := getattr(processor, name, None))}
    for mark, number in found.items():
        if number == count:
            return mark
    raise ValueError(
        f"the rendered conversation has {found} marks for {count} images: the chat template must write the mark once "
        "for each image, and turns must not have it in their text"
    )


class _Recorder:
    """A processor's tokenizer that keeps the text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def _run(processor: Any, text: str, media: Sequence[str]) -> Any:
    images = [open_image(reference) for reference in media]
    return processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")


def read_images(processor: Any, row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's inputs for the images of a training row, without its tokens and mask.

    Inputs with a value for each token are as long as the row, which may be cut.

    Raises:
        ImageError: the processor gives other tokens than the row has.
    """
    inputs = _run(processor, row["text"], row["media"])
    ids, wanted = inputs["input_ids"], torch.as_tensor(row["input_ids"])
    count = len(wanted)
    if not torch.equal(ids[0, :count], wanted.long()):
        raise ImageError(
            f"the processor gives other tokens for the images {', '.join(row['media']):.200} than it gave before: they "
            "have changed since, or it tokenizes in another way than its tokenizer. Delete the cache of `datasets` "
            "after a change of images"
        )
    media = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name not in _TEXT_INPUTS}
    return {name: value[:, :count] if value.shape == ids.shape else value for name, value in media.items()}


def refuse_placeholders(rows: Any, config: Any) -> None:
    """Refuses rows without images that have the token of images: their column of images has another name.

    Args:
        rows: a tokenized set; anything else passes.
        config: of the target.

    Raises:
        ValueError: naming the columns that are read.
    """
    names = ("image_token_id", "image_token_index")
    token = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if token is None or not isinstance(rows, datasets.Dataset):
        return
    for batch in rows.with_format("arrow").iter(1000):
        ids = batch["input_ids"].combine_chunks()
        if not (ids.flatten().to_numpy() == token).any():
            continue
        media = batch["media"].to_pylist() if "media" in batch.column_names else [None] * len(ids)
        if any(token in row and not images for row, images in zip(ids.to_pylist(), media, strict=True)):
            raise ValueError(
                "a conversation without images has the token that stands for them: give its images in the column "
                "`image` or `images`, or take <image> out of its text"
            )


@dataclass(frozen=True)
class ImageCollator:
    """Adds the inputs of images to a batch, as `media`: a mapping for the model's forward.

    Inputs of several rows follow one another; smaller ones are padded with zeros, as the processors do it.

    Args:
        collate: makes the batch of tokens.
    """

    collate: Callable[[Any], dict[str, Any]]
    processor: Any

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        seeing = [number for number, row in enumerate(rows) if row.get("media")]
        if not seeing:
            return batch
        read = [read_images(self.processor, rows[number]) for number in seeing]
        media: dict[str, Tensor] = {}
        for name in read[0]:
            values = [inputs[name] for inputs in read]
            sizes = [(1, len(rows[number]["input_ids"])) for number in seeing]
            if [tuple(value.shape) for value in values] == sizes:  # a value for each token
                media[name] = torch.zeros_like(batch["input_ids"], dtype=values[0].dtype)
                for number, value in zip(seeing, values, strict=True):
                    media[name][number, : value.shape[1]] = value[0]
            else:
                media[name] = torch.cat(_pad_alike(values))
        return {**batch, "media": media}


def _pad_alike(values: Sequence[Tensor]) -> list[Tensor]:
    """Pads all dimensions but the first with zeros."""
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    return [
        F.pad(
            value, [n for size, wanted in zip(value.shape[:0:-1], most[::-1], strict=True) for n in (0, wanted - size)]
        )
        for value in values
    ]
