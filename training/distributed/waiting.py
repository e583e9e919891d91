"""Processes that wait for one another for as long as it takes: collectives of a run end after `ddp_timeout` seconds."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed


@contextmanager
def _patient_group() -> Iterator[Any]:
    """A group of all processes with a timeout that nobody reaches."""
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=365))
    try:
        yield group
    finally:
        torch.distributed.destroy_process_group(group)


@contextmanager
def one_process_first() -> Iterator[None]:
    """Runs a block on the first process of each machine, and then on the others, which find its results in a cache."""
    if not torch.distributed.is_initialized():
        yield
        return
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    with _patient_group() as group:
        try:
            if not is_first:
                torch.distributed.barrier(group)
            yield
        finally:
            if is_first:
                torch.distributed.barrier(group)


@contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Runs a block on one process of each machine after the other: for what needs much of the machine's memory."""
    own_turn = int(os.environ.get("LOCAL_RANK", "0"))
    with _patient_group() as group:
        for turn in range(torch.distributed.get_world_size()):
            if turn == own_turn:
                yield
            torch.distributed.barrier(group)
