"""`Target.of`: one target per model, which is examined anew after it has changed, and which keeps no model alive."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.inference import Target, generate
from draftsmith.inference.targets import target as target_module
from tests.inference.tiny_encoder_decoders import tiny_encoder_decoder
from tests.tiny_targets import random_prompt, tiny_target


@pytest.fixture
def num_examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the model's name at every examination."""
    names: list[str] = []

    def counted(examine: Any) -> Any:
        def call(model: Any, *args: Any) -> Any:
            names.append(type(model).__name__)
            return examine(model, *args)

        return call

    for name in ("probe_model", "probe_encoder_decoder"):
        monkeypatch.setattr(target_module, name, counted(getattr(target_module, name)))
    return names


def test_a_model_is_examined_once(num_examined: list[str]) -> None:
    for model in (tiny_target("gemma3"), copy.deepcopy(tiny_encoder_decoder("t5"))):  # nobody else examined the copy
        num_examined.clear()
        first = Target.of(model)
        assert Target.of(model) is first
        assert Target.of(first) is first
        specs, vocab_size = first.capabilities.layer_specs, first.vocab_size
        del first
        again = Target.of(model)  # nobody held the first one
        assert (again.capabilities.layer_specs, again.vocab_size) == (specs, vocab_size)
        assert Target(model) is not again
        assert len(num_examined) == 2  # the last line asked for it


def add_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    model.eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "config": lambda model: setattr(model.config, "max_position_embeddings", 128),
    "adapter": add_adapter,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_examined_again(change: str, num_examined: list[str]) -> None:
    model = tiny_target("llama")
    first = Target.of(model)
    CHANGES[change](model)
    second = Target.of(model)
    assert second is not first
    assert len(num_examined) == 2
    assert second.dtype == model.dtype
    assert second.max_length == model.config.max_position_embeddings
    assert second.vocab_size == model.config.vocab_size


def test_no_model_is_kept_alive() -> None:
    model = tiny_target("llama")
    generate(model, None, random_prompt(4, vocab_size=90), max_new_tokens=3, do_sample=False)
    target = Target.of(model)
    held = weakref.ref(model), weakref.ref(target)
    del model, target
    gc.collect()
    assert [reference() for reference in held] == [None, None]
