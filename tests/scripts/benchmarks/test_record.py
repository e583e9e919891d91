"""The recording: pieces of text with their times, broken into lines, drawn as an SVG that animates itself."""

from xml.etree import ElementTree

from draftsmith.scripts.benchmarks.record import draw
from draftsmith.scripts.shared.side_by_side import Recording, Step


class Letters:
    """A tokenizer whose token 1 is " a", 2 is " b", ..."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(f" {chr(96 + token)}" for token in token_ids)


def test_the_picture_shows_measured_times() -> None:
    plain = Recording([Step(0.5 * n, [n], 0) for n in (1, 2, 3, 4)], seconds=2.0)
    drafted = Recording([Step(0.5, [1, 2], 1), Step(1.0, [3, 4], 1)], seconds=1.0)
    picture = draw([plain, drafted], Letters(), "Hi", ["plain", "heads"], "a <CPU>")
    ElementTree.fromstring(picture)
    assert "white-space:pre" in picture, "browsers join the spaces at the ends of pieces"
    assert "2 tokens/s<" in picture
    assert "4 tokens/s, 2.00 × plain decoding<" in picture
    assert "a &lt;CPU&gt;" in picture
    # The longer one takes 4 s in the picture, then both stand for another 4.
    assert picture.count('dur="8.000s"') == picture.count("<animate ")
    assert 'keyTimes="0;0.12500"' in picture, "the first step, after 1 of 8 seconds"
