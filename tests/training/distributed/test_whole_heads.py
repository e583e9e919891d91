"""Heads under FSDP and ZeRO-3; `tests/training/distributed/test_distributed.py` runs them."""

import pytest
from torch.distributed.fsdp import FSDPModule

from draftsmith.heads import HEAD_TYPES, create_heads
from tests.tiny_targets import tiny_target


@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_fsdp_can_change_the_class_of_heads(kind: str) -> None:
    """As `fully_shard` does: a base class with `__slots__` would make the memory layouts differ."""
    heads = create_heads(kind, tiny_target("llama", num_hidden_layers=4))
    own = type(heads)
    heads.__class__ = type(f"FSDP{own.__name__}", (FSDPModule, own), {})
    assert isinstance(heads, FSDPModule)
