"""What projects mean by the same keys: biases, RoPE bases, numbers of layers."""

from typing import Any

import pytest
import torch

from draftsmith.heads.formats.published import OWN_KEY
from draftsmith.heads.formats.registry import find_format, recognize
from draftsmith.inference import Target
from tests.heads.formats.round_trip import NUM_LAYERS, change, publish, publish_as, read, refusal
from tests.heads.tiny_heads import plain_eagle3, tiny_heads
from tests.tiny_targets import tiny_target


class TestBiasOfEagle1:
    """A missing `bias` means true, and SGLang's fc always has one."""

    def test_absent_means_true(self, target: Target) -> None:
        with_bias = change(publish_as("eagle", target), config={"bias": None})
        assert read(with_bias, target)[1].config.fc_bias
        message = refusal(change(with_bias, {"fc.bias": None}), target)
        assert 'config.json has no "bias", which means true' in message
        assert not read(change(with_bias, {"fc.bias": None}, {"bias": False}), target)[1].config.fc_bias

    def test_zeros_are_none_where_the_config_says_so(self, target: Target) -> None:
        keys = {"bias": False, "architectures": ["LlamaForCausalLMEagle"]}
        zeros = {"fc.bias": torch.zeros(32)}
        assert not read(change(publish_as("eagle", target), zeros, keys), target)[1].config.fc_bias

    def test_sglangs_bias_counts_whatever_the_config_says(self, target: Target) -> None:
        keys = {"bias": False, "architectures": ["LlamaForCausalLMEagle"]}
        assert read(change(publish_as("eagle", target), config=keys), target)[1].config.fc_bias


NO_ROPE = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}


class TestRope:
    """The original trainer always had a base of 10000 and wrote none."""

    def test_the_targets_base_is_not_inherited(self) -> None:
        rope = {"rope_type": "default", "rope_theta": 5e5}
        target = Target(tiny_target("llama", num_hidden_layers=NUM_LAYERS, rope_parameters=rope))
        published = publish(find_format("eagle", "eagle3"), plain_eagle3(target))
        assert published.config["rope_theta"] == 5e5
        imported, heads = read(change(published, config=NO_ROPE), target)
        assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
        assert "no rope_theta: read as 10000, as the authors train; the target has 500000" in imported.notes[0]

    @pytest.mark.parametrize("keys", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}], ids=str)
    def test_a_base_is_read_at_either_place(self, keys: dict[str, Any], target: Target) -> None:
        _, heads = read(change(change(publish_as("eagle", target), config=NO_ROPE), config=keys), target)
        assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}

    def test_stored_frequencies_are_checked(self, target: Target) -> None:
        name = "layers.0.self_attn.rotary_emb.inv_freq"
        right = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        published = publish_as("eagle", target)
        read(change(published, {name: right}), target)
        assert f"tensor {name} is not RoPE with rope_theta 10000" in refusal(
            change(published, {name: 2 * right}), target
        )


IDS = "eagle_aux_hidden_state_layer_ids"
MARK = {"use_mtp_layernorm": False}


@pytest.mark.parametrize(
    ("config", "layers", "note"),
    [
        (
            {IDS: [1, 3, 4]},
            (1, 3, 4),
            "[1, 3, 4] are the usual ones less one: SpecForge and SGLang would mean [2, 4, 5]",
        ),
        ({IDS: [2, 4, 5]}, (2, 4, 5), None),
        ({IDS: [1, 2, 6]}, (1, 2, 6), None),
        ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5), "read as hidden_states [2, 4, 5]: SpecForge and SGLang count"),
        ({"eagle_config": {IDS: [1, 2, 6]}}, (1, 2, 6), "[1, 2, 6] stand in eagle_config only"),
        ({"eagle_config": {IDS: [1, 3, 4], **MARK}}, (2, 4, 5), "hidden_states [2, 4, 5]: ModelOpt counts"),
        ({"eagle_config": {IDS: [0, 2, 6], **MARK}}, (1, 3, 7), "hidden_states [1, 3, 7]: ModelOpt counts"),
        # vLLM's ids, whoever wrote the rest.
        ({IDS: [1, 2, 6], "eagle_config": {IDS: [1, 2, 6], **MARK}}, (1, 2, 6), None),
    ],
    ids=str,
)
def test_layer_ids_are_read_as_their_project_counts(
    config: dict[str, Any], layers: tuple[int, ...], note: str | None, target: Target
) -> None:
    imported, heads = read(change(publish_as("full vocabulary", target), config=config), target)
    assert heads.feature_layers == layers
    assert [part in imported.notes[0] for part in [note] if part] == [True for _ in imported.notes]


def test_the_last_output_that_modelopt_taps_is_refused(target: Target) -> None:
    config = {"eagle_config": {IDS: [1, 3, 7], **MARK}}
    assert "tap the state after the last layer" in refusal(
        change(publish_as("full vocabulary", target), config=config), target
    )


def test_the_factor_of_embeddings_is_folded_into_fc(target: Target) -> None:
    """Heads of ours multiply the embeddings, published ones do not: both draft the same."""
    heads = tiny_heads("eagle", target, embedding_scale=8.0)
    published = change(publish(find_format("eagle", "eagle"), heads), config={OWN_KEY: None})
    imported = recognize(published).read(published, target)
    assert imported.settings["embedding_scale"] == 1.0, "not the one of new heads"
    expected = torch.cat([8 * heads.fc.weight[:, :32], heads.fc.weight[:, 32:]], dim=1)
    assert torch.equal(imported.tensors["fc.weight"], expected)
