"""Records of well-known sets, in their own columns, as conversations."""

import json
from typing import Any

import pytest

from draftsmith.training.data.layouts import RecordFormat, parse_record

ADD = "Add the numbers."
PLAIN = [{"role": "user", "content": ADD}, {"role": "assistant", "content": "2"}]
WITH_INPUT = [{"role": "user", "content": f"{ADD}\n\n1, 1"}, {"role": "assistant", "content": "2"}]
SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": ADD}, {"from": "gpt", "value": "2"}]

# Columns as the sets publish them (rows of our own) -> the conversations in them.
RECORDS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"id": "1", "conversations": SHAREGPT}, PLAIN),
    ({"conversations": SHAREGPT, "system": "Be brief."}, [SYSTEM, *PLAIN]),
    ({"messages": PLAIN, "system": "Be brief."}, [SYSTEM, *PLAIN]),
    ({"prompt": ADD, "prompt_id": "7f", "messages": PLAIN}, PLAIN),
    ({"id": "0", "data": [ADD, "2", ADD, "2"]}, PLAIN * 2),
    (
        {
            "conversation_id": "5",
            "instruction": "other",
            "response": "other",
            "conversations": SHAREGPT,
            "gen_tps": 3.5,
        },
        PLAIN,
    ),
    ({"question": ADD, "answer": "2"}, PLAIN),
    ({"instruction": ADD, "input": "", "output": "2"}, PLAIN),
    ({"instruction": ADD, "input": "1, 1", "output": "2", "text": "..."}, WITH_INPUT),
    ({"instruction": ADD, "output": "2", "system": "Be brief."}, [SYSTEM, *PLAIN]),
    (
        {"instruction": ADD, "output": "2", "history": [[ADD, "2"], [ADD, "2"]], "system": "Be brief."},
        [SYSTEM, *PLAIN * 3],
    ),
    ({"prompt": ADD, "response": "2", "history": PLAIN}, PLAIN * 2),
    ({"instruction": ADD, "output": "2", "history": []}, PLAIN),
    ({"prompt": ADD, "completion": "2", "label": True}, PLAIN),
    ({"prompt": ADD, "completion": "2", "label": 1, "functions": ["add"]}, PLAIN),
    ({"instruction": ADD, "output": "2", "history": [ADD, "2", ADD, "2"]}, PLAIN * 3),
    ({"instruction": ADD, "context": "1, 1", "response": "2", "category": "qa"}, WITH_INPUT),
    ({"prompt": ADD, "completion": "2"}, PLAIN),
    ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, PLAIN),
    ({"prompt": ADD, "chosen": "2", "rejected": "3"}, PLAIN),
    ({"prompt": ADD, "chosen": PLAIN[1:], "rejected": PLAIN[1:]}, PLAIN),
    ({"system_prompt": "Be brief.", "question": ADD, "response": "2"}, [SYSTEM, *PLAIN]),
    ({"query": ADD, "response": "2", "type": "GSM_Rephrased"}, PLAIN),
    ({"conversation": PLAIN, "model": "x", "language": "English"}, PLAIN),
]


@pytest.mark.parametrize(("record", "messages"), RECORDS)
def test_layouts_of_known_sets(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    as_table = {"id": None, "messages": None, "input": None, "system": None, "tools": None, **record}
    assert parse_record(record)["messages"] == parse_record(as_table)["messages"] == messages


def test_columns_can_be_named() -> None:
    record = {
        "problem": ADD,
        "given": "1, 1",
        "solution": "2",
        "persona": "Be brief.",
        "answer": "no",
        "question": "no",
    }
    columns = {"prompt": "problem", "response": "solution"}
    assert parse_record(record, RecordFormat(columns=columns))["messages"] == PLAIN
    assert parse_record({**record, "label": 1, "history": 3}, RecordFormat(columns=columns))["messages"] == PLAIN
    earlier = RecordFormat(columns={**columns, "history": "earlier"})
    assert parse_record({**record, "earlier": [[ADD, "2"]]}, earlier)["messages"] == PLAIN * 2
    columns |= {"context": "given", "system": "persona"}
    assert parse_record(record, RecordFormat(columns=columns))["messages"] == [SYSTEM, *WITH_INPUT]
    assert parse_record({"dialog": [ADD, "2"]}, RecordFormat(columns={"messages": "dialog"}))["messages"] == PLAIN
    assert parse_record({"dialog": SHAREGPT}, RecordFormat(columns={"messages": "dialog"}))["messages"] == PLAIN
    record = {"messages": PLAIN, "label": 0, "functions": [{"name": "look"}]}
    assert parse_record(record, RecordFormat(columns={"messages": "messages"})) == {"messages": PLAIN}


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        (
            {"problem": "", "solution": ""},
            {"columns": {"prompt": "problme", "response": "solution"}},
            r"'problme'.*\['problem', 'solution'\].*--columns",
        ),
        ({"question": "", "anwser": ""}, {}, "anwser.*--columns"),
        ({"messages": [{"role": ["user"], "content": ""}]}, {}, "unknown role"),
        ({"messages": [{"role": "user", "content": ""}], "tools": 3}, {}, "`tools` is int"),
        ({"messages": [{"role": "gpt", "content": "", "tool_calls": [{"id": "1"}]}]}, {}, "names no function"),
        (
            {"conversations": [{"from": "function_call", "value": "look()"}]},
            {},
            "expected JSON with the function's name",
        ),
        ({"conversations": [{"from": "function_call", "value": '{"at": 1}'}]}, {}, "names no function"),
        ({"messages": [{"role": "assistant", "content": "a", "function_call": "look"}]}, {}, "expected JSON with the"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, {}, "weight .* 0.5"),
        ({"messages": [{"role": "assistant", "content": "a", "train": "no"}]}, {}, "expected 1 or true"),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, {}, "train.*assistant"),
        ({"messages": [{"role": "gpt", "content": "a", "train_detail": []}]}, {}, "train_detail"),
        ({"prompt": ADD, "completion": "2", "label": False}, {}, "`label` is false"),
        ({"prompt": ADD, "completion": "2", "label": 0}, {}, "`label` is false"),
        ({"prompt": ADD, "completion": "2", "kto_tag": "false"}, {}, "`kto_tag` is false"),
        ({"q": ADD, "a": "2", "label": False}, {"columns": {"prompt": "q", "response": "a"}}, "`label` is false"),
        ({"messages": PLAIN, "kto_tag": False}, {}, "`kto_tag` is false"),
        ({"instruction": ADD, "output": "2", "history": "1"}, {}, "`history` is '1'"),
        ({"instruction": ADD, "output": "2", "history": [["1"]]}, {}, r"`history` is \[\['1'\]\]"),
        ({"instruction": ADD, "output": "2", "history": [["1", None]]}, {}, "`history`"),
        ({"messages": [SYSTEM, *PLAIN], "system": 3}, {}, "`system` is int"),
    ],
)
def test_what_cannot_be_read_is_named(record: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_record(record, RecordFormat(**settings))["messages"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"prompt": "a"}}, "messages=.*prompt=.*response="),
        ({"columns": {"prompt": "a", "response": "b", "messages": "c"}}, "messages="),
        ({"columns": {"messages": "a", "history": "b"}}, "messages="),
        ({"columns": {"promt": "a", "response": "b"}}, "columns promt=a: .*messages, prompt"),
    ],
)
def test_formats_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordFormat(**settings)


def test_turns_keep_what_templates_read() -> None:
    """Thoughts, tool calls, and what answers them; parts of text are joined."""
    function = {"name": "look", "arguments": '{"at": "x"}'}
    call = {"id": "c1", "type": "function", "function": function}
    record = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": ADD, "weight": 1},
            {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "look"},
            {"role": "ipython", "content": "2"},
            {"from": "function_call", "value": json.dumps(function)},
            {"role": "assistant", "content": "2", "tool_calls": [function]},
        ],
        "tools": '[{"type": "function", "function": {"name": "look", "parameters": {}}}]',
    }
    assert parse_record(record) == {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": ADD},
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "look"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "assistant", "content": "2", "tool_calls": [function]},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    }


def test_a_turn_that_is_not_to_be_learned_is_marked() -> None:
    turns = [{**turn, "weight": 0, "train": False} for turn in PLAIN]
    assert parse_record({"messages": turns})["messages"] == [PLAIN[0], {**PLAIN[1], "learn": False}]
    turns = [{**PLAIN[1], "loss": 1, "train": 0}]
    assert parse_record({"messages": turns})["messages"] == [{**PLAIN[1], "learn": False}]
    turns = [{**PLAIN[0], "weight": 1}, {**PLAIN[1], "loss": True, "training": 1, "loss_scale": 1.0}]
    assert parse_record({"messages": turns})["messages"] == PLAIN


@pytest.mark.parametrize("system", ["Be kind.", "Be brief."])
def test_a_system_column_beside_a_system_turn_is_noted(system: str) -> None:
    parsed = parse_record({"messages": [SYSTEM, *PLAIN], "system": system})
    assert parsed["messages"] == [SYSTEM, *PLAIN]
    assert ("note" in parsed) == (system != SYSTEM["content"])
    assert "`system`" in parsed.get("note", "`system`")
    developer = [{**SYSTEM, "role": "developer"}, *PLAIN]
    assert parse_record({"messages": developer, "system": system})["messages"] == developer


def test_a_function_call_is_a_tool_call() -> None:
    """ShareGPT's turns, of one call or several, and OpenAI's former key, also beside text."""
    function = {"name": "look", "arguments": '{"at": "x"}'}
    call = {"type": "function", "function": function}
    for value, number in (
        (json.dumps(function), 1),
        (json.dumps([function, function]), 2),
        (function, 1),
        (json.dumps([call]), 1),
    ):
        (message,) = parse_record({"conversations": [{"from": "function_call", "value": value}]})["messages"]
        assert parse_record({"messages": [{"role": "tool_call", "content": value}]})["messages"] == [message]
        assert message == {"role": "assistant", "content": "", "tool_calls": [call] * number}
    for content in (None, "I look."):
        turn = {"role": "assistant", "content": content, "function_call": function}
        (message,) = parse_record({"messages": [turn]})["messages"]
        assert message == {"role": "assistant", "content": content or "", "tool_calls": [call]}
    for nothing in ("", {}, False):
        turns = [{**turn, "function_call": nothing} for turn in PLAIN]
        assert parse_record({"messages": turns}) == {"messages": PLAIN}
    result = {"role": "tool_response", "content": "2"}
    assert parse_record({"messages": [result]})["messages"] == [{"role": "tool", "content": "2"}]


@pytest.mark.parametrize("as_text", [False, True])
def test_former_functions_are_tools(as_text: bool) -> None:
    functions = [{"name": "look", "parameters": {}}]
    record = {"messages": PLAIN, "functions": json.dumps(functions) if as_text else functions}
    assert parse_record(record)["tools"] == [{"type": "function", "function": functions[0]}]
