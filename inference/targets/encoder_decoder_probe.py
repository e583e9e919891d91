"""Examines an encoder-decoder model, as `probe.py` examines decoder-only models."""

from __future__ import annotations

from typing import Any

import torch

from inference.cache.source import Source, SourceMemory
from inference.targets.encoder_decoder import PlacedDecoder
from inference.targets.probe_tree import (
    Findings,
    MakeMasks,
    ProbeTree,
    RecordingCache,
    check_branches,
    check_finite,
    draw_ids,
    refusing,
    takes_inference_mode,
)


@torch.no_grad()
def examine_encoder_decoder(model: Any, placed: PlacedDecoder, make_masks: MakeMasks, device: torch.device) -> Findings:
    """`examine_model` for an encoder-decoder model. It reads the same tree for a source of three tokens, and compares
    logits instead of hidden states."""
    name = type(model).__name__
    token_ids = draw_ids(model, 1, device)
    tree = ProbeTree.of_tokens(token_ids, make_masks)
    cache = RecordingCache(name)
    with refusing(f"{name} does not run as an encoder of token ids and a decoder with a 4-D mask and a cache"):
        encoded = model.get_encoder()(input_ids=token_ids[:, :3], return_dict=True)
        source = Source(token_ids[:, :3], torch.ones_like(token_ids[:, :3]).bool(), encoded.last_hidden_state)
        memory = SourceMemory(source)
        tree_logits = placed.run(memory, cache, token_ids, tree.positions, tree.key_positions, tree.masks)
        plain = {"encoder_outputs": encoded, "decoder_input_ids": token_ids[:, :2], "use_cache": False}
        logits = model(**plain, return_dict=True).logits
    check_finite(model, "encoder's last states", [encoded.last_hidden_state])
    check_finite(model, "logits", [logits], tree_logits)
    if not cache.specs or set(cache.specs) != set(range(len(cache.specs))):
        raise ValueError(
            f"only the layers {sorted(cache.specs)} of the decoder of {name} write keys and values into the cache, so "
            f"it cannot be rolled back after a rejected draft"
        )
    check_branches(cache, tree_logits[0], logits[0], noise=0.0)
    specs = tuple(cache.specs[layer] for layer in range(len(cache.specs)))
    is_fast = takes_inference_mode(lambda: model(**plain))
    return Findings(specs, None, logits.shape[-1], None, is_fast)
