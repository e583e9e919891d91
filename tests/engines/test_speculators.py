"""speculators reads our export, computes what we compute, and what it trains and saves decodes here.

`make test-engines` makes its environment and runs these; elsewhere SPECULATORS_PYTHON names a Python that has it.
"""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.dflash2 import SELECTOR
from draftsmith.inference import Target, generate
from draftsmith.training.features.encoding import encode
from tests.conftest import CHAT_TARGET
from tests.engines.chains import read_turns
from tests.engines.environments.running import find_python, run_worker
from tests.engines.learning import load_trained
from tests.heads.tiny_heads import tiny_heads

NUM_STEPS, LENGTH, TRAIN_STEPS = 4, 128, 50
LARGEST_ERROR = {"eagle3": 2e-5, "parallel": 2e-5, "block": 2e-5, "dflash2": 5e-5}

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def run_speculators(
    python: str, folder: Path, states: dict[str, torch.Tensor], options: dict[str, Any], place: Path
) -> dict[str, torch.Tensor]:
    """What speculators computes with the heads in `folder`; it trains them into `place`/saved/0."""
    save_file(states, place / "states.safetensors")
    job = {
        "heads": str(folder),
        "states": str(place / "states.safetensors"),
        "options": options,
        "train_steps": TRAIN_STEPS,
        "saved": str(place / "saved"),
    }
    path = run_worker(python, "speculators_worker.py", job, place, "result.safetensors")
    names = json.loads((place / "result.json").read_text(encoding="utf-8"))
    # The target's own weights, which speculators holds too, are not in the file.
    written = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {name: shape for name, shape in names.items() if not name.startswith("verifier_")} == written
    return load_file(path)


@torch.no_grad()
def encode_text(target: Target, heads: DraftHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [1, T, F], token ids [1, T + 1] and states [T, D] before the final norm of a text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(CHAT_TARGET)
    text = " ".join(turn[0]["content"] for turn in read_turns(20))
    token_ids = torch.tensor([tokenizer(text)["input_ids"][: LENGTH + 1]])
    encoded = encode(target, token_ids, torch.ones_like(token_ids), feature_layers=heads.feature_layers)
    gain = target.final_norm_gain()
    before_norm = encoded.last_hidden[0, :LENGTH] / gain  # up to its length, which the final norm does not see
    return encoded.features[:, :LENGTH], token_ids, before_norm


# As speculators trains by default, but for a window that cuts, and with a layer more.
AS_BY_DEFAULT = {
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True),
    "num_layers": 2,
    "sliding_window": 16,
}
STEPS = {"ttt_steps": NUM_STEPS, "ttt_step_loss_decay": 1.0}
EVERY_ROW = {"num_depths": NUM_STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
# Kind, settings (None = trained heads), and the options of its training.
EAGLES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", None, STEPS),
    "EAGLE-3 by default": ("eagle3", AS_BY_DEFAULT, STEPS),
    "P-EAGLE": ("parallel", {"num_depths": NUM_STEPS, "sliding_window": 16}, EVERY_ROW),
}


@pytest.mark.parametrize(("kind", "settings", "options"), EAGLES.values(), ids=EAGLES)
def test_eagle(
    kind: str,
    settings: dict[str, Any] | None,
    options: dict[str, Any],
    target: Target,
    exported: Callable[..., Path],
    tmp_path: Path,
) -> None:
    python = find_python("SPECULATORS_PYTHON")
    heads = load_trained(kind, target) if settings is None else tiny_heads(kind, target, **settings)
    features, token_ids, last_hidden = encode_text(target, heads)
    states = {"features": features[0], "input_ids": token_ids[0, 1:], "last_hidden": last_hidden}
    logits = run_speculators(python, exported(heads, "speculators"), states, options, tmp_path)["logits"]
    theirs = [rows[: LENGTH - number] for number, rows in enumerate(logits)]
    if kind == "parallel":  # one pass; mask rows begin with those of a slot before the text
        first, *masks = logits[0].split([LENGTH - depth for depth in range(NUM_STEPS)])
        theirs = [first, *(rows[1:] for rows in masks)]
    with torch.no_grad():
        steps = heads.unroll(torch.cat([features, features[:, -1:]], dim=1), token_ids)[:NUM_STEPS]
    for number, (step, rows) in enumerate(zip(steps, theirs, strict=True)):
        error = (step.head(step.hidden)[0, : len(rows)] - rows).abs().max().item()
        print(f"step {number + 1}: logits differ by at most {error:.1e}")
        assert error < LARGEST_ERROR[kind]
    trained = read_trained(tmp_path, heads, {"layers.0.": "layers.1.", "midlayer.": "layers.0."})
    check_texts(target, trained, at_least=1.2 if settings is None else 1.0)


# Layers with and without a window that cuts, blocks that are causal in the former, and drafts from the anchor's row.
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash": (
        "block",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "sliding_is_causal": True},
    ),
    "DFlash 2": ("dflash2", {"conv_kernel_size": 3, "selector_rank": 8}),
    "DFlash 2 with a window, from the anchor": (
        "dflash2",
        {"predicts_at_anchor": True, "sliding_window": 16, "selector_rank": 8, "selector_top_k": 12},
    ),
}


@pytest.mark.parametrize(("kind", "settings"), BLOCKS.values(), ids=BLOCKS)
def test_blocks(
    kind: str, settings: dict[str, Any], target: Target, exported: Callable[..., Path], tmp_path: Path
) -> None:
    python = find_python("SPECULATORS_PYTHON")
    heads: Any = tiny_heads(kind, target, block_size=4, **settings)
    features, token_ids, last_hidden = encode_text(target, heads)
    states = {"features": features[0], "input_ids": token_ids[0, :LENGTH], "last_hidden": last_hidden}
    num_blocks = LENGTH - heads.config.block_size  # as many as there are, so that all positions are drawn
    folder, options = exported(heads, "speculators"), {"max_anchors": num_blocks}
    # The block at position p is drafted from slot p - 1. The first one has no context.
    computed = {
        name: rows.squeeze(0).unflatten(0, (num_blocks, -1))[1:, -heads.max_depth :]
        for name, rows in run_speculators(python, folder, states, options, tmp_path).items()
    }
    with torch.no_grad():
        for depth, step in enumerate(heads.unroll(features, token_ids[:, :LENGTH])):
            hidden = step.hidden[0, : num_blocks - 1]
            logits = step.head(hidden)
            errors = [logits - computed["logits"][:, depth]]
            if step.rescore is not None:
                ids = computed["candidates"][:, depth]
                best = logits.gather(-1, ids)
                errors.append(best - logits.topk(step.num_candidates, dim=-1).values)
                errors.append(best + step.rescore(hidden, ids) - computed["scores"][:, depth])
            largest = [error.abs().max().item() for error in errors]
            print(f"depth {depth + 1}: logits, candidates and scores differ by at most", *map("{:.1e}".format, largest))
            assert max(largest) < LARGEST_ERROR[kind]
    check_texts(target, read_trained(tmp_path, heads, SELECTOR), at_least=1.0)


def read_trained(place: Path, heads: DraftHeads, names: dict[str, str]) -> DraftHeads:
    """What speculators saved, which is read bit for bit; `names` are parts of ours -> parts of its names."""
    folder = place / "saved/0"
    trained = DraftHeads.from_pretrained(folder, target=heads.target)
    saved, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text("utf-8"))
    if (mask := config.get("mask_token_id")) is not None:
        saved["mask_embedding"] = saved.get("embed_tokens.weight", heads.target.embed_tokens.weight)[mask]
    for name, tensor in trained.state_dict().items():
        theirs = reduce(lambda name, pair: name.replace(*pair), names.items(), name)
        assert torch.equal(tensor, saved[theirs].view_as(tensor)), name
    assert trained.feature_layers == heads.feature_layers
    before, after = (one.state_dict()["fc.weight"] for one in (heads, trained))
    assert not torch.equal(before.to(after), after)
    return trained


def check_texts(target: Target, heads: DraftHeads, at_least: float) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(CHAT_TARGET)
    lengths = []
    for prompt in ("Tell me about the sea.", "How do I keep my plants alive in winter?"):
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        drafted = generate(target, heads, **inputs, max_new_tokens=48, do_sample=False)
        plain = generate(target, None, **inputs, max_new_tokens=48, do_sample=False)
        assert torch.equal(drafted.sequences, plain.sequences)
        lengths.append(drafted.stats.acceptance_length)
    print("acceptance lengths of heads that speculators trained:", lengths)
    assert max(lengths) >= at_least
