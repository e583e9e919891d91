"""The mask of the assistant's tokens, down to the token."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.training.conversation_cases import MARKED_TEMPLATE, THINKING_TEMPLATE, TWO_TURNS, learned_text, tokenize


def test_a_line_break_between_the_markers_takes_nothing_from_the_next_turn(tokenizer: Any) -> None:
    """It is one token with the text after them."""
    within = "<|im_end|>{% endgeneration %}"
    assert within in MARKED_TEMPLATE
    tokenizer.chat_template = MARKED_TEMPLATE.replace(within, "<|im_end|>\n{% endgeneration %}")
    assert learned_text(TWO_TURNS, tokenizer) == ["Yo<|im_end|>\n\n", "Hi<|im_end|>\n\n"]


def test_an_end_of_turn_that_is_not_marked_special_is_learned(tokenizer: Any) -> None:
    """Some tokenizers mark no added token special; the one that they name as their end of text still ends turns."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in settings["added_tokens"]:
        token["special"] = False
    unmarked = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    unmarked.chat_template = tokenizer.chat_template
    assert not any(token.special for token in unmarked.added_tokens_decoder.values())
    assert learned_text(TWO_TURNS, unmarked) == ["Yo<|im_end|>", "Hi<|im_end|>"]


def test_markers_decide_where_a_template_has_them(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED_TEMPLATE.replace("{% generation %}", "Well,\n{% generation %}")
    assert learned_text(TWO_TURNS, tokenizer) == ["Yo<|im_end|>", "Hi<|im_end|>"]


def test_a_reply_that_the_template_changes_is_not_taken_for_another(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE.replace("</think>')[-1]", "x')[0]")
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "Max"}, {"role": "user", "content": "was Max"}]
    with pytest.raises(ValueError, match="generation %} markers"):
        tokenize([*messages[:2], *TWO_TURNS], tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m", "{{ m['content'] if m['role'] == 'user' else m")
    with pytest.raises(ValueError, match="generation %} markers"):
        tokenize(messages, tokenizer)
