"""On-policy training data: at the beginning of each epoch, the target answers some of the conversations anew.

A rewritten conversation keeps the messages to the target. Every reply is written again, turn by turn, after the
target's own earlier replies. The drawn tokens are the row, so nothing is tokenized again. The current heads draft.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, DynamicTree, GenerationStats, Target
from draftsmith.inference.request.model_settings import describe_model_settings, find_model_settings
from draftsmith.training.data.options import option, refuse_without, seed_of_data
from draftsmith.training.synthesis.reply_decoding import TurnDecoder, TurnSettings, turn_seed
from draftsmith.training.synthesis.turn_template import TurnTemplate

logger = logging.getLogger(__name__)
FILE = "on_policy.safetensors"
# Small trees gain most in batches. The size is fixed, because the tree that verifies a token can affect its rounding.
TREE = DynamicTree(depth=3, top_k=4, num_nodes=8)
Row = dict[str, list[int]]


@dataclass
class OnPolicyArguments:
    """Replies that the target writes during training."""

    on_policy_fraction: float = option(
        default=0.0,
        help="Share of the conversations whose replies the target rewrites before each epoch, each time others; 0 = "
        "none.",
    )
    on_policy_temperature: float = option(default=1.0, help="Temperature of these replies; 0 = greedy.")
    on_policy_max_new_tokens: int = option(
        default=256, help="Longest reply in tokens; a conversation with a longer one stays as it is."
    )
    on_policy_batch_size: int = option(default=32, help="Replies to decode together in each process.")

    def __post_init__(self) -> None:
        if not 0 <= self.on_policy_fraction <= 1:
            raise ValueError(f"got on_policy_fraction {self.on_policy_fraction}: it must be from 0 to 1")
        if self.on_policy_batch_size < 1:
            raise ValueError(f"got on_policy_batch_size {self.on_policy_batch_size}: it must be at least 1")
        self.turn_settings()
        refuse_without(self, "on_policy_fraction", self.__dataclass_fields__.keys())

    @property
    def is_on(self) -> bool:
        return self.on_policy_fraction > 0

    def turn_settings(self) -> TurnSettings:
        return TurnSettings(self.on_policy_max_new_tokens, self.on_policy_temperature)


@dataclass(frozen=True)
class Rewritten:
    """The row of a conversation with new replies, by its index; or, with row None, why it stays unchanged."""

    index: int
    row: Row | None
    problem: str = ""


def split_turns(row: Mapping[str, Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Returns the tokens before each reply, and the tokens after the last one.

    Worked example: ids [1, 2, 3, 4, 5, 6, 7] with loss mask [0, 0, 1, 1, 0, 1, 0] hold the replies (3, 4) and (6):
    [1, 2] and [5] are before them, [7] is after the last.
    """
    prompts: list[list[int]] = []
    given: list[int] = []
    tokens = zip(row["input_ids"], row["loss_mask"], strict=True)
    for is_reply, group in groupby(tokens, key=lambda pair: bool(pair[1])):
        if is_reply:
            prompts.append(given)
            given = []
        else:
            given = [token for token, _ in group]
    return prompts, given


def rewrite_rows(
    rows: Mapping[int, Mapping[str, Sequence[int]]],
    writer: TurnDecoder,
    *,
    stop_ids: Collection[int],
    seed: int,
    max_length: int,
    marks: Sequence[Sequence[int]] = (),
) -> list[Rewritten]:
    """Replaces the replies of rows (by index) by the target's; a row with a useless reply stays unchanged.

    All tokens between replies are kept. The run's seed, the row's index and the turn give the seed of each reply.
    """
    scripts = {index: split_turns(row) for index, row in rows.items()}
    new: dict[int, Row] = {index: {"input_ids": [], "loss_mask": []} for index in rows}
    problems = {index: "no prompt" for index, (prompts, _) in scripts.items() if not prompts[0]}
    for turn in range(max((len(prompts) for prompts, _ in scripts.values()), default=0)):
        going_on = [index for index, (prompts, _) in scripts.items() if len(prompts) > turn and index not in problems]
        for index in going_on:
            _extend(new[index], scripts[index][0][turn], in_loss=False)
        written = writer.write(
            [new[index]["input_ids"] for index in going_on],
            stop_ids=stop_ids,
            seeds=[turn_seed(seed, str(index), turn) for index in going_on],
            marks=marks,
        )
        for index, reply in zip(going_on, written, strict=True):
            _extend(new[index], reply.token_ids, in_loss=True)
            if reply.problem:
                problems[index] = reply.problem
    for index, (_, rest) in scripts.items():
        _extend(new[index], rest, in_loss=False)
    return [
        Rewritten(index, None, problems[index])
        if index in problems
        else Rewritten(index, {name: values[:max_length] for name, values in row.items()})
        for index, row in new.items()
    ]


def _extend(row: Row, token_ids: Sequence[int], *, in_loss: bool) -> None:
    row["input_ids"] += token_ids
    row["loss_mask"] += [int(in_loss)] * len(token_ids)


class OnPolicyRows(Dataset[Any]):
    """Training rows, some of which are replaced in each epoch.

    A checkpoint stores the replaced rows of its epoch: the target or its rounding may differ when a run is resumed.
    """

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows
        self.epoch: int | None = None  # of the replaced rows
        self.new: dict[int, dict[str, np.ndarray]] = {}  # by index
        self._resumed: dict[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[index]
        return {**row, **{name: values.tolist() for name, values in self.new.get(int(index), {}).items()}}

    def choose(self, fraction: float, *, seed: int, epoch: int) -> list[int]:
        """Draws the rows to replace in an epoch: the same in every process, different in every epoch."""
        generator = torch.Generator().manual_seed(turn_seed(seed, "on-policy rows", epoch))
        return torch.randperm(len(self), generator=generator)[: round(fraction * len(self))].tolist()

    def replace(self, epoch: int, rewritten: Sequence[Rewritten]) -> None:
        """Replaces these rows from now on, instead of the earlier ones."""
        self.epoch = epoch
        self.new = {
            one.index: {name: np.asarray(values, dtype=np.int32) for name, values in one.row.items()}
            for one in rewritten
            if one.row is not None
        }

    def save(self, folder: Path) -> None:
        """Saves the replaced rows into a checkpoint."""
        if self.epoch is not None:
            rows = {f"{index}.{name}": values for index, row in self.new.items() for name, values in row.items()}
            save_file({"epoch": np.array(self.epoch), **rows}, folder / FILE)

    def load(self, checkpoint: Path) -> None:
        """Reads the replaced rows of a checkpoint, for `resume`.

        Raises:
            ValueError: the checkpoint has none.
        """
        if not (checkpoint / FILE).is_file():
            raise ValueError(f"cannot resume from {checkpoint}: {FILE} is missing; resume from another checkpoint")
        self._resumed = load_file(checkpoint / FILE)

    def resume(self, epoch: int) -> bool:
        """Whether the checkpoint has the rows of `epoch`; then it puts them in place."""
        stored, self._resumed = self._resumed, None  # not in `load`: Trainer reads lengths before
        if stored is None or int(stored.pop("epoch")) != epoch:
            return False
        self.epoch, self.new = epoch, {}
        for key, values in stored.items():
            index, _, name = key.partition(".")
            self.new.setdefault(int(index), {})[name] = values
        return True


class WriteReplies(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Replaces rows at the beginning of an epoch: every process writes its share and gets all.

    Heads that are already trained (`drafts_at_once`) draft before the first step too.

    Raises:
        ValueError: nothing ends a reply, the target has too few positions, or processes share its weights.
    """

    def __init__(
        self,
        trainer: Any,
        rows: OnPolicyRows,
        tokenizer: Any,
        args: OnPolicyArguments,
        *,
        max_length: int,
        drafts_at_once: bool,
    ) -> None:
        if trainer.num_groups is not None:
            raise ValueError(
                "got on_policy_fraction where processes share weights (FSDP, ZeRO-3, shard_target) and cannot decode "
                "on their own: train under DDP, ZeRO-1 or ZeRO-2, or write the replies before (draftsmith data)"
            )
        self.trainer, self.rows, self.args = trainer, rows, args
        self.max_length, self.drafts_at_once = max_length, drafts_at_once
        self.template = TurnTemplate(tokenizer)
        generation_config = trainer.target.model.generation_config
        self.stop_ids = self.template.find_stop_ids(generation_config.eos_token_id)["assistant"]
        self.settings = args.turn_settings()
        self.model_settings = find_model_settings(generation_config, self.settings.generate_kwargs())
        if self.model_settings:
            logger.info("on-policy replies: %s", describe_model_settings(self.model_settings))
        self._make_writer(None)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = int(state.epoch or 0)
        if self.rows.resume(epoch):
            return
        start = time.perf_counter()
        writer = self._make_writer(self.trainer.heads if state.global_step or self.drafts_at_once else None)
        chosen = self.rows.choose(self.args.on_policy_fraction, seed=self._seed, epoch=epoch)
        own = chosen[args.process_index :: args.world_size]
        rewritten = gather_object(self._write(own, epoch, writer))
        self.rows.replace(epoch, sorted(rewritten, key=lambda one: one.index))
        self.trainer.log(_describe(rewritten, writer.stats, time.perf_counter() - start))

    @property
    def _seed(self) -> int:
        return seed_of_data(self.trainer.args)

    def _write(self, indices: Sequence[int], epoch: int, writer: TurnDecoder) -> list[Rewritten]:
        model: nn.Module = self.trainer.model
        model.eval()  # adapters may have dropout
        return rewrite_rows(
            {index: self.rows.rows[index] for index in indices},
            writer,
            stop_ids=self.stop_ids,
            seed=turn_seed(self._seed, "on-policy replies", epoch),
            max_length=self.max_length,
            marks=self.template.marks,
        )

    def _make_writer(self, heads: DraftHeads | None) -> TurnDecoder:
        target: Target = self.trainer.target
        decoder = Decoder(target) if heads is None else Decoder(target, heads, tree=TREE)
        return TurnDecoder(
            decoder,
            self.settings,
            tokenizer=self.template.tokenizer,
            batch_size=self.args.on_policy_batch_size,
            special_ids=self.template.special_ids,
        )


def _describe(rewritten: Sequence[Rewritten], stats: GenerationStats, seconds: float) -> dict[str, float]:
    """Returns counts of all processes, and this process's time, speed and acceptance length."""
    kept = Counter(one.problem for one in rewritten if one.row is None)
    return {
        "on_policy_replaced": sum(one.row is not None for one in rewritten),
        **{f"on_policy_kept_{problem.replace(' ', '_')}": count for problem, count in sorted(kept.items())},
        "on_policy_seconds": round(seconds, 2),
        "on_policy_tokens_per_second": round(stats.num_new_tokens / max(seconds, 1e-9), 1),
        "on_policy_acceptance_length": round(stats.acceptance_length, 3),
    }
