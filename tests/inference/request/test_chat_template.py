"""What a chat template cannot write is refused with its reason, and what it writes is what the messages say."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.inference.request.chat_template import ChatRenderer, ConversationError, encode_prompt
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
        (TWO_ROLES, with_role("developer"), {}, "role 'developer' (message 1)", "messages"),
        (TWO_ROLES, [*HELLO, {"role": "critic", "content": "So?"}], {}, "role 'critic' (message 2)", "messages"),
        (SIMPLE, CALLING, {}, "'look' (message 2)", "messages"),
        (SIMPLE, HELLO, {"tools": TOOLS}, "tools", "tools"),
        (SIMPLE, HELLO, {"variables": {"enable_thinking": False}}, "'enable_thinking'", "chat_template_kwargs"),
        (THINKING, HELLO, {"variables": {"padding": True}}, "'padding'", "chat_template_kwargs"),
        (THINKING, HELLO, {"variables": {"messages": []}}, "'messages'", "chat_template_kwargs"),
        (SHAPES["Gemma: no system"].jinja, with_role("system"), {}, "System role not supported", "messages"),
        ("{{ messages[0].content + 1 }}", HELLO, {}, "TypeError: ", "messages"),
        ("{{ absent + 'x' }}", HELLO, {}, "'absent' is undefined", "messages"),
        ("{{ messages[0].content.index('?') }}", HELLO, {}, "ValueError: ", "messages"),
        ("{{ 1 // 0 }}", HELLO, {}, "ZeroDivisionError: ", "messages"),
        (SIMPLE, [*HELLO, {"role": "assistant", "tool_calls": 5}], {}, "tool_calls is int", "messages"),
        (SIMPLE, [*HELLO, {"role": "assistant", "tool_calls": ["x"]}], {}, "names no function: 'x'", "messages"),
        (SIMPLE, [*HELLO, {"role": "assistant", "function_call": "auto"}], {}, "names no function: ", "messages"),
        (SIMPLE, [*HELLO, FORMER], {}, "'look' (message 2)", "messages"),
        (SIMPLE, [{"role": "assistant", "content": "Yo", "refusal": "No."}], {}, "refusal", "messages"),
        (MISTRAL, SYSTEM, {}, "role 'system' (message 1)", "messages"),
        (MISTRAL, [*SYSTEM, *CALLING[1:]], {}, "role 'system' (message 1)", "messages"),
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
    assert "7f3a" not in str(caught.value)


def test_what_the_template_itself_says_comes_first(tokenizer: Any) -> None:
    """Whichever way of handing over the texts it comes with."""
    alternating = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    for jinja in (
        alternating + "{{ messages[0].content[0].text + '' }}",
        "{{ messages[0].content[0].text + '' }}" + alternating,
    ):
        with pytest.raises(ConversationError, match="roles must alternate"):
            render(tokenizer, jinja, HELLO * 2)


def test_developers_are_the_system_where_a_template_has_none(tokenizer: Any) -> None:
    """Also where its prose speaks of developers."""
    for jinja in (SIMPLE, SHAPES["Cohere: a preamble of its own, which speaks of developers"].jinja):
        assert render(tokenizer, jinja, with_role("developer")) == render(tokenizer, jinja, with_role("system"))
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


def test_a_system_text_may_stand_in_prompts_only(tokenizer: Any) -> None:
    """Mistral's template writes it before the last message: a conversation that ends otherwise has none."""
    for rest in (CALLING[:3], CALLING):
        assert render(tokenizer, MISTRAL, [*SYSTEM, *rest]) == render(tokenizer, MISTRAL, rest)
        assert ChatRenderer(tokenizer, [*SYSTEM, *rest]).left_out == [0]
    assert "[INST]Be brief.\n\nWhere?[/INST]" in render(tokenizer, MISTRAL, [*SYSTEM, *CALLING[:1]])
    assert ChatRenderer(tokenizer, [*SYSTEM, *CALLING[:1]]).left_out == []


@pytest.mark.parametrize(
    ("jinja", "variables"),
    [
        (QWEN_3, {"add_generation_prompt", "enable_thinking"}),
        (MISTRAL, {"instruction"}),  # `is defined` is asked of it
        (GLM, {"add_generation_prompt"}),
        (
            "{% macro f(z) %}{{ z is defined }}{% endmacro %}{% set z = 1 %}{% if x is not defined %}{% set x = 1 %}"
            "{% endif %}{{ x }}{% set y = y | default(2) %}{{ f(3) }}",
            {"x", "y"},
        ),
        ("{% for m in messages %}{% set role = m.role %}{% endfor %}{{ role }}", {"no variables"}),
        ("{{ bos_token }}", {"no variables"}),
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


def test_a_refusal_is_what_a_turn_says(tokenizer: Any) -> None:
    for content in (None, ""):
        messages = [*HELLO, {"role": "assistant", "content": content, "refusal": "No."}]
        assert "<|im_start|>assistant\nNo.<|im_end|>" in render(tokenizer, SIMPLE, messages)
    messages = [*HELLO, {"role": "assistant", "content": "Yo", "refusal": None}]
    assert "<|im_start|>assistant\nYo<|im_end|>" in render(tokenizer, SIMPLE, messages)


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


@pytest.mark.parametrize("arguments", [{"at": "x"}, '{"at": "x"}', None, "", "{}", "no JSON"])
def test_arguments_in_any_form(arguments: Any, tokenizer: Any) -> None:
    """Text that is no JSON stays text; what is missing is an empty object."""
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]
    expected = '{"at": "x"}' if arguments and "at" in arguments else "{}"
    adding, writing = (SHAPES[name].jinja for name in ("DeepSeek V3: adds texts", "Hermes: whole functions"))
    if arguments == "no JSON":
        assert "```json\nno JSON\n```" in render(tokenizer, adding, messages)
        assert '"arguments": "no JSON"' in render(tokenizer, writing, messages)
        return
    assert f"```json\n{expected}\n```" in render(tokenizer, adding, messages)
    assert f'"arguments": {expected}}}' in render(tokenizer, writing, messages)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_go_under_the_key_that_is_read(key: str, read: str, tokenizer: Any) -> None:
    jinja = "{% for m in messages %}{% if m." + read + " %}<{{ m." + read + " }}>{% endif %}{{ m.content }}{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "Yo", key: "Hm"}]
    assert render(tokenizer, jinja, messages) == "Hello<Hm>Yo"


def test_a_text_beside_a_call_may_be_left_out(tokenizer: Any) -> None:
    """As Llama 3's template does it: the call is written, so the turn is not lost."""
    jinja = SHAPES["Llama 3: objects, and no text beside a call"].jinja
    messages = [CALLING[0], {**CALLING[1], "content": "I look."}]
    assert "I look." not in render(tokenizer, jinja, messages)
    assert render(tokenizer, jinja, messages) == render(tokenizer, jinja, CALLING[:2])


def test_a_text_that_looks_like_a_lost_one_changes_nothing(tokenizer: Any) -> None:
    """The reader's choice depends on the template, not on what the texts say."""
    parts = SHAPES["SmolVLM"].jinja
    for text in ("user", "a", "'text': 'Hi'", "{'at': True}", " ", ""):
        assert f"User: {text}<|im_end|>" in render(tokenizer, parts, [{"role": "user", "content": text}])


def test_a_renderer_renders_parts_of_its_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = SHAPES["SmolVLM"].jinja
    messages = [*HELLO, {"role": "assistant", "content": "Yo"}]
    renderer = ChatRenderer(tokenizer, messages)
    assert renderer.render(messages[:1], is_prompt=True) == "<|im_start|>User: Hello<|im_end|>\nAssistant:"
    assert renderer.render(messages) == "<|im_start|>User: Hello<|im_end|>\nAssistant: Yo<|im_end|>\n"
