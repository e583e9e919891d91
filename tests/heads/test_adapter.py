"""Heads that belong to an adapter of their target: stored beside them, applied by one call, and then decoding is the
adapted target's own."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.adapter import is_adapted
from draftsmith.inference import Decoder, Target, generate
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target

peft = pytest.importorskip("peft", reason="peft is an optional extra")

# peft asks transformers by a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def adapted_target() -> Any:
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_target("llama").requires_grad_(False), config).eval()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Medusa heads beside the adapter of `adapted_target`."""
    folder = tmp_path_factory.mktemp("heads") / "medusa"
    torch.manual_seed(3)
    model = adapted_target()
    heads = create_heads("medusa", Target(model), num_heads=2)
    heads.belong_to_adapter(model)
    heads.save_pretrained(folder)
    return folder


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(random_prompt(9)).logits
    return found


def expected_logits(stored: Path) -> Tensor:
    return logits(peft.PeftModel.from_pretrained(tiny_target("llama"), str(stored / "adapter")).eval())


@pytest.mark.parametrize(
    ("temperature", "merge"),
    slow_but(
        {"0.0-True", "1.0-False"},
        {f"{temperature}-{merge}": (temperature, merge) for temperature in (0.0, 1.0) for merge in (False, True)},
    ),
)
def test_texts_are_the_adapted_targets_own(stored: Path, temperature: float, merge: bool) -> None:
    heads: DraftHeads = DraftHeads.from_pretrained(stored)
    model = tiny_target("llama")
    target = heads.apply_adapter(model, merge=merge)
    assert (target.model is model) == merge
    assert is_adapted(target.model)
    torch.testing.assert_close(logits(target.model), expected_logits(stored), rtol=0, atol=1e-4 if merge else 0)
    prompt = random_prompt(7)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": temperature > 0}
    mask = torch.ones_like(prompt)
    text = generate(target, heads, prompt, mask, seed=4, **options).sequences
    assert torch.equal(text, generate(target, None, prompt, mask, seed=4, **options).sequences)
    if not temperature:
        assert torch.equal(text, target.model.generate(input_ids=prompt, attention_mask=mask, **options))
    other = generate(tiny_target("llama"), None, prompt, mask, seed=4, **options).sequences
    assert not torch.equal(text, other), "the adapter changes nothing, so this test would show nothing"


def test_a_target_without_the_adapter_is_warned_about_once(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        heads: DraftHeads = DraftHeads.from_pretrained(stored)
        target = Target(tiny_target("llama"))
        decoder = Decoder(target, heads)
        Decoder(target, heads)
        prompt = random_prompt(7)
        text = decoder.generate(prompt, max_new_tokens=8, do_sample=False).sequences
    (message,) = [entry for entry in caplog.messages if "adapter" in entry]
    assert "and this target has no adapter" in message
    assert "heads.apply_adapter(model)" in message
    assert torch.equal(text, target.model.generate(prompt, max_new_tokens=8, do_sample=False))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        DraftHeads.from_pretrained(stored).apply_adapter(tiny_target("llama"))
        DraftHeads.from_pretrained(stored).bind(adapted_target())
    assert not [entry for entry in caplog.messages if "adapter" in entry]


def test_saving_again_takes_the_adapter_along(stored: Path, tmp_path: Path) -> None:
    heads: DraftHeads = DraftHeads.from_pretrained(stored)
    copied = copy.deepcopy(heads)
    for which, name in ((heads, "again"), (copied, "copy")):
        which.save_pretrained(tmp_path / name)
        which.save_pretrained(tmp_path / name)  # over it
        one, other = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (stored, tmp_path / name))
        assert all(torch.equal(one[key], other[key]) for key in one | other)
        DraftHeads.from_pretrained(tmp_path / name).apply_adapter(tiny_target("llama"))
    model = adapted_target()
    fresh = create_heads("medusa", Target(model), num_heads=1)
    fresh.belong_to_adapter(model)
    with pytest.raises(ValueError, match="a copy without their adapter"):
        copy.deepcopy(fresh).save_pretrained(tmp_path / "lost")
    with pytest.raises(ValueError, match="not stored yet: save"):
        fresh.apply_adapter(tiny_target("llama"))


class TestRefusals:
    def test_a_damaged_one(self, stored: Path, tmp_path: Path) -> None:
        shutil.copytree(stored, tmp_path / "heads")
        weights = tmp_path / "heads" / "adapter" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:200])
        with pytest.raises(ValueError, match="does not fit the target"):
            DraftHeads.from_pretrained(tmp_path / "heads").apply_adapter(tiny_target("llama"))

    def test_a_target_with_adapters(self, stored: Path) -> None:
        with pytest.raises(ValueError, match="already has an adapter"):
            DraftHeads.from_pretrained(stored).apply_adapter(adapted_target())
        merged = tiny_target("llama")
        DraftHeads.from_pretrained(stored).apply_adapter(merged, merge=True)
        with pytest.raises(ValueError, match="already has an adapter"):
            DraftHeads.from_pretrained(stored).apply_adapter(merged)
        before = logits(merged)
        DraftHeads.from_pretrained(stored).apply_adapter(merged, merge=True)
        assert torch.equal(logits(merged), before), "it was added twice"
