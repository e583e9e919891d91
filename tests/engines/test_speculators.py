"""speculators reads our export, computes what we compute, and what it trains and saves decodes here.

`make test-engines` makes its environment and runs these; elsewhere SPECULATORS_PYTHON names a Python that has it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target, generate
from draftsmith.training.features.encoding import encode
from tests.conftest import CHAT_TARGET
from tests.engines.chains import read_turns
from tests.engines.environments.running import find_python, run_worker
from tests.engines.learning import load_trained
from tests.heads.tiny_heads import tiny_heads

NUM_STEPS, LENGTH, TRAIN_STEPS = 4, 128, 50
LARGEST_ERROR = 2e-5

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def run_speculators(python: str, job: dict[str, Any], folder: Path) -> tuple[torch.Tensor, dict[str, list[int]]]:
    path = run_worker(python, "speculators_worker.py", job, folder, "result.safetensors")
    names = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return load_file(path)["logits"], names


@torch.no_grad()
def write_states(target: Target, heads: DraftHeads, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [1, T, 3D] and token ids [1, T + 1] of a text; everything that speculators needs goes into the file."""
    tokenizer: Any = AutoTokenizer.from_pretrained(CHAT_TARGET)
    text = " ".join(turn[0]["content"] for turn in read_turns(20))
    token_ids = torch.tensor([tokenizer(text)["input_ids"][: LENGTH + 1]])
    encoded = encode(target, token_ids, torch.ones_like(token_ids), feature_layers=heads.feature_layers)
    features = encoded.features[:, :LENGTH]
    gain = target.final_norm_gain()
    before_norm = encoded.last_hidden[:, :LENGTH] / gain  # up to its length, which the final norm does not see
    save_file({"features": features[0], "last_hidden": before_norm[0], "token_ids": token_ids[0]}, path)
    return features, token_ids


# As speculators trains by default, but for a window that cuts, and with a layer more.
AS_BY_DEFAULT = {
    **dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), True),
    "num_layers": 2,
    "sliding_window": 16,
}


@pytest.mark.parametrize("settings", [None, AS_BY_DEFAULT], ids=["trained", "window and layers"])
def test_forward_training_and_saved_files(
    settings: dict[str, Any] | None, target: Target, exported: Callable[..., Path], tmp_path: Path
) -> None:
    python = find_python("SPECULATORS_PYTHON")
    heads = load_trained("eagle3", target) if settings is None else tiny_heads("eagle3", target, **settings)
    folder = exported(heads, "speculators")
    features, token_ids = write_states(target, heads, tmp_path / "states.safetensors")
    logits, names = run_speculators(
        python,
        {
            "heads": str(folder),
            "states": str(tmp_path / "states.safetensors"),
            "num_steps": NUM_STEPS,
            "train_steps": TRAIN_STEPS,
            "saved": str(tmp_path / "saved"),
        },
        tmp_path,
    )

    # The target's own weights, which speculators holds too, are not in the file.
    written = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {name: shape for name, shape in names.items() if not name.startswith("verifier_")} == written

    with torch.no_grad():
        steps = heads.unroll(torch.cat([features, features[:, -1:]], dim=1), token_ids)
    for number, step in enumerate(steps[:NUM_STEPS]):
        error = (step.head(step.hidden)[0, :LENGTH] - logits[number])[: LENGTH - number].abs().max().item()
        print(f"step {number + 1}: logits differ by at most {error:.1e}")
        assert error < LARGEST_ERROR

    trained = DraftHeads.from_pretrained(tmp_path / "saved/0", target=target)
    saved = load_file(tmp_path / "saved/0/model.safetensors")
    for name, tensor in trained.state_dict().items():
        theirs = name.replace("layers.0.", "layers.1.").replace("midlayer.", "layers.0.")
        assert torch.equal(tensor, saved[theirs]), name
    assert not torch.equal(trained.state_dict()["fc.weight"], heads.state_dict()["fc.weight"])
    check_texts(target, trained, at_least=1.2 if settings is None else 1.0)


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
