"""Runs in the environment of speculators: loads our export, steps through a text, or trains, and saves.

    python speculators_worker.py JOB.json RESULT.safetensors

The job: heads (a folder), states (a safetensors file with features [T, 3D], last_hidden [T, D] and token_ids [T + 1]),
num_steps of the unroll, and, to train, train_steps and saved (a folder for the trainer's checkpoints). The result: the
logits of each step, [num_steps, T, Vd], before training. The names of the model's tensors go to RESULT.json beside it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig
from speculators.losses.utils import resolve_loss_config
from speculators.train import distributed
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config: Any = SpeculatorModelConfig.from_pretrained(job["heads"])
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex attention has no backward pass on a CPU
    model: Any = SpeculatorModel.from_pretrained(job["heads"], config=config)
    states = load_file(job["states"])
    inputs = {
        "hidden_states": states["features"][None],
        "input_ids": states["token_ids"][None, 1:],
        "document_ids": torch.zeros(1, len(states["features"]), dtype=torch.long),
        "ttt_steps": job["num_steps"],
    }
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0].detach().clone()))
    with torch.no_grad():
        model.eval()(**inputs)
    hook.remove()
    save_file({"logits": torch.stack(logits)}, sys.argv[2])
    names = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    Path(sys.argv[2]).with_suffix(".json").write_text(json.dumps(names), encoding="utf-8")
    if job["train_steps"]:
        train(model, inputs, states["last_hidden"], job["train_steps"], job["saved"])


def train(model: Any, inputs: dict[str, Any], last_hidden: torch.Tensor, num_steps: int, folder: str) -> None:
    """Steps of its trainer, which saves into `folder`/0. It names the devices of accelerators only."""
    distributed._local_rank = "cpu"
    torch.accelerator.synchronize = lambda: None
    model.load_verifier_weights()
    losses = resolve_loss_config("kl_div", implementation="eager")  # the fused ones are Triton's
    batch = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
    batch |= {
        "loss_mask": torch.ones_like(inputs["input_ids"], dtype=torch.bool),
        "verifier_last_hidden_states": last_hidden[None],
        "error_records": 0,
    }
    options = {"ttt_steps": inputs["ttt_steps"], "loss_config": losses}
    config = TrainerConfig(
        lr=1e-3, num_epochs=1, save_path=folder, train_call_kwargs=options, hidden_states_dtype=torch.float32
    )
    Trainer(model, config, DataLoader([batch] * num_steps, batch_size=None)).run_training()


if __name__ == "__main__":
    main()
