"""The two data sets of the ablation: what the target replied and what people replied, to the same prompts.

Both hold conversations in one order, whole but for the last tokens (`max_length`), up to the same number of tokens.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.benchmarks.report import write_text
from training.data.chat_tokens import tokenize_conversation
from training.data.layouts import parse_conversation
from training.data.records import read_records
from training.synthesis.prompts import find_id

ROOT = Path(__file__).resolve().parents[2]
REGENERATED, HUMAN = "regenerated", "human"
MAX_TURNS = 2  # later ones are mostly cut off (max_length), and take the longest to write
SHORTFALL = 0.02  # how far below the budget a data set may end

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class DataPlan:
    """folder: where the data sets go. conversations: people's; None = the data sets must be there. replies: what the
    target replied to their prompts, of generate_data.py; None = num_conversations of them are made. budget: tokens of a
    data set (of an epoch), each conversation cut to max_length."""

    folder: Path
    conversations: Path | None
    replies: Path | None
    target: str
    budget: int
    max_length: int
    num_conversations: int
    seed: int


def prepare_data(plan: DataPlan) -> dict[str, Any]:
    """Makes both data sets unless they are there, and returns what `data.json` says of them.

    Raises:
        ValueError: there are none and nothing to make them of, too few conversations, or those there are of another
            budget.
    """
    record = plan.folder / "data.json"
    if record.exists():
        found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        wanted = {"budget": plan.budget, "max_length": plan.max_length, "target": plan.target}
        if (had := {key: found[key] for key in wanted}) != wanted:
            raise ValueError(
                f"{plan.folder} holds an ablation with {had}, and {wanted} is asked for: give another --output"
            )
        return found
    if plan.conversations is None:
        raise ValueError(
            f"{plan.folder} has no data yet: give --conversations FILE (make ablation CONVERSATIONS=FILE), ShareGPT or "
            f"`messages` conversations of people with an assistant, about {plan.num_conversations:,} for a budget of "
            f"{plan.budget:,} tokens; the target replies to their prompts first. To try it: --conversations "
            "examples/conversations.jsonl.gz --num_conversations 128 --budget 8000 --output outputs/ablation-trial"
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    replies = plan.replies
    if replies is None:
        replies = plan.folder / "replies.jsonl.gz"
        _regenerate(plan, replies)
    conversations = _pair(replies, plan.conversations)
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    counts = {
        name: _write_budget(plan, tokenizer, name, [pair[place] for pair in conversations])
        for place, name in enumerate((REGENERATED, HUMAN))
    }
    found = {"budget": plan.budget, "max_length": plan.max_length, "target": plan.target, "sets": counts}
    write_text(record, json.dumps(found, indent=1) + "\n")
    return found


def _regenerate(plan: DataPlan, output: Path) -> None:
    """The target's replies; goes on with what an interrupted run has written."""
    command = [sys.executable, str(ROOT / "scripts" / "generate_data.py"), "--target", plan.target]
    command += ["--prompts", str(plan.conversations), "--output", str(output), "--seed", str(plan.seed)]
    command += ["--num_conversations", str(plan.num_conversations), "--batch_size", "256"]
    command += ["--max_turns", str(MAX_TURNS)]
    if subprocess.run(command, check=False).returncode:
        raise ValueError("generate_data.py ended with an error, see above; run this command again to go on")


def _pair(replies: Path, conversations: Path) -> list[tuple[Messages, Messages]]:
    """For each conversation with the target, in order, its messages and those of the people who wrote the prompts, as
    many turns."""
    by_id = dict(_read_by_id(conversations))
    pairs = []
    for name, messages in _read_by_id(replies):
        if name not in by_id:
            raise ValueError(
                f"{replies} has the conversation {name!r}, which {conversations} lacks: give the same file"
            )
        num_replies = _count_replies(messages)
        human = by_id[name]
        places = [place for place, message in enumerate(human) if message["role"] == "assistant"]
        if num_replies and len(places) >= num_replies:
            pairs.append((messages, human[: places[num_replies - 1] + 1]))
    return pairs


def _read_by_id(path: Path) -> Iterator[tuple[str, Messages]]:
    """Every conversation with a prompt, by the id that `generate_data.py` gives it."""
    for number, record in read_records(path):
        try:
            messages = parse_conversation(record)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if any(message["role"] == "user" for message in messages):
            yield find_id(record, messages), messages


def _count_replies(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _write_budget(plan: DataPlan, tokenizer: Any, name: str, conversations: list[Messages]) -> dict[str, int]:
    """The first conversations that fit the budget, and how many these are and hold."""
    lines, num_tokens, num_trained = [], 0, 0
    for messages in conversations:
        input_ids, loss_mask = tokenize_conversation(messages, tokenizer)
        length, trained = len(input_ids[: plan.max_length]), sum(loss_mask[: plan.max_length])
        if not trained:
            continue
        if num_tokens + length > plan.budget:
            break
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        num_tokens, num_trained = num_tokens + length, num_trained + trained
    else:  # there were no more; a hundredth or two does not matter
        if num_tokens < (1 - SHORTFALL) * plan.budget:
            raise ValueError(
                f"{len(conversations)} conversations hold {num_tokens:,} tokens ({name}), the budget is "
                f"{plan.budget:,}: give more --num_conversations, or a smaller --budget"
            )
    path = plan.folder / f"{name}.jsonl.gz"
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    scratch.replace(path)
    return {"conversations": len(lines), "tokens": num_tokens, "trained_tokens": num_trained}
