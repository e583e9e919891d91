"""Runs in the environment of speculators: loads our export, runs it over a text, or trains, and saves.

    python speculators_worker.py JOB.json RESULT.safetensors

The job: heads (a folder), states (a safetensors file with features [T, F], last_hidden [T, D] and input_ids [T]),
options of training, and, to train, train_steps and saved (a folder for the trainer's checkpoints). The result, before
training: logits, [calls of the LM head, rows, Vd], and, of heads with a selector, candidates and scores, [rows, k]. The
names of the model's tensors go to RESULT.json beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig
from speculators.train import distributed
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config: Any = SpeculatorModelConfig.from_pretrained(job["heads"])
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention has no backward pass on a CPU
    model: Any = SpeculatorModel.from_pretrained(job["heads"], config=config)
    states = load_file(job["states"])
    input_ids = states["input_ids"][None]
    batch = {
        "hidden_states": states["features"][None],
        "input_ids": input_ids,
        "document_ids": torch.zeros_like(input_ids),
        "loss_mask": torch.ones_like(input_ids, dtype=torch.bool),
        "verifier_last_hidden_states": states["last_hidden"][None],
    }
    # The fused losses are Triton's.
    options, _ = model.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", **job["options"])
    save_file(compute(model, {**batch, **options}), sys.argv[2])
    names = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    Path(sys.argv[2]).with_suffix(".json").write_text(json.dumps(names), encoding="utf-8")
    if job["train_steps"]:
        train(model, batch, options, job["train_steps"], job["saved"])


@torch.no_grad()
def compute(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What its forward pass computes, with the candidates of drafting: training puts the right token among them."""
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].clone()))
    selector = getattr(model, "candidate_selector", None)
    if selector is not None:
        selector.score_candidates = Mock(wraps=selector.score_candidates)
    with patch("torch.randperm", lambda count, **_: torch.arange(count)):  # what is drawn, is drawn in order
        model.eval()(**inputs)
    hook.remove()
    computed = {"logits": torch.stack(logits)}
    if selector is not None:
        *given, _ = selector.score_candidates.call_args.args
        del selector.score_candidates
        candidates, scores = selector.select(*given)
        computed |= {"candidates": candidates[0], "scores": scores[0]}
    return computed


def train(model: Any, batch: dict[str, Any], options: dict[str, Any], num_steps: int, folder: str) -> None:
    """Steps of its trainer, which saves into `folder`/0. It names the devices of accelerators only."""
    distributed._local_rank = "cpu"
    torch.accelerator.synchronize = lambda: None
    model.load_verifier_weights()
    config = TrainerConfig(
        lr=1e-3, num_epochs=1, save_path=folder, train_call_kwargs=options, hidden_states_dtype=torch.float32
    )
    batches = [{**batch, "error_records": 0}] * num_steps
    Trainer(model, config, DataLoader(batches, batch_size=None)).run_training()


if __name__ == "__main__":
    main()
