"""DFlash and DSpark in their published formats, against DFlash's forward pass written out here."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.heads.formats.block import BlockSpeculators, DFlash, SGLangBlock, VLLMBlock
from draftsmith.heads.formats.format import Format
from draftsmith.heads.formats.llama_cpp.gguf_dflash import GgufDFlash
from draftsmith.heads.formats.published import Published, open_published
from draftsmith.heads.formats.transformers_dflash import TransformersDFlash
from draftsmith.inference import Target
from tests.heads.formats.round_trip import (
    assert_same_heads,
    change,
    export_heads,
    import_heads,
    publish,
    refusal_of,
    write,
)
from tests.heads.kinds.slow_layer import run_block
from tests.heads.tiny_heads import encode_for, tiny_heads
from tests.tiny_targets import random_prompt, tiny_target

FLASH = {"block_size": 4}
FORMATS = [VLLMBlock(), DFlash(), SGLangBlock(), BlockSpeculators(), TransformersDFlash(), GgufDFlash()]
SPARK = {"block_size": 4, "predicts_at_anchor": True, "markov_rank": 6, "has_confidence": True}


def test_a_mask_of_its_own_takes_a_seldom_tokens_place(target: Target) -> None:
    heads: Any = tiny_heads("block", target, **FLASH, mask_token_id=None)
    published = publish(VLLMBlock(), heads)
    assert_same_heads(import_heads(VLLMBlock(), published, target), heads)
    token, table = published.config["dflash_config"]["mask_token_id"], published["embed_tokens.weight"]
    assert token == target.text_config.pad_token_id == 0
    assert torch.equal(table[token], heads.mask_embedding)
    assert torch.equal(table[1:], target.embed_tokens.weight[1:])
    message = refusal_of(DFlash(), change(published, {"embed_tokens.weight": table + 1}), target)
    assert "embed_tokens.weight differs from the target's own" in message


@pytest.mark.parametrize("known", FORMATS)
def test_heads_trained_beside_a_narrower_target_have_the_masks_token(known: Format) -> None:
    """`target_dtype` is often bfloat16 where the target's files have float32."""
    model = tiny_target("llama", num_hidden_layers=8)
    table = model.get_input_embeddings().weight.detach().clone()
    heads: Any = create_heads("block", Target(copy.deepcopy(model).to(torch.bfloat16)), **FLASH, mask_token_id=5)
    assert torch.equal(heads.mask_embedding, table[5].bfloat16().float())
    heads.bind(target := Target(model))
    assert torch.equal(heads.mask_embedding, table[5])
    assert_same_heads(import_heads(known, publish(known, heads), target), heads)


def test_vllms_file_of_a_mask(target: Target, tmp_path: Path) -> None:
    heads: Any = tiny_heads("block", target, **FLASH, mask_token_id=None)
    exported = export_heads(VLLMBlock(), heads)
    del exported.tensors["embed_tokens.weight"]
    write(exported, tmp_path)
    torch.save({"mask_token_id": 0, "embedding": heads.mask_embedding.detach()[None]}, tmp_path / "mask_embedding.pt")
    published = open_published(str(tmp_path))
    assert_same_heads(import_heads(DFlash(), published, target), heads)
    other = change(published, config={"dflash_config": {"mask_token_id": 5}})
    assert "mask_embedding.pt is of token 0, and mask_token_id is 5" in refusal_of(DFlash(), other, target)
    torch.save(torch.zeros(8), tmp_path / "mask_embedding.pt")
    assert "tensor embed_tokens.weight is [8] and should be [32]" in refusal_of(DFlash(), published, target)
    torch.save({"embedding": Path("x")}, tmp_path / "mask_embedding.pt")
    assert "mask_embedding.pt is damaged" in refusal_of(DFlash(), published, target)


def reference(published: Published, heads: DraftHeads, states: Tensor, anchor: int) -> Tensor:
    """The authors' forward pass, by their names, for one block after states [T, features * D]: normed states [N, D]."""
    config, target = published.config, heads.target
    token_ids = torch.tensor([anchor] + [published.setting("mask_token_id")] * (config["block_size"] - 1))
    table: Any = published.get("embed_tokens.weight", target.embed_tokens.weight)
    return run_block(published.tensors, heads.config, states, table[token_ids])


@torch.no_grad()
@pytest.mark.parametrize("settings", [FLASH, SPARK], ids=["DFlash", "DSpark"])
def test_drafts_are_those_of_the_authors(settings: dict[str, Any], target: Target) -> None:
    """Their ids count layers from 0: id i is the output of layer i, transformers' hidden_states[i + 1]. DFlash's rows
    after the first predict their own token; all of DSpark's predict the next one, with a bias by the token before."""
    is_spark = "markov_rank" in settings
    published = publish(VLLMBlock(), tiny_heads("block", target, **settings, feature_layers=[2, 4]))
    assert published.setting("target_layer_ids") == [1, 3]
    input_ids = random_prompt(12)
    model: Any = target.model
    hidden = model(input_ids, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i + 1] for i in (1, 3)], dim=-1)
    read: DraftHeads = import_heads(VLLMBlock(), published, target)
    features = encode_for(read, input_ids).features
    steps = read.unroll(features, input_ids)
    assert len(steps) == (4 if is_spark else 3)
    for slot in (0, 4, 7):
        rows = reference(published, read, states[0, : slot + 1], int(input_ids[0, slot + 1]))
        for depth, step in enumerate(steps):
            row = rows[depth if is_spark else depth + 1]
            expected = row @ target.lm_head_weight().T
            if is_spark:
                before = published["markov_head.markov_w1.weight"][input_ids[0, slot + 1 + depth]]
                expected = expected + published["markov_head.markov_w2.weight"] @ before
                weight, bias = (published[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
                chance = (weight @ torch.cat([row, before]) + bias)[0]
                torch.testing.assert_close(step.confidence[0, slot], chance, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(step.head(step.hidden[0, slot]), expected, rtol=1e-4, atol=1e-4)


def test_vllm_keeps_speculators_blocks_whole(target: Target) -> None:
    """vLLM makes every layer causal where this key is false; speculators reads it for sliding windows only."""
    heads = tiny_heads("block", target)
    config = export_heads(BlockSpeculators(), heads).config
    assert config["sliding_window_non_causal"] is True


@pytest.mark.parametrize(
    ("known", "said", "is_causal", "sliding_is_causal"),
    [
        (DFlash(), {}, False, True),
        (DFlash(), {"is_causal": False}, False, False),
        (DFlash(), {"dflash_config": {"causal": True}}, True, False),
        (BlockSpeculators(), {"sliding_window_non_causal": None}, False, True),
        (BlockSpeculators(), {"sliding_window_non_causal": True}, False, False),
    ],
)
def test_rows_of_a_window_are_causal_unless_it_is_said(
    known: DFlash, said: dict[str, Any], is_causal: bool, sliding_is_causal: bool, target: Target
) -> None:
    heads = tiny_heads("block", target, **FLASH, sliding_window=5, sliding_is_causal=True)
    config = import_heads(known, change(publish(known, heads), config=said), target).config
    assert (config.sliding_window, config.is_causal, config.sliding_is_causal) == (5, is_causal, sliding_is_causal)


@pytest.mark.skipif(not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers has it from 5.24 on")
def test_transformers_drafts_with_them(target: Target, tmp_path: Path) -> None:
    """The same scores of a block after the same features, and plain decoding's text."""
    heads = tiny_heads("block", target, **FLASH)
    export_heads(TransformersDFlash(), heads).save(tmp_path)
    assistant = transformers.AutoModel.from_pretrained(tmp_path).eval()
    prompt = random_prompt(12)
    model, ids = target.model, assistant.config.target_layer_ids
    with torch.no_grad():
        states = model(prompt[:, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1] for i in ids], dim=-1)
        block = torch.tensor([[int(prompt[0, -1]), *[heads.config.mask_token_id] * 3]])
        found = assistant(
            noise_embeds=target.embed_tokens(block),
            context_hidden_states=features,
            position_ids=torch.arange(15)[None],
            attention_mask=torch.ones(1, 15, dtype=torch.long),
        ).last_hidden_state
        state = heads.start(1, 32, 8)
        heads.extend(state, features, prompt[:, 1:], torch.tensor([11]), max_slots=11)
    torch.testing.assert_close(model.lm_head(found)[:, 1:], state.logits, atol=1e-5, rtol=1e-4)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    drafted = model.generate(prompt, assistant_model=assistant, speculation_type="dflash", **options)
    assert torch.equal(drafted, model.generate(prompt, **options))


def test_a_reduced_vocabulary_of_speculators(target: Target) -> None:
    published = publish(BlockSpeculators(), tiny_heads("block", target, **FLASH))
    whole = {"d2t": torch.zeros(128, dtype=torch.long), "t2d": torch.ones(128, dtype=torch.bool)}
    import_heads(BlockSpeculators(), change(published, whole), target)
    message = refusal_of(BlockSpeculators(), change(published, whole | {"d2t": torch.arange(128)}), target)
    assert "tensor d2t maps a reduced vocabulary" in message


def test_a_target_that_scales_its_embeddings() -> None:
    target = Target(tiny_target("gemma3"))
    with pytest.raises(ValueError, match="scales its embeddings"):
        export_heads(VLLMBlock(), tiny_heads("block", target, **FLASH))
