"""Checkpoints of the EAGLE family: what other projects write is read, and what is damaged is refused by its name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.published import Published
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from tests.heads.formats.round_trip import change, heads_of, publish, publish_as, read, refusal
from tests.heads.test_contract import assert_same_tensors
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt


def test_keys_that_change_nothing_are_read(target: Target) -> None:
    scales = {"embedding_multiplier": 1.0, "logits_scaling": 1, "attention_multiplier": 8**-0.5}
    keys = {**scales, "query_pre_attn_scalar": 8, "use_qk_norm": False, "mlp_bias": False}
    imported, _ = read(change(publish_as("eagle", target), config=keys), target)
    assert not any(key in note for note in imported.notes for key in keys)


def test_keys_that_nobody_knows_are_named_once(target: Target) -> None:
    odd = {"auto_map": {"AutoModel": "x.Y"}, "num_experts": 8, "tags": ["a"], "pretraining_tp": 4, "_commit_hash": "x"}
    imported, _ = read(change(publish_as("eagle3", target), config=odd), target)
    assert imported.notes == ["keys of config.json that are not read: num_experts, tags"]


def test_a_key_with_two_values_is_refused(target: Target) -> None:
    published = publish_as("eagle3", target)
    config = {"eagle_config": {"norm_output": True, "rms_norm_eps": 1e-3, "initializer_range": 0.1}}
    message = refusal(change(published, config={**config, "norm_output": False, "initializer_range": 0.2}), target)
    assert "norm_output is False in config.json, and True in eagle_config" in message
    assert "initializer_range" not in message
    rope = {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}
    message = refusal(change(published, config=rope), target)
    assert "rope_theta is 500000.0 in config.json, and 10000.0 in rope_parameters" in message


def test_maps_of_the_draft_vocabulary_that_do_not_fit(target: Target) -> None:
    published = publish_as("eagle3", target)
    d2t, t2d = published["d2t"], published["t2d"]
    ids = d2t + torch.arange(40)
    for changed, message in (
        ({"d2t": ids}, "tensor d2t holds token ids, and should hold their distances"),
        ({"d2t": d2t + 100}, "tensor d2t leads to tokens outside the target's 128"),
        ({"d2t": torch.zeros_like(d2t).index_fill(0, torch.tensor([1]), -1)}, "or to one token twice"),
        ({"d2t": d2t.float()}, "tensor d2t is [40] of torch.float32"),
        ({"t2d": ~t2d}, "t2d and d2t disagree: t2d marks 88 tokens"),
        ({"d2t": None}, "tensor d2t is missing"),
    ):
        assert message in refusal(change(published, changed), target), message
    full = publish_as("full vocabulary", target)
    shifted = torch.arange(128).roll(1) - torch.arange(128)
    assert "tensor d2t reorders a full vocabulary" in refusal(change(full, {"d2t": shifted}), target)
    same = {"d2t": torch.zeros(128, dtype=torch.long), "t2d": torch.ones(128, dtype=torch.bool)}
    assert_same_tensors(read(change(full, same), target)[1].state_dict(), read(full, target)[1].state_dict())


# What other projects write.


def test_float16_and_sharded_files(target: Target, tmp_path: Path) -> None:
    published = publish_as("eagle3", target)
    tensors = {key: x.half() if x.is_floating_point() else x for key, x in published.items()}
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({key: tensors[key].contiguous() for key in part}, tmp_path / file)
    places = {key: file for file, part in shards.items() for key in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    heads = DraftHeads.from_pretrained(tmp_path, target=target)
    assert heads.dtype == torch.float16
    assert_same_tensors(dict(heads.state_dict()), dict(heads_of("eagle3", target).half().state_dict()))
    assert DraftHeads.from_pretrained(tmp_path, target=target, dtype=torch.float32).dtype == torch.float32


def test_names_and_keys_of_modelopt(target: Target) -> None:
    """`layers.0.`, no t2d, d2t of 32 bits, ids and flags below `eagle_config`. The ids count the outputs of layers."""
    published = publish_as("eagle3", target)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in published.items() if name != "t2d"}
    tensors["d2t"] = tensors["d2t"].int()
    flags = {"use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True}
    config = {**published.config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5], **flags}}
    del config["eagle_aux_hidden_state_layer_ids"]
    imported, heads = read(Published("somewhere", config, "model.safetensors", tensors), target)
    assert "layer ids [0, 3, 5] were read as hidden_states [1, 4, 6]: ModelOpt counts" in imported.notes[0]
    assert_same_tensors(dict(heads.state_dict()), dict(heads_of("eagle3", target).state_dict()))
    assert heads.feature_layers == (1, 4, 6)


def test_without_an_lm_head_the_targets_is_read(target: Target) -> None:
    published = change(publish_as("full vocabulary", target), config={"draftsmith": None})
    imported, heads = read(change(published, {"lm_head.weight": None}), target)
    assert imported.notes == ["the checkpoint has no lm_head.weight: the heads get a copy of the target's"]
    assert torch.equal(heads.state_dict()["lm_head.weight"], target.lm_head_weight())
    stored = {name: x.to(torch.bfloat16) for name, x in published.items() if name != "lm_head.weight"}
    _, narrow = read(Published("somewhere", published.config, published.file, dict(stored)), target)
    assert narrow.dtype == torch.bfloat16
    reduced = change(publish_as("eagle3", target), config={"draftsmith": None})
    for tensors in ({"lm_head.weight": None}, {"lm_head.weight": None, "d2t": None, "t2d": None}):
        assert "lm_head.weight" in refusal(change(reduced, tensors), target)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_frozen_copies_of_the_targets_tensors_in_the_speculators_format(
    draft_vocab_size: int | None, target: Target
) -> None:
    heads = tiny_heads("eagle3", target, draft_vocab_size=draft_vocab_size)
    published = publish(find_format("speculators", "eagle3"), heads)
    lm_head, gain = target.lm_head_weight().detach(), target.final_norm_gain()
    rows = lm_head if draft_vocab_size is None else lm_head[published["t2d"]]
    for copy in (lm_head, rows):
        copies = {"verifier_lm_head.weight": copy, "verifier_norm.weight": gain.detach()}
        _, found = read(change(published, copies), target)
        assert_same_tensors(found.state_dict(), heads.state_dict())
        for name, x in copies.items():
            assert f"tensor {name} differs from the target's own" in refusal(change(published, {name: x + 1}), target)
            assert f"tensor {name} is [3]" in refusal(change(published, {name: torch.zeros(3)}), target)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_copy_of_the_targets_embedding_is_left_out_and_another_is_kept(name: str, target: Target) -> None:
    published, prompt = publish_as(name, target), random_prompt(9)
    table: Tensor = target.embed_tokens.weight.detach()
    expected = heads_of(name, target)
    for copied in (table, table.to(torch.bfloat16)):
        _, heads = read(change(published, {"embed_tokens.weight": copied}), target)
        assert not heads.config.own_embedding
        assert_same_tensors(dict(heads.state_dict()), dict(expected.state_dict()))
    _, other = read(change(published, {"embed_tokens.weight": table.flip(0)}), target)
    assert other.config.own_embedding
    assert torch.equal(other.embed(prompt), table.flip(0)[prompt])
