"""How the records of a set name images, and where they stand in its turns.

A reference is the absolute path of a file, or a `data:` URL with the file's bytes.

Worked example, LLaVA's form, with the file in the folder `/set`:

    {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, ...]}
        -> media ["/set/a.jpg"], content [{"type": "image"}, {"type": "text", "text": "What is it?"}]
"""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("image", "images")
MARK = "<image>"
# Templates write their own line breaks around images.
_MARK = re.compile(r"\n?<image>\n?")
_PART_TYPES = ("image", "image_url", "input_image")
_PART_KEYS = ("image", "path", "url", "image_url", "bytes")


def is_image_part(part: Any) -> bool:
    """Whether a part of a turn's content is an image: its type says so."""
    return isinstance(part, dict) and part.get("type") in _PART_TYPES


def place_images(record: Mapping[str, Any], messages: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Returns the references of a conversation's images in order; turns with images get a list of parts as content.

    The images are in the parts, or in the record's columns, in the order of the parts without an image and the marks.

    Args:
        messages: their contents are text, or lists of parts; they are changed in place.
        folder: where relative paths begin.

    Raises:
        ValueError: not as many images as places, an image in a reply, or an image that is not a file here.
    """
    columns = [value for name in COLUMNS if record.get(name) for value in _as_list(record[name])]
    waiting = [make_reference(value, folder) for value in columns]
    media: list[str] = []
    num_places = 0
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if columns:
            parts = [piece for part in parts for piece in _split_marks(part)]
        placed: list[dict[str, str]] = []
        for part in parts:
            if not is_image_part(part):
                placed.append(part)
                continue
            if message["role"] == "assistant":
                raise ValueError("an image stands in a turn of the assistant, and targets write text: leave it out")
            placed.append({"type": "image"})
            value = next((part[key] for key in _PART_KEYS if part.get(key)), None)
            if value is None:
                if part.get("index", num_places) != num_places:
                    raise ValueError(f"got an image with index {part['index']} in place {num_places}: order the images")
                num_places += 1
            media += waiting[num_places - 1 : num_places] if value is None else [make_reference(value, folder)]
        if any(is_image_part(part) for part in placed):
            message["content"] = placed
    if num_places != len(waiting):
        raise ValueError(
            f"the turns have {num_places} places for the {len(waiting)} images of the record: write {MARK} (or a part "
            'of type "image") once for each image'
        )
    return media


def make_reference(value: Any, folder: Path) -> str:
    """The reference of an image that a record holds as a path, a URL, bytes, or an object with one of them.

    Raises:
        ValueError: an address on the network, or none of these.
    """
    if isinstance(value, Mapping):  # a table's image, or OpenAI's image_url
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key)), None)
    if isinstance(value, bytes):
        return f"data:image;base64,{base64.b64encode(value).decode()}"
    if not isinstance(value, str):
        raise ValueError(f"an image is {type(value).__name__}, expected a path, a data: URL or bytes")
    if value.startswith("data:"):
        return value
    if re.match(r"https?://", value):
        raise ValueError(f"the image {value:.80} is on the network: download it, and give its path in the record")
    return str((folder / Path(value.removeprefix("file://")).expanduser()).absolute())


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _split_marks(part: dict[str, str]) -> list[dict[str, str]]:
    if is_image_part(part) or MARK not in part["text"]:
        return [part]
    pieces: list[dict[str, str]] = []
    for number, text in enumerate(_MARK.split(part["text"])):
        pieces += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return pieces
