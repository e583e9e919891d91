"""How records name images, and where they stand in turns."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.training.data.layouts import RecordFormat, parse_record

FOLDER = Path("/set")
ASKED = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
PARTS = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
ANSWER = {"role": "assistant", "content": "A cat."}
PIXEL = "data:image;base64,iVBORw=="


@pytest.mark.parametrize(
    ("record", "media"),
    [
        ({"image": "a.jpg", "conversations": ASKED}, "/set/a.jpg"),
        ({"images": ["b/a.jpg"], "conversations": ASKED}, "/set/b/a.jpg"),
        ({"images": [{"bytes": b"\x89PNG", "path": None}], "conversations": ASKED}, PIXEL),
        ({"images": [{"bytes": None, "path": "a.jpg"}], "messages": [{"role": "user", "content": PARTS}, ANSWER]}, 0),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, PARTS[1]]},
                    ANSWER,
                ]
            },
            PIXEL,
        ),
    ],
)
def test_forms_of_records(record: dict[str, Any], media: Any) -> None:
    parsed = parse_record(record, folder=FOLDER)
    assert parsed == {"media": [media or "/set/a.jpg"], "messages": [{"role": "user", "content": PARTS}, ANSWER]}


def test_several_images_stand_in_order() -> None:
    turns = [{"role": "user", "content": "one <image> two\n<image>"}, ANSWER, {"role": "user", "content": "<image>"}]
    parsed = parse_record({"images": ["1.png", "2.png", "3.png"], "messages": turns}, RecordFormat(media_folder="/m"))
    assert parsed["media"] == ["/m/1.png", "/m/2.png", "/m/3.png"]
    assert [part.get("text", "image") for part in parsed["messages"][0]["content"]] == [
        "one ",
        "image",
        " two",
        "image",
    ]
    assert parsed["messages"][2]["content"] == [{"type": "image"}]


def test_text_without_images_keeps_its_marks() -> None:
    turns = [{"role": "user", "content": "HTML's <image> tag"}, ANSWER]
    assert parse_record({"messages": turns, "images": []}) == {"messages": turns}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"images": ["a", "b"], "conversations": ASKED}, "1 places .* 2 images"),
        ({"image": "a", "messages": [{"role": "user", "content": "Hi"}, ANSWER]}, "0 places .* 1 images"),
        ({"messages": [{"role": "user", "content": PARTS}, ANSWER]}, "1 places .* 0 images"),
        ({"image": "https://x.org/a.jpg", "conversations": ASKED}, "https://x.org/a.jpg"),
        (
            {"images": ["a"], "messages": [{"role": "user", "content": [{"type": "image", "index": 1}]}, ANSWER]},
            "index 1 ",
        ),
        ({"image": 3, "conversations": ASKED}, "an image is int"),
        ({"image": "a", "conversations": [{"from": "gpt", "value": "<image>"}]}, "assistant"),
        ({"videos": ["a.mp4"], "conversations": ASKED}, "`videos`"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'audio'"),
    ],
)
def test_records_that_cannot_be_read(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_record(record, folder=FOLDER)
