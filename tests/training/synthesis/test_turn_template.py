"""Where turns begin and end, found by rendering a chat template."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.training.synthesis.turn_template import TurnTemplate
from tests.conftest import CHAT_TARGET


def test_the_template_is_found_by_rendering(chat_tokenizer: Any) -> None:
    template = TurnTemplate(chat_tokenizer)
    assert template.render_user_header([]) == "<|im_start|>user\n"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert template.render_user_header(turns) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\n"
    )
    assert template.find_turn_end("user") == template.find_turn_end("assistant") == 2
    assert template.find_stop_ids([2, 7]) == {"user": {2}, "assistant": {2, 7}}
    prompt = template.encode_prompt(turns[:1], "assistant")
    assert prompt == chat_tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]


def test_templates_that_do_not_show_a_turns_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="use --mode regenerate"):
        TurnTemplate(tokenizer).find_stop_ids(2, needs_user=True)
    assert TurnTemplate(tokenizer).find_stop_ids(2) == {"user": set(), "assistant": {2}}, "the generation config's"
    with pytest.raises(ValueError, match="names an end of turn"):
        TurnTemplate(tokenizer).find_stop_ids(None)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="turn's text 2 times"):
        TurnTemplate(tokenizer).render_user_header([])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        TurnTemplate(tokenizer)
