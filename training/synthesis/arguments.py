"""The options of `draftsmith data`."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from transformers import GenerationConfig

from draftsmith.heads.adapter import find_adapter_of, hash_adapter
from draftsmith.inference.request.model_settings import find_model_settings
from draftsmith.training.data.layouts import AUTO, RecordFormat
from draftsmith.training.data.options import option, refuse_without, require_positive
from draftsmith.training.synthesis.reply_decoding import TurnSettings


@dataclass
class SynthesisArguments:
    """What to write, and how."""

    target: str = option(
        help="The model that writes: a folder, a hub id or a GGUF file. With --endpoint only its tokenizer is read."
    )
    output: str = option(help="JSON lines to write; gzipped if the name ends in .gz.")
    mode: Literal["regenerate", "self"] = option(
        default="regenerate", help="regenerate: answer the user turns of --prompts; self: write both sides."
    )
    prompts: str | None = option(
        default=None,
        help="regenerate: conversations, as draftsmith train takes them, or JSON lines of {'turns': ['...']}.",
    )
    prompts_split: str = option(default="train", help="Split of a hub id in --prompts. Files have no splits.")
    columns: list[str] = option(
        default_factory=list,
        help="Columns of --prompts: messages=COLUMN, or prompt=COLUMN response=COLUMN (context=, system=, tools=).",
    )
    num_conversations: int | None = option(
        default=None,
        help="Most conversations to write. self: required; regenerate: prompts drawn with --seed; none = all prompts.",
    )
    max_turns: int | None = option(
        default=None, help="Most user turns per conversation; none = all given ones (regenerate), or 1 (self)."
    )
    keep_truncated: bool = option(
        default=True,
        help="Keep a reply that was cut at --max_new_tokens as the last one of its conversation. Training does not "
        "learn its end. Without such replies the set has short ones only.",
    )
    heads: str | None = option(
        default=None,
        help="Trained heads (folder or hub id) that draft. The text stays the same, unless the heads bring an adapter "
        "(lora_r).",
    )
    tree: str | None = option(
        default=None,
        help="The tree that --heads draft, as in draftsmith chat; none = chain:3: wide trees cost too much in a batch.",
    )
    batch_size: int = option(default=64, help="Conversations to decode together.")
    temperature: float = option(default=1.0, help="Sampling temperature; 0 = greedy.")
    top_p: float = option(default=1.0, help="Nucleus sampling: probability mass to keep; 1 = all of it.")
    top_k: int = option(default=0, help="Keep the N most likely tokens; 0 = all.")
    max_new_tokens: int = option(
        default=256, help="Longest turn in tokens; a longer one is cut (see --keep_truncated)."
    )
    seed: int = option(default=0, help="Seed of the choice of prompts and of the sampling of every turn.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        default="auto", help="Dtype to load the target in; auto = as saved, or float32 on a CPU without bfloat16."
    )
    device: str | None = option(default=None, help="Where to run; none = cuda (one GPU per process), else cpu.")
    num_shards: int = option(
        default=1,
        help="Parts of the work, one command each. Processes that a launcher starts share a part by themselves.",
    )
    shard_index: int = option(default=0, help="The part of --num_shards to write, from 0.")
    endpoint: str | None = option(
        default=None,
        help="Base URL of an OpenAI-compatible server that writes, such as http://localhost:8000/v1. The key is read "
        "from the environment variable OPENAI_API_KEY.",
    )
    endpoint_model: str | None = option(
        default=None, help="The server's name for the target; none = --target as written."
    )
    concurrency: int = option(default=64, help="--endpoint: requests in flight per process.")

    def __post_init__(self) -> None:
        require_positive(self, ("batch_size", "max_turns", "num_conversations", "num_shards", "concurrency"))
        if not 0 <= self.shard_index < self.num_shards:
            raise ValueError(
                f"--shard_index is {self.shard_index}: with --num_shards {self.num_shards} give one from 0 to "
                f"{self.num_shards - 1}"
            )
        refuse_without(self, "endpoint", ("endpoint_model",))
        refuse_without(self, "heads", ("tree",))
        for name in ("heads", "tree"):
            if self.endpoint is not None and getattr(self, name):
                raise ValueError(f"--{name} is for decoding here, and --endpoint decodes elsewhere: leave one out")
        self._check_mode()
        self.turn_settings()

    def _check_mode(self) -> None:
        if self.mode == "regenerate" and self.prompts is None:
            raise ValueError("--mode regenerate answers the turns of a file: name it with --prompts")
        if self.mode == "self" and self.prompts is not None:
            raise ValueError(f"--prompts is {self.prompts!r}, but --mode self reads none: leave one of the two out")
        if self.record_format() != AUTO and self.mode == "self":
            raise ValueError("--columns describes --prompts, and --mode self reads none: leave it out")
        if self.mode == "self" and self.num_conversations is None:
            raise ValueError("--mode self needs no prompts and never ends: give --num_conversations")
        if self.mode == "self" and self.temperature == 0:
            raise ValueError("--temperature is 0, so --mode self would repeat one conversation: give more than 0")

    def record_format(self) -> RecordFormat:
        """How to read the records of --prompts."""
        return RecordFormat.parse(self.columns)

    def turn_settings(self) -> TurnSettings:
        """How to draw the tokens of every turn."""
        return TurnSettings(self.max_new_tokens, self.temperature, self.top_p, self.top_k)

    def shard(self) -> tuple[int, int]:
        """Returns (this process's part, number of parts): processes that start together split their command's part."""
        rank, num_processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return self.shard_index * num_processes + rank, self.num_shards * num_processes

    def settings_of_the_data(self, generation_config: GenerationConfig | None) -> dict[str, Any]:
        """The settings that determine the text: parts with other values of these must not be mixed.

        Args:
            generation_config: of the target; None = a server's, which is not known.
        """
        names = ["target", "mode", "max_turns", "keep_truncated", "temperature", "top_p", "top_k"]
        names += ["max_new_tokens", "seed", "dtype"]
        adapter = None if self.heads is None else find_adapter_of(self.heads)
        own: dict[str, Any] | None = None
        if generation_config is not None:
            own = find_model_settings(generation_config, self.turn_settings().generate_kwargs())
        return {
            **{name: getattr(self, name) for name in names},
            "is_from_endpoint": self.endpoint is not None,
            "generation_config": own,
            "adapter_of_target": None if adapter is None else hash_adapter(adapter),
        }
