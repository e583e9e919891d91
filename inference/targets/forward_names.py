"""The names that a model's forward has for its arguments, which differ between models and releases of transformers.

From 5.24 on, transformers calls the cache `cache`. Earlier releases, and models with code of their own, call it
`past_key_values`, or `cache_params` where no layer has attention. The old names warn in 5.24, and a forward that gets
two of them drops one. So only this file knows the names, and the signature decides.

Legend: B batch, T tokens.
"""

import inspect
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin

CACHE_NAMES = ("cache", "cache_params", "past_key_values")
_OF_THIS_RELEASE = GenerationMixin.prepare_inputs_for_generation


def find_cache_name(module: nn.Module) -> str:
    """The name of the cache among the arguments of a module's forward."""
    taken = _list_arguments(module)
    return next(name for name in CACHE_NAMES if name in taken)


def _list_arguments(module: nn.Module) -> Set[str]:
    """The arguments of the forward that names the cache: the module's own, or one that it inherits from and hands its
    arguments on to. Where there is none, layers inside get the cache under the name of this release."""
    forwards = [vars(one)["forward"] for one in type(module).__mro__ if "forward" in vars(one)]
    listed = (inspect.signature(one).parameters.keys() for one in (*forwards, _OF_THIS_RELEASE))
    return next(names for names in listed if not names.isdisjoint(CACHE_NAMES))


def read_cache(output: Mapping[str, Any]) -> Any:
    """The cache in a model's output, or in the arguments that transformers prepares; None if there is none."""
    return next((output[name] for name in CACHE_NAMES if name in output), None)


class ForwardNames:
    """Names the arguments of passes over token ids.

    Args:
        module: a model, or its decoder. With code of its own, a model may have another name than its decoder.

    Attributes:
        cache: the name of the cache.
        has_positions: whether there are positions and masks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.cache = find_cache_name(module)
        # Recurrent models without attention have neither positions nor masks. Other forwards must take both.
        is_stateful = getattr(module, "_is_stateful", False)
        self.has_positions = not is_stateful or "position_ids" in _list_arguments(module)

    def name(self, token_ids: Tensor, masks: Any, positions: Tensor | None, cache: Cache | None) -> dict[str, Any]:
        """The arguments of a pass over [B, T] tokens. A model without attention gets no masks and no positions."""
        seen = {"attention_mask": masks, "position_ids": positions} if self.has_positions else {}
        return {"input_ids": token_ids, **seen, self.cache: cache}
