"""The names of a forward's arguments, in this release of transformers and in others."""

from typing import Any

import torch
from torch import nn

from draftsmith.inference.targets.forward_names import ForwardNames, find_cache_name
from tests.tiny_targets import tiny_target


class New(nn.Module):
    def forward(self, input_ids: Any = None, position_ids: Any = None, cache: Any = None, **more: Any) -> Any:
        raise NotImplementedError


class Old(nn.Module):
    def forward(self, input_ids: Any = None, position_ids: Any = None, past_key_values: Any = None) -> Any:
        raise NotImplementedError


class Wrapped(Old):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class HandsOn(nn.Module):
    def forward(self, input_ids: Any = None, **for_the_layers: Any) -> Any:
        raise NotImplementedError


class WithoutAttention(nn.Module):
    """As Mamba before 5.24: it would swallow another name for the cache."""

    _is_stateful = True

    def forward(self, input_ids: Any = None, cache_params: Any = None, **more: Any) -> Any:
        raise NotImplementedError


def test_a_forward_that_hands_everything_on_gets_the_name_of_this_release() -> None:
    assert find_cache_name(HandsOn()) == find_cache_name(tiny_target("llama"))


def test_arguments_of_a_pass() -> None:
    ids, cache = torch.ones(1, 2, dtype=torch.long), object()
    given: tuple[Any, ...] = (ids, "masks", "positions", cache)
    everything = {"input_ids": ids, "attention_mask": "masks", "position_ids": "positions"}
    assert ForwardNames(New()).name(*given) == everything | {"cache": cache}
    assert ForwardNames(Old()).name(*given) == everything | {"past_key_values": cache}
    assert ForwardNames(Wrapped()).name(*given) == everything | {"past_key_values": cache}
    assert ForwardNames(WithoutAttention()).name(*given) == {"input_ids": ids, "cache_params": cache}
