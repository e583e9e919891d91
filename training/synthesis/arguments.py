"""Every option of `scripts/generate_data.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from heads.adapter import find_adapter_of, hash_adapter
from training.data.layouts import AUTO, RecordFormat
from training.synthesis.reply_decoding import TurnSettings


@dataclass
class SynthesisArguments:
    """What to write, and how."""

    target: str = field(
        metadata={"help": "The model that writes: a folder or a hub id. With --endpoint only its tokenizer is read."}
    )
    output: str = field(metadata={"help": "JSON lines to write; gzipped if the name ends in .gz."})
    mode: Literal["regenerate", "self"] = field(
        default="regenerate",
        metadata={"help": "regenerate = answer the user turns of --prompts; self = write both sides."},
    )
    prompts: str | None = field(
        default=None,
        metadata={
            "help": "regenerate: what --dataset of training/train_heads.py takes (files, a folder, a hub id), or JSON "
            "lines of {'turns': ['...']}."
        },
    )
    prompts_split: str = field(
        default="train", metadata={"help": "Split of --prompts to read from a hub id; files have none."}
    )
    dataset_format: str = field(
        default="auto", metadata={"help": "Layout of the records of --prompts, as in training/train_heads.py."}
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Columns of --prompts that go by other names: messages=COLUMN, or prompt=COLUMN response=COLUMN "
            "(and context=, system=, tools=)."
        },
    )
    num_conversations: int | None = field(
        default=None,
        metadata={
            "help": "Conversations to begin (those of no use are dropped). self: required. regenerate: so many "
            "prompts, drawn with --seed; none = all."
        },
    )
    max_turns: int | None = field(
        default=None,
        metadata={"help": "User turns per conversation at most; none = all that are given (regenerate), or 1 (self)."},
    )
    output_format: Literal["sharegpt", "messages"] = field(
        default="sharegpt", metadata={"help": "sharegpt = `conversations` of from and value; messages = role, content."}
    )
    keep_truncated: bool = field(
        default=False,
        metadata={
            "help": "Keep replies cut at --max_new_tokens as the last of their conversations, instead of dropping "
            "them. A chat template then ends them where the target would have gone on."
        },
    )
    heads: str | None = field(
        default=None,
        metadata={
            "help": "Trained heads (folder or hub id) that draft. Faster; the text is the same. Heads that were "
            "trained with an adapter of the target (lora_r) bring it along: then the adapted target writes."
        },
    )
    tree: str | None = field(
        default=None,
        metadata={
            "help": "What --heads draft: chain:DEPTH, dynamic:DEPTH,TOP_K,NODES, auto (the size that pays) or any "
            "other of scripts/generate.py; none = chain:3, because a batch has little room for wide trees."
        },
    )
    batch_size: int = field(default=64, metadata={"help": "Conversations decoded together."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 = greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling: probability mass kept; 1 = all of it."})
    top_k: int = field(default=0, metadata={"help": "Most likely tokens kept; 0 = all."})
    max_new_tokens: int = field(
        default=256, metadata={"help": "Longest turn in tokens; one that reaches it is dropped (see --keep_truncated)."}
    )
    seed: int = field(
        default=0, metadata={"help": "Seed of the choice of prompts and, with each turn's place, of its sampling."}
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "Dtype the target is loaded in; auto = the one its weights were saved in."}
    )
    device: str | None = field(
        default=None, metadata={"help": "Where to run; none = cuda (of several, one for each process), else cpu."}
    )
    num_shards: int = field(
        default=1,
        metadata={
            "help": "Parts that the work is cut into, each for a command of its own (jobs of a cluster). Processes "
            "started together by accelerate or torchrun share a part by themselves."
        },
    )
    shard_index: int = field(default=0, metadata={"help": "Which of --num_shards parts to write, from 0."})
    resume: bool = field(
        default=True, metadata={"help": "Go on with what an earlier run has written; --no_resume stops at it instead."}
    )
    endpoint: str | None = field(
        default=None,
        metadata={
            "help": "Base URL of an OpenAI-compatible server that writes instead, such as http://localhost:8000/v1. "
            "Its key is read from the environment variable OPENAI_API_KEY."
        },
    )
    endpoint_model: str | None = field(
        default=None, metadata={"help": "The name it serves the target under; none = --target as it is written."}
    )
    concurrency: int = field(default=64, metadata={"help": "--endpoint: requests in flight, for each process."})
    endpoint_timeout: float = field(default=600.0, metadata={"help": "--endpoint: seconds to wait for one answer."})
    endpoint_retries: int = field(
        default=8,
        metadata={"help": "--endpoint: further attempts after timeouts, broken connections and status 429 or 5xx."},
    )

    def __post_init__(self) -> None:
        positive = ("batch_size", "max_turns", "num_conversations", "num_shards", "concurrency", "endpoint_timeout")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}: give at least 1")
        if self.endpoint_retries < 0:
            raise ValueError(f"--endpoint_retries is {self.endpoint_retries}: give 0 or more")
        if not 0 <= self.shard_index < self.num_shards:
            raise ValueError(
                f"--shard_index is {self.shard_index}: with --num_shards {self.num_shards} give one from 0 to "
                f"{self.num_shards - 1}"
            )
        if self.endpoint is None and self.endpoint_model is not None:
            raise ValueError(f"--endpoint_model is {self.endpoint_model!r} without --endpoint: give both or neither")
        for name in ("heads", "tree"):
            if self.endpoint is not None and getattr(self, name):
                raise ValueError(f"--{name} is for decoding here, and --endpoint decodes elsewhere: leave one out")
        if self.tree is not None and self.heads is None:
            raise ValueError(f"--tree is {self.tree!r}, but there are no heads to draft: give --heads, or no --tree")
        self._check_mode()
        self.turn_settings()

    def _check_mode(self) -> None:
        if self.mode == "regenerate" and self.prompts is None:
            raise ValueError("--mode regenerate answers given turns: name their file with --prompts")
        if self.mode == "self" and self.prompts is not None:
            raise ValueError(f"--prompts is {self.prompts!r}, but --mode self reads none: leave one of the two out")
        if self.record_format() != AUTO and self.mode == "self":
            raise ValueError(
                "--dataset_format and --columns are of --prompts, and --mode self reads none: leave them out"
            )
        if self.mode == "self" and self.num_conversations is None:
            raise ValueError("--mode self never runs out of prompts: say where to stop with --num_conversations")
        if self.mode == "self" and self.temperature == 0:
            raise ValueError(
                "--temperature is 0, at which --mode self writes one conversation over and over: give more than 0"
            )

    def record_format(self) -> RecordFormat:
        """How the records of --prompts are to be read."""
        return RecordFormat.parse(self.dataset_format, self.columns)

    def turn_settings(self) -> TurnSettings:
        """How every turn is written."""
        return TurnSettings(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    def shard(self) -> tuple[int, int]:
        """(which part this process writes, of how many): those of the command, cut again for processes started
        together."""
        rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return self.shard_index * num_processes + rank, self.num_shards * num_processes

    def settings_of_the_data(self) -> dict[str, Any]:
        """What decides on the text: parts written with other values of these must not be mixed."""
        names = ["target", "mode", "max_turns", "output_format", "keep_truncated", "temperature", "top_p", "top_k"]
        names += ["max_new_tokens", "seed", "dtype"]
        adapter = None if self.heads is None else find_adapter_of(self.heads)
        return {
            **{name: getattr(self, name) for name in names},
            "is_from_endpoint": self.endpoint is not None,
            "adapter_of_target": None if adapter is None else hash_adapter(adapter),
        }
