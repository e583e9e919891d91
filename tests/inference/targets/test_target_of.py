"""`Target.of`: one target per model, which is examined anew after it has changed, and which keeps no model alive."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
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
    "attention": lambda model: model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "max_position_embeddings", 128),
    "embeddings": lambda model: model.resize_token_embeddings(140),
    "adapter": add_adapter,
    "lm_head": lambda model: model.set_output_embeddings(copy.deepcopy(model.get_output_embeddings())),
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


def test_what_construction_refuses_is_refused_later_too() -> None:
    model = tiny_target("llama")
    target = Target.of(model)
    model.train()
    with pytest.raises(ValueError, match="is in training mode"):
        Target.of(model)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="outside of autocast"):
        Target.of(model)
    assert Target.of(model) is target
    for wrong in (torch.nn.Linear(2, 2), "a name"):
        with pytest.raises(ValueError, match="a target is a transformers causal LM"):
            Target.of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [lambda: tiny_target("llama"), lambda: copy.deepcopy(tiny_encoder_decoder("bart"))])
def test_no_model_is_kept_alive(build: Callable[[], Any]) -> None:
    model = build()
    generate(model, None, random_prompt(4, vocab_size=90), max_new_tokens=3, do_sample=False)
    target = Target.of(model)
    held = weakref.ref(model), weakref.ref(target)
    del model, target
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_threads_get_one_target(num_examined: list[str]) -> None:
    model, found = tiny_target("llama"), []
    threads = [threading.Thread(target=lambda: found.append(Target.of(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == len(num_examined) == 1


def test_another_model_does_not_wait_for_an_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = tiny_target("llama"), tiny_target("llama")
    has_begun, may_end = threading.Event(), threading.Event()
    examine = target_module.probe_model

    def wait(model: Any, *args: Any) -> Any:
        if model is slow:
            has_begun.set()
            assert may_end.wait(30)
        return examine(model, *args)

    monkeypatch.setattr(target_module, "probe_model", wait)
    threads = [threading.Thread(target=Target.of, args=(model,), daemon=True) for model in (slow, other)]
    threads[0].start()
    assert has_begun.wait(30)
    threads[1].start()
    threads[1].join(20)
    assert not threads[1].is_alive()
    may_end.set()
    threads[0].join()


@pytest.mark.filterwarnings("ignore")  # of accelerate, about the parameters it has put elsewhere
def test_placement_tells_where_layers_are(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is an optional extra")
    model = tiny_target("llama")
    target = Target.of(model)
    num_weights = len(list(model.parameters()))
    assert target.placement == (("cpu", num_weights),)
    per_layer = len(list(model.model.layers[0].parameters()))
    places: dict[str, str] = {f"model.layers.{layer}": "disk" if layer >= 3 else "cpu" for layer in range(6)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    moved = Target.of(model)
    assert moved is not target
    assert moved.placement == (("cpu", 1 + 3 * per_layer), ("offloaded from cpu", 3 * per_layer), ("cpu", 2))
    hash(moved.placement)
