"""Masks and indices of a batch that stay on the host, where they are counted, so that no step waits for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor that stays on the host where Trainer, accelerate, DDP and FSDP move tensors to the device."""

    values: Tensor


def read_on_host(values: Tensor | OnHost) -> Tensor:
    """The tensor on the host. The host waits for a tensor that is on a device."""
    return values.values if isinstance(values, OnHost) else values.cpu()


def send(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the host does not wait for the copy."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # or the host waits in spite of `non_blocking`
    return values.to(device, non_blocking=True)
