"""Copies of a model that share all weights with it and replace a few modules."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def replace_modules(module: nn.Module, find: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The module itself if `find` replaces nothing within it, else a copy with the replaced parts."""
    found = find(module)
    if found is not None:
        return found
    children = {name: replace_modules(child, find) for name, child in module.named_children()}
    changed = {name: child for name, child in children.items() if child is not module._modules[name]}
    return copy_module(module, _modules={**module._modules, **changed}) if changed else module


def copy_module(module: nn.Module, **attributes: Any) -> nn.Module:
    """A copy that shares weights and submodules and has these attributes of its own."""
    copied: Any = copy.copy(module)
    inner = module.__dict__.get("_old_forward")
    if inner is not None:  # accelerate's hooks wrap a forward that is bound to the module itself
        copied.__dict__["_old_forward"] = types.MethodType(inner.__func__, copied)
        copied.__dict__["forward"] = functools.partial(copied.__dict__["forward"].func, copied)
    copied.__dict__.update(attributes)
    return copied  # type: ignore[no-any-return]
