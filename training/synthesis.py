"""A target that writes its own training conversations.

Heads learn to predict the target, so what the target writes teaches them more than what people wrote. Two ways:
answering the user turns of given conversations, turn by turn with its own earlier replies in the context; and writing
whole conversations from nothing but the user header of the chat template (Magpie, arXiv 2406.08464).

Legend: B rows generated together, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from training.data import Messages, parse_conversation, read_records

# Neither whitespace (templates trim) nor anything a template could contain.
_SENTINEL = "@@sentinel-7f3a@@"
# Rows that have ended leave the batch after this many tokens; selecting rows copies the cache, so not after each one.
_TOKENS_PER_ROUND = 32
# Prompts are sorted by length inside a window of this many batches: little padding, and a partial output is a fair
# sample. Also how much work a kill can lose.
_BATCHES_PER_WINDOW = 2


@dataclass
class SynthesisArguments:
    """What to write, and how."""

    target: str = field(metadata={"help": "The model that writes: a folder or a hub id."})
    output: str = field(metadata={"help": "ShareGPT JSON lines to append to; gzipped if the name ends in .gz."})
    mode: Literal["regenerate", "self"] = field(
        default="regenerate",
        metadata={"help": "regenerate = answer the user turns of --prompts; self = write both sides."},
    )
    prompts: str | None = field(
        default=None,
        metadata={"help": "regenerate: JSON or JSON lines, gzipped or not, of `conversations`, `messages` or `turns`."},
    )
    num_conversations: int | None = field(
        default=None,
        metadata={
            "help": "self: conversations the output shall hold in the end (required). regenerate: so many prompts, "
            "drawn with --seed; none = all."
        },
    )
    batch_size: int = field(default=128, metadata={"help": "Rows generated together."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling: probability mass kept; 1 = all of it."})
    max_new_tokens: int = field(
        default=256, metadata={"help": "Longest turn in tokens; one that reaches it is dropped."}
    )
    max_turns: int | None = field(
        default=None,
        metadata={"help": "User turns per conversation at most; none = all that are given (regenerate), or 1 (self)."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the choice of prompts and of the sampling."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Dtype the target is loaded in; auto = the one its weights were saved in."}
    )
    device: str | None = field(default=None, metadata={"help": "Where to run; none = cuda if there is one, else cpu."})
    resume: bool = field(
        default=True, metadata={"help": "Continue an output that exists; --no_resume stops at one instead."}
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens", "max_turns", "num_conversations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}: give at least 1")
        if self.temperature < 0:
            raise ValueError(f"--temperature is {self.temperature}: give 0 for greedy, or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p is {self.top_p}: give more than 0 and at most 1")
        if self.mode == "regenerate" and self.prompts is None:
            raise ValueError("--mode regenerate answers given turns: name their file with --prompts")
        if self.mode == "self" and self.prompts is not None:
            raise ValueError(f"--prompts is {self.prompts!r}, but --mode self reads none: leave one of the two out")
        if self.mode == "self" and self.num_conversations is None:
            raise ValueError("--mode self never runs out of prompts: say where to stop with --num_conversations")
        if self.mode == "self" and self.temperature == 0:
            raise ValueError(
                "--temperature is 0, at which --mode self writes one conversation over and over: give more than 0"
            )


@dataclass
class Conversation:
    """One that is being written: its messages so far, and the user turns still to be answered."""

    id: str
    source: str
    messages: Messages = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    is_open: bool = True

    def to_sharegpt(self) -> dict[str, Any]:
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        turns = [{"from": names[message["role"]], "value": message["content"]} for message in self.messages]
        return {"id": self.id, "source": self.source, "conversations": turns}


def read_prompts(path: Path) -> list[Conversation]:
    """The user turns of every conversation of a file, and its system prompt.

    Raises:
        ValueError: a line that is no conversation, or has the id of another prompt; names file and line.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path} does not exist")
    conversations: list[Conversation] = []
    by_id: dict[str, Conversation] = {}
    for number, record in read_records(path):
        try:
            if isinstance(record, Exception):
                raise ValueError(str(record))
            turns = record.get("turns") if isinstance(record, dict) else None
            if isinstance(turns, list):
                record = {**record, "messages": [{"role": "user", "content": turn} for turn in turns]}
            messages = parse_conversation(record)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}. Mend it or leave it out") from error
        texts = [message["content"] for message in messages if message["role"] == "user"]
        if texts:
            name = str(record.get("id") or hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16])
            system = messages[:1] if messages[0]["role"] == "system" else []
            conversation = Conversation(name, str(record.get("source", path.name)), system, texts)
            other = by_id.setdefault(name, conversation)
            if (other.messages, other.turns) != (system, texts):
                raise ValueError(
                    f"{path}, line {number}: another prompt above has the id {name!r}, and a resumed run would take "
                    "this one for done: give each an id of its own, or none"
                )
            conversations.append(conversation)
    return conversations


class ChatTemplate:
    """What a tokenizer's chat template puts around turns, found by rendering.

    Raises:
        ValueError: there is no template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template: take a chat model")
        self.tokenizer = tokenizer
        self.special_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def render_prompt(self, messages: Messages) -> str:
        """All that stands before the assistant's next text."""
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def render_user_header(self, messages: Messages) -> str:
        """All that stands before the user's next text. ChatML, first turn: `<|im_start|>user` and a line break."""
        return self._render_around([*messages, {"role": "user", "content": _SENTINEL}])[0]

    def find_turn_end(self, role: Literal["user", "assistant"]) -> int | None:
        """The special token right behind a turn's text; None where there is ordinary text."""
        opening = [] if role == "user" else [{"role": "user", "content": "Hi"}]
        _, behind = self._render_around([*opening, {"role": role, "content": _SENTINEL}])
        ids = self.encode(behind.lstrip())
        return ids[0] if ids and ids[0] in self.special_ids else None

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render_around(self, messages: Messages) -> tuple[str, str]:
        rendered: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        if rendered.count(_SENTINEL) != 1:
            raise ValueError(f"the chat template writes one turn's text {rendered.count(_SENTINEL)} times: use another")
        before, _, behind = rendered.partition(_SENTINEL)
        return before, behind


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: `DynamicLayer` copies all of itself for each token, 60% of the time at B 128."""

    spare_tokens = 128

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [B, heads, T, width]; returns views of all that are there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers: list[torch.Tensor] = []
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.buffers or end > self.buffers[0].shape[-2]:
            old: list[Any] = [self.keys, self.values]
            self.buffers = [
                states.new_empty(*states.shape[:2], end + self.spare_tokens, states.shape[3])
                for states in (key_states, value_states)
            ]
            if start:
                for buffer, states in zip(self.buffers, old, strict=True):
                    buffer[:, :, :start] = states
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self.buffers = []


def is_looping(ids: Sequence[int], *, max_period: int = 32, min_repeats: int = 4, min_tokens: int = 24) -> bool:
    """Whether text ends in a block of up to `max_period` tokens repeated `min_repeats` times over `min_tokens`.

    Worked example: [7, 8] * 12 loops; [7, 8] * 11 is still too short; thirty different tokens do not.
    """
    for period in range(1, max_period + 1):
        length = max(min_repeats * period, min_tokens)
        tail = ids[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


class TurnWriter:
    """Writes one turn for many prompts with `transformers.generate`; rows that have ended leave the batch.

    Raises:
        ValueError: no position is left for a prompt.
    """

    def __init__(self, model: PreTrainedModel, template: ChatTemplate, args: SynthesisArguments) -> None:
        self.model: Any = model
        self.template = template
        self.batch_size, self.max_new_tokens = args.batch_size, args.max_new_tokens
        self.sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if args.temperature > 0:  # top_k 0: transformers' own default keeps 50 tokens
            self.sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_prompt_tokens = limit - args.max_new_tokens if limit else None
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(
                f"--max_new_tokens is {args.max_new_tokens}, but the target has {limit} positions: give less"
            )

    def write(self, prompts: Sequence[str], stop_ids: set[int]) -> list[tuple[str, str]]:
        """(text, why it is of no use; "" if it is) of the turn that follows each prompt."""
        ids = [self.template.encode(prompt) for prompt in prompts]
        turns = [("", "prompt too long")] * len(prompts)
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        if self.max_prompt_tokens is not None:
            order = [row for row in order if len(ids[row]) <= self.max_prompt_tokens]
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            written = self._write_batch([ids[row] for row in rows], stop_ids)
            for row, tokens in zip(rows, written, strict=True):
                turns[row] = self._judge(tokens, stop_ids)
        return turns

    def _judge(self, tokens: list[int], stop_ids: set[int]) -> tuple[str, str]:
        is_ended = bool(tokens) and tokens[-1] in stop_ids
        ids = tokens[:-1] if is_ended else tokens
        text: str = self.template.tokenizer.decode(ids)
        if is_looping(ids):
            return text, "looping"
        if not is_ended:
            return text, "truncated"
        if not self.template.special_ids.isdisjoint(ids):
            return text, "special token inside"
        return text, "" if text.strip() else "empty"

    @torch.inference_mode()
    def _write_batch(self, prompts: list[list[int]], stop_ids: set[int]) -> list[list[int]]:
        """Tokens for each prompt, the stop token last if there was one within `max_new_tokens`."""
        width = max(map(len, prompts))
        pad = self.template.tokenizer.pad_token_id
        pad = min(stop_ids) if pad is None else pad
        padding = [width - len(prompt) for prompt in prompts]
        input_ids = torch.tensor(
            [[pad] * n + p for n, p in zip(padding, prompts, strict=True)], device=self.model.device
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=self.model.device)
        cache = DynamicCache(config=self.model.config)
        cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        rows = list(range(len(prompts)))
        written: list[list[int]] = [[] for _ in prompts]
        for done in range(0, self.max_new_tokens, _TOKENS_PER_ROUND):
            start = input_ids.shape[1]
            input_ids = self.model.generate(
                input_ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=min(_TOKENS_PER_ROUND, self.max_new_tokens - done),
                eos_token_id=sorted(stop_ids),
                pad_token_id=pad,
                **self.sampling,
            )
            kept = []
            for place, (row, new) in enumerate(zip(rows, input_ids[:, start:].tolist(), strict=True)):
                end = next((count for count, token in enumerate(new, start=1) if token in stop_ids), None)
                written[row] += new[:end]
                if end is None and not is_looping(written[row]):
                    kept.append(place)
            if not kept:
                break
            mask = torch.cat([mask, mask.new_ones(len(rows), input_ids.shape[1] - mask.shape[1])], dim=1)
            if len(kept) < len(rows):
                rows = [rows[place] for place in kept]
                index = torch.tensor(kept, device=input_ids.device)
                input_ids, mask = input_ids[index], mask[index]
                cache.batch_select_indices(index)
        return written


class Synthesizer:
    """Writes conversations, a window of `_BATCHES_PER_WINDOW` batches at a time.

    `dropped` counts the turns that were of no use, by reason. A conversation ends before such a turn, and is dropped
    if that was its first.

    Raises:
        ValueError: the template does not show where a user turn ends (`self` needs it).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, args: SynthesisArguments) -> None:
        self.args, self.template = args, ChatTemplate(tokenizer)
        self.writer = TurnWriter(model, self.template, args)
        self.dropped: Counter[str] = Counter()
        ends = model.generation_config.eos_token_id
        reply_ends = {*(ends if isinstance(ends, list) else [ends]), self.template.find_turn_end("assistant")}
        self.reply_ends = {token_id for token_id in reply_ends if token_id is not None}
        if not self.reply_ends:
            raise ValueError("neither the target's generation_config nor its chat template names an end of turn")
        self.user_end = self.template.find_turn_end("user")
        if args.mode == "self" and self.user_end is None:
            raise ValueError(
                "the chat template ends a user turn with ordinary text, so that the end of one the target writes "
                "cannot be seen: use --mode regenerate"
            )

    def synthesize(
        self, rows: Sequence[dict[str, Any]], prompts: Sequence[Conversation] = ()
    ) -> Iterator[list[Conversation]]:
        """Windows of conversations, without end in mode self.

        Args:
            rows: what the output holds already; their ids are not written again.
            prompts: what to answer in mode regenerate; they become the conversations.
        """
        torch.manual_seed(self.args.seed + len(rows))  # a resumed run must not repeat its first conversations
        for window in self._plan(rows, prompts, self.args.batch_size * _BATCHES_PER_WINDOW):
            yield self._write_window(window)

    def _plan(
        self, rows: Sequence[dict[str, Any]], prompts: Sequence[Conversation], size: int
    ) -> Iterator[list[Conversation]]:
        done = {str(row.get("id")) for row in rows}
        if self.args.mode == "regenerate":
            shuffled = [*prompts]
            random.Random(self.args.seed).shuffle(shuffled)
            missing = [prompt for prompt in shuffled[: self.args.num_conversations] if prompt.id not in done]
            yield from (missing[start : start + size] for start in range(0, len(missing), size))
            return
        prefix = f"self-{self.args.seed}-"
        number = max((int(name.removeprefix(prefix)) + 1 for name in done if name.startswith(prefix)), default=0)
        while True:
            yield [Conversation(f"{prefix}{number + place}", "self") for place in range(size)]
            number += size

    def _write_window(self, window: list[Conversation]) -> list[Conversation]:
        given = 1 if self.args.mode == "self" else max(len(conversation.turns) for conversation in window)
        for _ in range(self.args.max_turns or given):
            if self.user_end is not None and self.args.mode == "self":
                self._write_turn(window, "user", self.template.render_user_header, {self.user_end})
            else:
                for conversation in window:
                    conversation.is_open = conversation.is_open and bool(conversation.turns)
                    if conversation.is_open:
                        conversation.messages.append({"role": "user", "content": conversation.turns.pop(0)})
            self._write_turn(window, "assistant", self.template.render_prompt, self.reply_ends)
        for conversation in window:
            if conversation.messages and conversation.messages[-1]["role"] == "user":
                conversation.messages.pop()  # its reply was of no use
        return [each for each in window if any(message["role"] == "assistant" for message in each.messages)]

    def _write_turn(
        self, window: list[Conversation], role: str, render: Callable[[Messages], str], stop_ids: set[int]
    ) -> None:
        active = [conversation for conversation in window if conversation.is_open]
        turns = self.writer.write([render(conversation.messages) for conversation in active], stop_ids)
        for conversation, (text, problem) in zip(active, turns, strict=True):
            if problem:
                conversation.is_open = False
                self.dropped[f"{role} turn {problem}"] += 1
            else:
                conversation.messages.append({"role": role, "content": text})
