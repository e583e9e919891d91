"""What is found about recurrent layers, what is refused, and that every way to read drafts gives the same scores."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.inference import Decoder, SmallModelDrafter, Target
from draftsmith.inference.cache.recurrent_states import RecurrentStates
from draftsmith.inference.targets.recurrent.proving import check_rollback
from draftsmith.training.features.encoding import encode
from tests.params import slow_but
from tests.tiny_targets import RECURRENT_FAMILIES, random_prompt, target_of, tiny_target

pytestmark = pytest.mark.skipif(not RECURRENT_FAMILIES, reason="this release of transformers has no cache for states")


@pytest.mark.parametrize(
    ("family", "continues", "drafts_in_one"),
    [("qwen3_5", True, False), ("lfm2", True, True), ("nemotron_h", True, False), ("mamba", False, False)],
)
def test_what_is_found(family: str, continues: bool, drafts_in_one: bool) -> None:
    target = target_of(family)
    recurrence = target.capabilities.recurrence
    assert (recurrence.continues, recurrence.drafts_in_one) == (continues, drafts_in_one)
    assert target.is_recurrent
    assert target.reads_prompts_whole == (not continues)
    assert len(recurrence.mixers) == sum(spec is None for spec in target.capabilities.layer_specs) - (
        family == "nemotron_h"
    )


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2"])
def test_the_large_linear_layers_run_once(family: str) -> None:
    """Those that read the mixer's input are found, and the last one."""
    recurrence = target_of(family).capabilities.recurrence
    for layer, roles in recurrence.roles.items():
        mixer = target_of(family).model.get_submodule(recurrence.mixers[layer])
        assert set(roles.inputs) == {name for name, _ in mixer.named_children() if name.startswith("in_proj")}
        assert roles.output == "out_proj"


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid", "lfm2"])
@pytest.mark.parametrize("in_one", [True, False])
def test_both_ways_to_read_drafts(family: str, in_one: bool) -> None:
    """On a CPU only one of them is chosen by itself; `check_rollback` compares with transformers' own passes."""
    model = tiny_target(family, initializer_range=0.3)
    capabilities = Target(model).capabilities
    target = Target(
        model, capabilities=replace(capabilities, recurrence=replace(capabilities.recurrence, drafts_in_one=in_one))
    )
    check_rollback(target)


def test_states_that_are_not_rolled_back_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "apply_accepted", lambda self: None)
    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM cannot be rolled back"):
        Target(tiny_target("qwen3_5", initializer_range=0.3))


def test_what_recurrent_targets_cannot_do() -> None:
    target = target_of("qwen3_5")
    with pytest.raises(ValueError, match=r"compile is not possible.*leave compile out"):
        Decoder(target, compile=True)
    with pytest.raises(ValueError, match="draft as a small model"):
        SmallModelDrafter(target).start(1, 16, 4)
    with pytest.raises(ValueError, match="its first 2 layers cannot draft"):
        target.prepare_first_layers(2)


@pytest.mark.parametrize("family", slow_but({"qwen3_5", "mamba2", "lfm3"} & {*RECURRENT_FAMILIES}, RECURRENT_FAMILIES))
def test_packed_documents_do_not_leak_into_each_other(family: str) -> None:
    """States of a packed row are those of its documents by themselves. Read as one text, they would not be."""
    target = target_of(family, initializer_range=0.3)
    row = random_prompt(12)
    options: dict[str, Any] = {"feature_layers": [1, target.num_layers]}
    packed = encode(target, row, torch.ones_like(row), document_ids=torch.tensor([[0] * 5 + [1] * 7]), **options)
    leaking = encode(target, row, torch.ones_like(row), **options)
    for span in (slice(5), slice(5, None)):
        alone = encode(target, row[:, span], torch.ones_like(row[:, span]), **options)
        torch.testing.assert_close(packed.features[:, span], alone.features, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(packed.last_hidden[:, span], alone.last_hidden, atol=1e-4, rtol=1e-4)
    assert (leaking.last_hidden[:, 5:] - packed.last_hidden[:, 5:]).abs().amax() > 0.1


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_5"])
def test_the_model_is_not_changed(family: str) -> None:
    model = tiny_target(family, initializer_range=0.3)
    prompt = random_prompt(9)
    before = model(prompt, output_hidden_states=True)
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    Target(model)
    assert attributes == {name: sorted(vars(module)) for name, module in model.named_modules()}
    after = model(prompt, output_hidden_states=True)
    assert torch.equal(after.logits, before.logits)
    assert len(after.hidden_states) == len(before.hidden_states)


def test_modules_that_come_later_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_target("lfm2")
    decoder = Decoder(model)
    prompt = random_prompt(5)
    decoder.generate(prompt, max_new_tokens=2, do_sample=False)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["in_proj", "w1"], r=2, init_lora_weights=False), model)
    with pytest.raises(ValueError, match="make a new Decoder"):
        decoder.generate(prompt, max_new_tokens=2, do_sample=False)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(Decoder(model).generate(prompt, max_new_tokens=6, do_sample=False).sequences, expected)
