"""Which turns are to be written: prompts in every form, their ids, tools, and how many are taken."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.training.data.layouts import parse_record
from draftsmith.training.synthesis.prompts import Conversation, read_prompts
from tests.training.conversation_cases import write


def outline(conversation: Conversation) -> list[str]:
    """Given messages as role:content, turns to be written as their role."""
    return [step if isinstance(step, str) else f"{step['role']}:{step['content']}" for step in conversation.script]


def chat(*turns: str) -> dict[str, Any]:
    """{"messages"} of "role:content"."""
    return {"messages": [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns]}


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["Hi", "Bye"]},
        {"conversations": [{"from": a, "value": b} for a, b in [("human", "Hi"), ("gpt", "Yo"), ("user", "Bye")]]},
        chat("user:Hi", "user:Bye"),
        {**chat("user:Hi", "assistant:Yo", "user:Bye", "assistant:Yo"), "label": False},
        {"messages": [{"role": "user", "content": "Hi", "train": True}, {"role": "user", "content": "Bye"}]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Yo", "loss_scale": 0.3, "train_detail": []},
                {"from": "human", "value": "Bye"},
            ]
        },
        chat("assistant:Welcome", "user:Hi", "assistant:Yo", "user:Bye", "assistant:Yo"),
    ],
    ids=str,
)
def test_prompts_are_read_in_every_form(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path / "prompts.jsonl.gz", [row])
    (conversation,) = read_prompts(path)
    assert outline(conversation) == ["user:Hi", "assistant", "user:Bye", "assistant"]
    assert conversation.id == read_prompts(path)[0].id
    assert outline(read_prompts(path, max_turns=1)[0]) == ["user:Hi", "assistant"]
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_prompts(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        ({"prompt": "Hi"}, ["user:Hi", "assistant"]),
        ({"question": "Hi", "response": None}, ["user:Hi", "assistant"]),
        ({"question": "Hi", "system_prompt": "Be brief."}, ["system:Be brief.", "user:Hi", "assistant"]),
        ({"prompt": "Hi", "history": [["a", "b"]]}, ["user:a", "assistant", "user:Hi", "assistant"]),
    ],
    ids=str,
)
def test_prompts_without_replies(row: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    (one,) = read_prompts(write(tmp_path / "a.jsonl", [row]))
    assert outline(one) == lines


def test_a_prompt_is_not_read_without_its_context(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no known layout"):
        read_prompts(write(tmp_path / "a.jsonl", [{"question": "How old?", "context": "Ann is 7."}]))


def test_system_prompts_and_tool_results_are_kept(tmp_path: Path) -> None:
    row = chat(
        "system:Be brief.", "user:Weather?", "assistant:call", "tool:sunny", "tool:20 C", "assistant:Sunny.", "user:Ok",
        "assistant:Bye", "tool:nothing",
    )  # fmt: skip
    (conversation,) = read_prompts(write(tmp_path / "prompts.jsonl", [row]))
    assert outline(conversation) == [
        "system:Be brief.", "user:Weather?", "assistant", "tool:sunny", "tool:20 C", "assistant", "user:Ok",
        "assistant", "tool:nothing", "assistant",
    ]  # fmt: skip
    (first_turn,) = read_prompts(tmp_path / "prompts.jsonl", max_turns=1)
    assert outline(first_turn) == outline(conversation)[:6]


def test_what_is_written_is_read_back_whole(tmp_path: Path) -> None:
    """Names and call ids of tool results too, without which some templates refuse them."""
    turns = [
        {"role": "user", "content": "Weather?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {"at": "x"}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "weather"},
    ]
    (one,) = read_prompts(write(tmp_path / "p.jsonl", [{"messages": turns}]))
    while (role := one.next_role()) is not None:
        one.add_turn(role, "Sunny.", 2)
    assert one.messages[::2] == [turns[0], turns[2]]
    one.messages[1] = turns[1]
    assert parse_record(one.to_row())["messages"] == one.messages


def test_bad_prompts_are_named(tmp_path: Path) -> None:
    good = chat("system:Be brief.", "user:Hi")
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ValueError, match=r"line 2: .* of user is int"):
        read_prompts(write(path, [good, {"turns": [3]}]))
    with pytest.raises(ValueError, match=r"line 2: .* a placeholder"):  # of SPEED-Bench, before it is prepared
        read_prompts(write(path, [good, {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}]))
    with pytest.raises(ValueError, match="has nothing to answer"):
        read_prompts(write(path, [chat("system:Be brief.", "assistant:Hi")]))


def test_prompts_that_share_an_id_are_refused(tmp_path: Path) -> None:
    """A resumed run knows by the ids what is done."""
    path = tmp_path / "prompts.jsonl"
    one = {"id": "a", **chat("user:Hi")}
    for other in ({"turns": ["Bye"]}, {"turns": ["Hi", "Bye"]}, chat("system:Be brief.", "user:Hi")):
        write(path, [one, {"turns": ["Bye"]}, {"id": "a", **other}])
        with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3: .* the id 'a'"):
            read_prompts(path)
    write(path, [one, {"id": "b", "turns": ["Hi"]}, one])
    assert [conversation.id for conversation in read_prompts(path)] == ["a", "b"]
    write(path, [{**one, "id": number} for number in (0, 1)])
    assert [conversation.id for conversation in read_prompts(path)] == ["0", "1"], "0 is an id as well"
