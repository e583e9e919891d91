"""What a run will take: data, parameters, memory, disk and time, from its rows, its options and a few steps of it.

All sizes are bytes, all times seconds. Memory is that of one process.
"""

from __future__ import annotations

import math
import shutil
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from training.features.sharded_target import local_part
from training.losses.teacher import rows_per_chunk

Figures = dict[str, float | int | str]


def row_lengths(rows: datasets.Dataset, name: str) -> list[int]:
    """Tokens of each row (`input_ids`), or how many of them are learned (`loss_mask`)."""
    found: list[int] = []
    for batch in rows.with_format("arrow").iter(1000):
        column = batch[name].combine_chunks()
        if name == "input_ids":
            found += column.value_lengths().to_pylist()
        else:
            sizes = torch.from_numpy(column.value_lengths().to_numpy().copy()).long()
            before = torch.from_numpy(column.flatten().to_numpy().copy()).long().cumsum(0)
            found += torch.cat([before.new_zeros(1), before])[sizes.cumsum(0)].diff(prepend=sizes.new_zeros(1)).tolist()
    return found


def step_sizes(trainer: Any, lengths: Sequence[int]) -> list[int]:
    """Tokens, padding included, of each optimizer step of an epoch in one process."""
    batches = [
        len(batch) * _padded(max(lengths[index] for index in batch), trainer)
        for batch in trainer.get_train_dataloader().batch_sampler
    ]
    every = trainer.args.gradient_accumulation_steps
    return [sum(batches[start : start + every]) for start in range(0, len(batches), every)]


def _padded(length: int, trainer: Any) -> int:
    multiple = getattr(trainer.data_collator, "multiple_of", 1)
    return -(-length // multiple) * multiple


def data_figures(rows: datasets.Dataset, sizes: Sequence[int], num_processes: int) -> Figures:
    """Rows and tokens of an epoch, and how much of its batches is text rather than padding."""
    lengths = sorted(row_lengths(rows, "input_ids"))
    learned = sum(row_lengths(rows, "loss_mask"))
    return {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "tokens that are learned": learned,
        "tokens of a row, median": lengths[len(lengths) // 2],
        "tokens of a row, 95 of 100": lengths[len(lengths) * 95 // 100],
        "tokens of a row, longest": lengths[-1],
        "share of batches that is text": round(sum(lengths) / max(1, sum(sizes) * num_processes), 4),
    }


def parameter_figures(target: nn.Module, heads: nn.Module) -> Figures:
    return {
        "of the target": sum(weight.numel() for weight in target.parameters()),
        "of the heads": sum(weight.numel() for weight in heads.parameters()),
        "that are trained": sum(weight.numel() for weight in heads.parameters() if weight.requires_grad),
    }


def memory_figures(trainer: Any, saved: int, tokens: int) -> Figures:
    """What one process holds while it makes its largest step; exact but for the last batch's tensors, and for the
    buffers in which DeepSpeed and FSDP gather weights and sum gradients.

    Args:
        saved: what autograd kept for the backward pass of the largest batch (`TrialSteps`).
        tokens: of that batch, padding included.
    """
    trained = trainer.accelerator.unwrap_model(trainer.model)
    heads, model, target = trainer.heads, trainer.target.model, trainer.target
    state = [tensor for named in trainer.optimizer.state.values() for tensor in named.values()]
    stage = getattr(trainer.args.deepspeed_plugin, "zero_stage", 0)
    weights = _bytes(weight for weight in trained.parameters() if weight.requires_grad)  # under stage 3 its share
    share = weights // trainer.args.world_size if stage in (1, 2) else weights
    gradients = share if stage == 2 else weights
    copied = share if trainer.is_deepspeed_enabled else 0  # ZeRO's optimizer has its own weights of its share
    columns = target.vocab_size if heads.draft_token_ids is None else len(heads.draft_token_ids)
    chunk = min(tokens, rows_per_chunk(target.vocab_size)) * target.vocab_size * 4
    width = (len(heads.feature_layers) + 1) * target.hidden_size + columns
    figures: Figures = {
        "weights of the target": _bytes([*model.parameters(), *model.buffers()]),
        "weights of the heads": _bytes([*heads.parameters(), *heads.buffers()]),
        "gradients": gradients,
        "optimizer": _bytes(tensor for tensor in state if isinstance(tensor, Tensor)) + copied,
        "states and logits of the target": tokens * width * target.dtype.itemsize,
        "logits in float32, a chunk": 2 * chunk,
        "kept for the backward pass": saved,
    }
    figures["sum"] = sum(int(value) for value in figures.values())
    if torch.cuda.is_available():
        figures["peak that was measured"] = torch.cuda.max_memory_allocated()
    return figures


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages that this process holds; what two tensors share is counted once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class SavedTensors:
    """Bytes of the storages that autograd keeps for backward passes, and how many there were at most.

    Args:
        weights: tensors that are there anyway and not counted.

    Worked example, in float32:

        with saved.watch():
            y = torch.zeros(100, requires_grad=True).exp()    live 400, peak 400: the output
            y.sum().backward()                                live 0, peak 400
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        self.live = 0
        self.peak = 0
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self._uses: dict[int, int] = {}  # of a storage, by its address

    def watch(self) -> AbstractContextManager[Any]:
        """While it is open, what autograd keeps is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _KeptTensor:
        kept = _KeptTensor(tensor)
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._weights:
            if address not in self._uses:
                self.live += size
                self.peak = max(self.peak, self.live)
            self._uses[address] = self._uses.get(address, 0) + 1
            weakref.finalize(kept, self._release, address, size)
        return kept

    def _release(self, address: int, size: int) -> None:
        self._uses[address] -= 1
        if not self._uses[address]:
            del self._uses[address]
            self.live -= size


class _KeptTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TrialSteps(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Seconds of each optimizer step, and bytes that autograd keeps for the backward pass of its largest batch.

    Args:
        weights: those of heads and target, which are counted by themselves.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.seconds: list[float] = []
        self.saved: list[int] = []
        self._tensors = SavedTensors(weights)

    def watch(self) -> AbstractContextManager[Any]:
        """While it is open, what autograd keeps is counted."""
        return self._tensors.watch()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._tensors.peak = self._tensors.live
        self.seconds.append(-_now())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.saved.append(self._tensors.peak)
        self.seconds[-1] += _now()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def disk_figures(checkpoint: Path, output_dir: Path, *, num_saves: int, save_total_limit: int) -> Figures:
    """Of all checkpoints that lie there at once, the one being written, and the heads; and what is free.

    Args:
        checkpoint: one that was written.
        save_total_limit: how many are kept; 0 = all.
    """
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    heads = (checkpoint / "model.safetensors").stat().st_size
    kept = min(num_saves, save_total_limit or num_saves)
    existing = next(folder for folder in (output_dir, *output_dir.resolve().parents) if folder.exists())
    return {
        "a checkpoint": size,
        "checkpoints at once": min(num_saves, kept + 1),
        "the run": min(num_saves, kept + 1) * size + heads,
        "free": shutil.disk_usage(existing).free,
    }


def num_times(strategy: Any, every: float, steps: int, epochs: float) -> int:
    """How often something happens that is done each so many steps (below 1: each such share of all), each epoch, or not
    at all; what is done by steps is also done at the last one, and so is what is done by epochs of a stream."""
    kind = getattr(strategy, "value", strategy)
    if kind == "steps":
        if not every:
            return 1
        return math.ceil(steps / (every if every >= 1 else math.ceil(steps * every)))
    return max(1, math.ceil(epochs)) if kind == "epoch" else 0


def project_seconds(sizes: Sequence[int], steps: int, trials: dict[int, float]) -> float:
    """Seconds of all steps.

    Args:
        sizes: tokens of each step of an epoch (`step_sizes`).
        trials: seconds that steps of so many tokens took; between two of them, and beyond, a straight line.
    """
    (small, fast), (large, slow) = min(trials.items()), max(trials.items())
    slope = max(0.0, slow - fast) / (large - small) if large > small else 0.0
    return sum(max(0.0, fast + slope * (size - small)) for size in islice(cycle(sizes), steps))
