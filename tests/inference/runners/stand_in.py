"""A stand-in for a GPU on a machine without one, and lints for code that a GPU would wait for.

Under torch's `FakeTensorMode` tensors have a device and a shape, and no values. This build has no kernels for the
device `torch.device("lazy:0")`, so nothing lands on the CPU unseen. `FakeTensorMode` itself refuses most mixtures of
devices, reads on the host, and shapes that depend on values. The lints refuse what CUDA allows and waits for:
index tensors on the CPU, copies between devices, tensors made of Python numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.inference import Target
from draftsmith.inference.targets.probing.probe import Capabilities

DEVICE = torch.device("lazy:0")

_BUILDERS: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor, torch.Tensor}
_READERS: set[Any] = {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__}
_INDEXERS: set[Any] = {Tensor.__getitem__, Tensor.__setitem__}


class RefuseHostTensors(TorchFunctionMode):
    """Raises where a tensor is made of Python numbers, which on a GPU is a blocking copy, or is read on the host. It
    works on any device."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in _BUILDERS:
            raise AssertionError(f"{func.__name__} builds a tensor of Python numbers inside the loop")
        if func in _READERS:
            raise AssertionError(f"{func.__name__} reads a value on the host")
        if func in _INDEXERS:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, (list, range)) for part in index):
                raise AssertionError("an index made of Python numbers is a tensor built on the host")
        return func(*args, **(kwargs or {}))


class RefuseOtherDevices(TorchDispatchMode):
    """Raises where an operator touches a tensor that is not on `DEVICE`. Numbers may be tensors of no dimension on the
    CPU: they are arguments of a kernel, not memory. They must not be copied to the device, though."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = "copy" in func.name()
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device != DEVICE and (value.dim() or is_copy):
                raise AssertionError(f"{func} touches a tensor {tuple(value.shape)} on {value.device}, not on {DEVICE}")
        return result


@contextmanager
def strict() -> Iterator[None]:
    """Both lints; inside `FakeTensorMode`."""
    with RefuseOtherDevices(), RefuseHostTensors():
        yield


def move(mode: FakeTensorMode, *modules: Any) -> None:
    """Moves all weights of these modules to the stand-in device, in place; they lose their values."""
    for module in (part for one in modules if isinstance(one, nn.Module) for part in one.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and old.device != DEVICE:
                    with mode:
                        new = torch.empty(old.shape, dtype=old.dtype, device=DEVICE)
                        is_weight = isinstance(old, nn.Parameter)
                        tensors[name] = nn.Parameter(new, requires_grad=False) if is_weight else new


def stand_in_target(target: Target, mode: FakeTensorMode) -> Target:
    """The target on the stand-in device, with what its construction found on the CPU, where it had values."""
    move(mode, target.model)
    with mode:
        return Target(target.model, capabilities=move_findings(target.capabilities))


def move_findings(capabilities: Capabilities) -> Capabilities:
    specs = tuple(
        replace(spec, keys=replace(spec.keys, device=DEVICE), values=replace(spec.values, device=DEVICE))
        for spec in capabilities.layer_specs
    )
    return replace(capabilities, layer_specs=specs)
