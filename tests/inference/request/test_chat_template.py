"""What a chat template cannot write is refused with its reason, and what it writes is what the messages say."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.inference.request.chat_template import ConversationError, encode_prompt
from tests.chat_template_shapes import CALL, CALLING, SHAPES, TOOLS
from tests.conftest import CHAT_TARGET

HELLO = [{"role": "user", "content": "Hello"}]
SIMPLE = SHAPES["SmolLM2"].jinja
# The first Phi-3 mini: roles that it does not know vanish.
TWO_ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MISTRAL = SHAPES["Mistral: tools and system in the last question, long ids"].jinja
QWEN_3, GLM = (SHAPES[name].jinja for name in SHAPES if name.startswith(("Qwen 3", "GLM, for training")))
FORMER = {"role": "assistant", "content": None, "function_call": CALL["function"]}
SYSTEM = [{"role": "system", "content": "Be brief."}]
# As Qwen3's, with a variable.
THINKING = SIMPLE + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHAT_TARGET)


def render(tokenizer: Any, jinja: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer.chat_template = jinja
    return tokenizer.decode(encode_prompt(tokenizer, messages, **options))


def with_role(role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": "Be brief."}, *HELLO]


@pytest.mark.parametrize(
    ("jinja", "messages", "options", "reason", "field"),
    [
        (TWO_ROLES, with_role("system"), {}, "role 'system' (message 1)", "messages"),
        (SIMPLE, CALLING, {}, "'look' (message 2)", "messages"),
        (SIMPLE, HELLO, {"tools": TOOLS}, "tools", "tools"),
        (SIMPLE, HELLO, {"variables": {"enable_thinking": False}}, "'enable_thinking'", "chat_template_kwargs"),
        (THINKING, HELLO, {"variables": {"messages": []}}, "'messages'", "chat_template_kwargs"),
        (SHAPES["Gemma: no system"].jinja, with_role("system"), {}, "System role not supported", "messages"),
        ("{{ messages[0].content + 1 }}", HELLO, {}, "TypeError: ", "messages"),
        (SIMPLE, [*HELLO, {"role": "assistant", "tool_calls": 5}], {}, "tool_calls is int", "messages"),
        (SIMPLE, [{"role": "assistant", "content": "Yo", "refusal": "No."}], {}, "refusal", "messages"),
        (MISTRAL, SYSTEM, {}, "role 'system' (message 1)", "messages"),
        (SIMPLE, [{"role": "user", "content": "\ud800"}], {}, "surrogates not allowed", "messages"),
    ],
)
def test_what_cannot_be_written_is_refused(
    jinja: str, messages: list[dict[str, Any]], options: dict[str, Any], reason: str, field: str, tokenizer: Any
) -> None:
    with pytest.raises(ConversationError) as caught:
        render(tokenizer, jinja, messages, **options)
    assert reason in caught.value.reason
    assert caught.value.field == field
    assert caught.value.reason in str(caught.value)


def test_developers_are_the_system_where_a_template_has_none(tokenizer: Any) -> None:
    assert render(tokenizer, SIMPLE, with_role("developer")) == render(tokenizer, SIMPLE, with_role("system"))
    knowing = SIMPLE.replace("{{ m.role }}", "{{ 'D' if m.role == 'developer' else m.role }}")
    assert render(tokenizer, knowing, with_role("developer")).startswith("<|im_start|>D\nBe brief.")


def test_variables_that_the_template_reads_reach_it(tokenizer: Any) -> None:
    assert render(tokenizer, THINKING, HELLO, variables={"enable_thinking": False}).endswith("<think></think>")
    same = render(tokenizer, THINKING, HELLO, variables={"enable_thinking": True})
    assert same == render(tokenizer, THINKING, HELLO)
    without = render(tokenizer, SIMPLE, HELLO, variables={"add_generation_prompt": False})
    assert without == "<|im_start|>user\nHello<|im_end|>\n"
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{{ mood }}{%- endgeneration -%}{% endfor %}"
    assert render(tokenizer, marked, HELLO, variables={"mood": "!"}) == "Hello!"


@pytest.mark.parametrize(
    ("jinja", "variables"),
    [
        (QWEN_3, {"add_generation_prompt", "enable_thinking"}),
        (MISTRAL, {"instruction"}),  # `is defined` is asked of it
        ("{% for m in messages %}{% set role = m.role %}{% endfor %}{{ role }}", {"no variables"}),
    ],
)
def test_what_a_template_sets_itself_is_no_variable(jinja: str, variables: set[str], tokenizer: Any) -> None:
    for unread in ("content", "reasoning_content", "role", "tool_call", "turns", "loop", "ns"):
        with pytest.raises(ConversationError) as caught:
            render(tokenizer, jinja, HELLO, variables={unread: "x"})
        assert f"{unread!r}" in caught.value.reason
        assert {*caught.value.reason.partition("it reads ")[2].split(", ")} == variables


def test_the_former_key_of_calls(tokenizer: Any) -> None:
    """`function_call` is a tool call, `function` the role of its result."""
    for name in ("Qwen 3: thoughts of the last turn", "Hermes: whole functions"):
        former = [CALLING[0], FORMER, {"role": "function", "name": "look", "content": "There"}]
        assert render(tokenizer, SHAPES[name].jinja, former) == render(tokenizer, SHAPES[name].jinja, CALLING[:3])
    nothing: list[Any] = [None, "", {}]
    answer = {"role": "assistant", "content": "Yo"}
    for empty in nothing:
        messages = [*HELLO, answer | {"function_call": empty}]
        assert render(tokenizer, SIMPLE, messages) == render(tokenizer, SIMPLE, [*HELLO, answer])


def test_odd_calls_end_in_a_text_or_a_refusal(tokenizer: Any) -> None:
    """A client may send anything: no other error comes of it."""
    refusals = []
    odd: list[Any] = ["[" * 5_000, "[1]", "null", [1], 5, {"a": {"b": [None]}}, {}]
    for name, shape in SHAPES.items():
        for arguments in odd:
            for call in ({"function": {"name": "x", "arguments": arguments}}, {"name": "x", "arguments": arguments}):
                messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
                try:
                    assert "Hello" in render(tokenizer, shape.jinja, messages), name
                except ConversationError as error:
                    refusals.append(str(error))
    assert refusals
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"at": "x"}', '{"at": "x"}'), (None, "{}"), ("no JSON", "no JSON")], ids=str
)
def test_arguments_in_any_form(arguments: Any, text: str, tokenizer: Any) -> None:
    """Text that is no JSON stays text; what is missing is an empty object."""
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    adding, writing = (SHAPES[name].jinja for name in ("DeepSeek V3: adds texts", "Hermes: whole functions"))
    assert f"```json\n{text}\n```" in render(tokenizer, adding, messages)
    value = f'"{text}"' if text == "no JSON" else text
    assert f'"arguments": {value}}}' in render(tokenizer, writing, messages)


@pytest.mark.parametrize(("key", "read"), [("reasoning_content", "thinking"), ("thinking", "reasoning")])
def test_thoughts_go_under_the_key_that_is_read(key: str, read: str, tokenizer: Any) -> None:
    jinja = "{% for m in messages %}{% if m." + read + " %}<{{ m." + read + " }}>{% endif %}{{ m.content }}{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "Yo", key: "Hm"}]
    assert render(tokenizer, jinja, messages) == "Hello<Hm>Yo"
