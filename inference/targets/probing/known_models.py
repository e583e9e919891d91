"""Known models: each model is examined once, and again after a change. No model is kept alive."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from draftsmith.inference.targets.model_config import find_attention, find_causal_lm, find_execution_device
from draftsmith.inference.targets.probing.probe import Capabilities


@dataclass
class KnownModel:
    """What is known about a model. Nothing in it keeps the model alive.

    Attributes:
        description: of the model when it was examined; None before.
        capabilities: what the probes found.
        find_target: returns the model's `Target`, or None when nobody holds one.
        lock: held while the model is examined, so that it is examined once. Other models do not wait.
    """

    description: Any = None
    capabilities: Capabilities | None = None
    find_target: Callable[[], Any] = lambda: None
    lock: Any = field(default_factory=threading.RLock)


_known_models: weakref.WeakKeyDictionary[nn.Module, KnownModel] = weakref.WeakKeyDictionary()
_dictionary_lock = threading.Lock()


def find_known(model: nn.Module) -> KnownModel:
    """The model's entry, the same one at every call."""
    with _dictionary_lock:
        return _known_models.setdefault(model, KnownModel())


def describe_model(model: nn.Module) -> tuple[Any, ...]:
    """Everything about a model that `Target` examines, except the values of its weights; equal while nothing changes.

    These are the modules (adapters are modules), the shapes, dtypes and devices of weights, the config, the attention
    implementation and the training mode.
    """
    causal_lm = find_causal_lm(model)
    modules = tuple(map(_describe_module, model.modules()))
    return model.training, find_attention(causal_lm), repr(causal_lm.config.to_dict()), modules


def _describe_module(module: nn.Module) -> tuple[Any, ...]:
    """The module's type, its own weights, and the device on which accelerate runs it."""
    weights = [
        (type(weight), type(weight.data), weight.shape, weight.dtype, weight.device)
        for weight in module._parameters.values()
        if weight is not None
    ]
    return id(module), type(module), find_execution_device(module), *weights
