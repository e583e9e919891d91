"""The host waits for no device while a training batch is computed: every kind of heads trains on the device `meta`,
whose tensors have no values, so that reading one is an error; masks and indices stay on the host with theirs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.training.data.collation import ConversationCollator
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.inference.runners.stand_in import RefuseHostTensors
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target
from tests.training.run.test_trainer import make_rows, make_trainer

DEVICE = torch.device("meta")
PLAIN = make_rows([(3, 9), (4, 20), (2, 5)])
PACKED = [
    {"input_ids": random_prompt(40)[0].tolist(), "loss_mask": ([0] * 3 + [1] * 7) * 4, "document_lengths": [10, 20, 10]}
]


class RefuseWaits(TorchDispatchMode):
    """Raises where an operator mixes the device with the host, unless it is a copy that nobody waits for. Numbers may
    be tensors of no dimension on the host: they are arguments of a kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)]
        devices = {value.device for value in tensors if value.dim() or "copy" in func.name()}
        if len(devices) > 1 and not (kwargs or {}).get("non_blocking"):
            raise AssertionError(f"{func} mixes {devices}")
        return result


class RefuseValues(RefuseHostTensors):
    """`RefuseHostTensors` on the device alone."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def run_batch(name: str, rows: list[dict[str, Any]], folder: Path) -> DraftHeads:
    """One micro-batch, forward and backward, as the trainer runs it between two steps of the optimizer."""
    target = Target(tiny_target("llama"))
    kind, overrides = dict(zip(VARIANT_IDS, VARIANTS, strict=True))[name]
    heads = tiny_heads(kind, target, **overrides)
    options = {"depth_weights": "d_pace"} if name.endswith("1") else {}
    trainer = make_trainer(target, heads, folder, PLAIN, **options)
    target.model.to(DEVICE)
    target.device = target.backbone.device = DEVICE
    nn.Module.to(heads, DEVICE).train()
    batch = ConversationCollator(0)(rows)
    batch["input_ids"] = batch["input_ids"].to(DEVICE)
    with RefuseWaits(), RefuseValues():
        batches, count = trainer.get_batch_samples(iter([batch]), 1, DEVICE)
        trainer._track_num_input_tokens(batches[0])
        loss = trainer.compute_loss(heads, batches[0], num_items_in_batch=count)
        loss.backward()
    return heads


BATCHES = {f"{name}-packed": (name, PACKED) for name in VARIANT_IDS} | {
    f"{name}-plain": (name, PLAIN) for name in VARIANT_IDS
}
# By default one configuration of each kind, packed, one with its own options, and a plain one.
QUICK = {name for name in BATCHES if name.endswith("0-packed")} | {"eagle3-1-packed", "block-0-plain"}


@pytest.mark.parametrize(("name", "rows"), slow_but(QUICK, BATCHES))
def test_a_batch_without_waiting(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    heads = run_batch(name, rows, tmp_path)
    assert all(weight.grad is not None for weight in heads.parameters() if weight.requires_grad)
