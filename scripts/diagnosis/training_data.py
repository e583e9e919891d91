"""What a diagnosis reads of the training conversations: who wrote the replies, what is learned, how they begin."""

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.scripts.diagnosis.evidence import score
from draftsmith.training.data.chat_tokens import count_problems, tokenize_conversations
from draftsmith.training.data.conversations import load_conversations
from draftsmith.training.synthesis.prompts import Conversation

MOST_CONVERSATIONS = 256
SCORED, SCORED_TOKENS = 16, 512  # conversations whose replies the target scores, and tokens of each


@dataclass(frozen=True)
class TrainingData:
    """The first conversations of a data set.

    Attributes:
        num_read, num_used: conversations; those that training drops are not used.
        trained_share: of the tokens, those with a loss.
        losses: [conversations] float32, the mean cross-entropy of each one's replies under the target.
        system: the system prompt that most conversations have, "" = none, and the share of conversations with it.
        prompts: of the conversations that the target scored, up to the first reply.
    """

    num_read: int
    num_used: int
    trained_share: float
    losses: Tensor
    system: tuple[str, float]
    prompts: list[Conversation]


def read_data(dataset: Sequence[str], target: Target, tokenizer: Any, *, max_length: int) -> TrainingData:
    """Reads the first conversations of files, folders or hub ids.

    Raises:
        ValueError: none can be read.
    """
    conversations = load_conversations(dataset, max_samples=MOST_CONVERSATIONS, skip_bad_lines=True)
    messages = [json.loads(text)["messages"] for text in conversations["conversation"][:]]
    rows = tokenize_conversations(conversations, tokenizer, max_length=max_length, num_proc=1, skip_bad_lines=True)
    _, _, used = count_problems(rows)
    systems = Counter(map(system_of, messages))
    before_reply = [[*takewhile(lambda message: message["role"] != "assistant", one)] for one in messages]
    system, count = systems.most_common(1)[0]
    kept = [rows[place] for place in used]
    num_tokens = sum(len(row["input_ids"]) for row in kept)
    chosen = [place for place in used if 0 < len(before_reply[place]) < len(messages[place])][:SCORED]
    return TrainingData(
        len(messages),
        len(used),
        sum(sum(row["loss_mask"]) for row in kept) / max(num_tokens, 1),
        torch.tensor([_score_replies(target, rows[place]) for place in chosen]),
        (system, count / len(messages)),
        [Conversation(str(place), "", deque([*before_reply[place], "assistant"])) for place in chosen],
    )


def _score_replies(target: Target, row: dict[str, Any]) -> float:
    ids = torch.tensor([row["input_ids"][:SCORED_TOKENS]], device=target.device)
    mask = torch.tensor(row["loss_mask"][:SCORED_TOKENS], dtype=torch.bool)
    return float(score(target, ids)[0][mask].mean()) if mask.any() else float("nan")


def system_of(messages: Sequence[dict[str, Any]]) -> str:
    """The system prompt; "" = none."""
    return str(messages[0]["content"]) if messages and messages[0]["role"] == "system" else ""
