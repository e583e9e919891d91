"""The mask against the templates written out by hand, over conversations of every kind."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import CHAT_TARGET
from tests.training.chat_templates import TEMPLATES, ChatTemplate, RefusedError
from tests.training.conversation_cases import learned_text, tokenize

TOKENIZER = AutoTokenizer.from_pretrained(CHAT_TARGET)
MARKS = ["<think>", "</think>", "<", "@@", "<|im_end|>", "]"]
WORDS = ["Hi", "Yo", "a", " ", "\n", "\n\n", "é", "🙂", "assistant", *MARKS]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
# A reply with a mark that is none can be any template's own.
REPLIES = TEXTS.map(lambda text: text.replace("think", ""))
THOUGHTS = st.sampled_from(["", "\n", "Hm", "Hm\nso\n"])
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}]


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any order of roles, with a bias to the usual one; thoughts in either form; calls and results."""
    messages: list[dict[str, Any]] = []
    if draw(st.integers(0, 3)) == 0:
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2]))):
            messages.append({**draw(replies()), "tool_calls": CALLS * draw(st.integers(1, 2))})
            messages += [{"role": "tool", "content": draw(TEXTS)}] * draw(st.integers(1, 2))
        messages += [draw(replies()) for _ in range(draw(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 1, 0, 2])))]
    return draw(st.permutations(messages)) if draw(st.integers(0, 9)) == 0 else messages


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    form = draw(st.integers(0, 3))
    if form == 0:
        return {"role": "assistant", "content": f"<think>\n{draw(THOUGHTS)}\n</think>\n\n{draw(REPLIES)}"}
    if form == 1:
        return {"role": "assistant", "content": draw(REPLIES), "reasoning_content": draw(THOUGHTS)}
    return {"role": "assistant", "content": draw(REPLIES)}


def expected_mask(template: ChatTemplate, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """The text, and for each token whether the assistant wrote the character it begins with."""
    text, is_learned = "", []
    for kind, pieces in groupby(template.pieces(messages), key=lambda piece: piece[1]):
        written = "".join(piece for piece, _ in pieces)
        text += written
        is_learned += [kind == "reply"] * len(written)
    offsets = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text, [int(is_learned[start]) for start, _ in offsets]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_is_what_the_assistant_writes(name: str) -> None:
    template = TEMPLATES[name]
    TOKENIZER.chat_template = template.jinja
    num_learned = 0

    @settings(max_examples=50, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    @given(conversations())
    def compare(messages: list[dict[str, Any]]) -> None:
        nonlocal num_learned
        try:
            text, mask = expected_mask(template, messages)
        except RefusedError:
            with pytest.raises(ValueError, match="the chat template rejects it"):
                tokenize(messages, TOKENIZER)
            return
        input_ids, loss_mask = tokenize(messages, TOKENIZER)
        assert TOKENIZER.decode(input_ids) == text
        assert loss_mask == mask
        num_learned += any(mask)

    compare()
    assert num_learned > 8  # `merging` refuses those that do not alternate


def test_markers_say_where_replies_are_to_the_character() -> None:
    """Thoughts between markers; and an empty reply, for which transformers' own mask takes all the rest."""
    TOKENIZER.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    replies = ["", "<think>a</think>Yo", "Hi "]
    messages = [
        message
        for reply in replies
        for message in ({"role": "user", "content": "a"}, {"role": "assistant", "content": reply})
    ]
    assert learned_text(messages, TOKENIZER) == ["<think>a</think>Yo<|im_end|>", "Hi <|im_end|>"]


def test_a_template_that_drops_what_the_assistant_says_is_named() -> None:
    TOKENIZER.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="the text of role 'assistant'"):
        tokenize([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], TOKENIZER)
