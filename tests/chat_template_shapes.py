"""Chat templates in the shapes of well-known models', each with a conversation and what it becomes, written by hand."""

from dataclasses import dataclass, field
from typing import Any

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": '{"at": "é", "is_far": true}'}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "now?"}]},
    {"role": "assistant", "content": "Bye"},
]
CALLING = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "There", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is there."},
]
END = "<|im_end|>"


@dataclass(frozen=True)
class Shape:
    jinja: str
    text: str
    messages: list[dict[str, Any]] = field(default_factory=lambda: PLAIN)
    tools: list[dict[str, Any]] | None = None


def _chatml(turn: str, *, before: str = "") -> str:
    return (
        before
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + turn
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_PARTS = (
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}"
)
_WRITE_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_TOOLS_TEXT = '<|im_start|>tools\n[{"type": "function", "function": {"name": "look"}}]<|im_end|>\n'
_OBJECT = '{"at": "é", "is_far": true}'
_DEEPSEEK = (
    "<|im_start|>{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<Result>' + m.content }}"
    "{% elif CONDITION %}{{ '<Assistant>' + REST }}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```</call>' }}{% endfor %}<|im_end|>"
    "{% else %}{{ '<Assistant>' + m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"
)
_DEEPSEEK_TEXT = (
    f"<|im_start|><User>Where?<Assistant><call>look\n```json\n{_OBJECT}\n```</call>{END}"
    f"<Result>There<Assistant>It is there.{END}"
)
_PLAIN_TEXT = "".join(
    f"<|im_start|>{role}\n{text}{END}\n"
    for role, text in (
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yo"),
        ("user", "And now?"),
        ("assistant", "Bye"),
    )
)


def _calling_text(call: str, *, before: str = _TOOLS_TEXT) -> str:
    turns = (("user", "Where?"), ("assistant", call), ("tool", "There"), ("assistant", "It is there."))
    return before + "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in turns)


SHAPES = {
    "SmolLM2": Shape(_chatml("{{ m.content }}"), _PLAIN_TEXT),
    "SmolVLM": Shape(
        "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
        "{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}" + _PARTS + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        f"<|im_start|>System: Be brief.{END}\nUser: Hi{END}\nAssistant: Yo{END}\nUser: And now?{END}\n"
        f"Assistant: Bye{END}\n",
    ),
    "Gemma 3: both": Shape(
        _chatml("{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"), _PLAIN_TEXT
    ),
    "Gemma: no system": Shape(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + _chatml("{{ m.content | trim }}"),
        _PLAIN_TEXT.partition(f"{END}\n")[2],
        PLAIN[1:],
    ),
    "Qwen: objects": Shape(
        _chatml(
            "{{ m.content }}{% for c in m.tool_calls or [] %}{% if c.function is defined %}{% set c = c.function %}"
            '{% endif %}<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
            "{% endfor %}",
            before=_WRITE_TOOLS,
        ),
        _calling_text(f'<tool_call>\n{{"name": "look", "arguments": {_OBJECT}}}\n</tool_call>'),
        CALLING,
        TOOLS,
    ),
    "Llama 3: objects, and no text beside a call": Shape(
        _chatml(
            "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
            '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
            "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}",
            before=_WRITE_TOOLS,
        ),
        _calling_text(f'{{"name": "look", "parameters": {_OBJECT}}}'),
        CALLING,
        TOOLS,
    ),
    "Hermes: whole functions": Shape(
        _chatml(
            "{{ m.content }}{% for c in m.tool_calls or [] %}"
            "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        ),
        _calling_text(f'<tool_call>{{"name": "look", "arguments": {_OBJECT}}}</tool_call>', before=""),
        CALLING,
    ),
    "DeepSeek V3: adds texts": Shape(
        _DEEPSEEK.replace("CONDITION", "m.tool_calls").replace("REST", "m.content"), _DEEPSEEK_TEXT, CALLING
    ),
    "DeepSeek R1: calls beside null only": Shape(
        _DEEPSEEK.replace("CONDITION", "m['content'] is none").replace("REST", "''"), _DEEPSEEK_TEXT, CALLING
    ),
    "Mistral: tools and system in the last question, long ids": Shape(
        "{% if messages[0].role == 'system' %}{% set instruction, turns = messages[0].content, messages[1:] %}"
        "{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}{% if m.role == 'user' %}"
        "{% if tools and m == (turns | selectattr('role', 'equalto', 'user') | list | last) %}"
        "[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}<|im_start|>[INST]"
        "{% if loop.last and instruction is defined %}{{ instruction + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "[CALLS]{{ c.function | tojson }}{% endfor %}<|im_end|>"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
        '[TOOLS][{"type": "function", "function": {"name": "look"}}][/TOOLS]<|im_start|>[INST]Where?[/INST]'
        f'[CALLS]{{"name": "look", "arguments": {_OBJECT}}}{END}[RESULT]There[/RESULT]It is there.{END}',
        CALLING,
        TOOLS,
    ),
    "Qwen 3: thoughts of the last turn": Shape(
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + _chatml(
            "{% if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}"
            "{% set reasoning_content = m.reasoning_content or '' %}{% if '</think>' in content %}"
            "{% set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
            "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
            "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or reasoning_content) %}"
            "{{ '<think>\n' + reasoning_content + '\n</think>\n\n' }}{% endif %}{{ content }}"
            "{% for tool_call in m.tool_calls or [] %}{% set tool_call = tool_call.function %}"
            '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n'
            "</tool_call>{% endfor %}",
            before=_WRITE_TOOLS,
        )
        + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
        _calling_text(f'<tool_call>\n{{"name": "look", "arguments": {_OBJECT}}}\n</tool_call>').replace(
            "It is there.", "<think>\n\n</think>\n\nIt is there."
        ),
        CALLING,
        TOOLS,
    ),
    "GLM, for training: a turn ends with the next one's header": Shape(
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% generation %}{{ '\n<think>' }}"
        "{% if m.reasoning_content and loop.index0 > ns.last %}{{ m.reasoning_content }}{% endif %}</think>"
        "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
        "{% for key, value in c.function.arguments.items() %}<{{ key }}>"
        "{{ value if value is string else value | tojson }}{% endfor %}</call>{% endfor %}"
        "{% if m.tool_calls %}<tool>{% else %}<user>{% endif %}{% endgeneration %}"
        "{% else %}{% if loop.first or messages[loop.index0 - 1].role != 'assistant' %}<{{ m.role }}>{% endif %}"
        "{{ '\n' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
        "<user>\nWhere?<|im_start|>\n<think></think><call>look<at>é<is_far>true</call><tool>\nThere"
        "<|im_start|>\n<think></think>\nIt is there.<user>",
        CALLING,
    ),
}
