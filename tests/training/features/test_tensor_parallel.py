"""`--shard_target tp`: the states of a target that two processes share, each with its own batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import TORCHRUN, run_python
from tests.tiny_targets import tiny_target

FAMILIES = ("llama", "qwen3_moe")
PROGRAM = """
import sys, torch, torch.distributed as dist
from draftsmith.inference import Target
from draftsmith.training.features.shared_passes import SharedPasses
from draftsmith.training.features.sharded_target import count_held, is_tensor_parallel
from draftsmith.training.features.sources import OnlineFeatures
from draftsmith.training.features.target_loading import load_model
from draftsmith.training.features.target_options import ModelArguments, PlacementArguments

dist.init_process_group("gloo")
rank = dist.get_rank()
for family in sys.argv[2:]:
    models = [
        load_model(
            ModelArguments(f"{sys.argv[1]}/{family}", head_type="medusa"),
            PlacementArguments(shard_target=sharding),
            torch.device("cpu"),
            num_processes=2,
        )
        for sharding in ("none", "tp")
    ]
    assert [is_tensor_parallel(model) for model in models] == [False, True]
    in_layers = count_held(models[0].model.layers)
    assert count_held(models[0]) - count_held(models[1]) > in_layers / 3
    whole, split = (OnlineFeatures(Target(model), [1, 2]) for model in models)
    torch.manual_seed(rank)
    ids = torch.randint(2, 64, (1, 16 if rank else 24))  # each process has its own batch
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected, found = whole(batch), SharedPasses(split)(batch)
    for name in ("features", "last_hidden"):
        state = getattr(expected, name)
        assert (getattr(found, name) - state).norm() < 1e-5 * state.norm(), name
    logits = [source.target.compute_logits(expected.last_hidden) for source in (whole, split)]
    torch.testing.assert_close(*logits)  # without the other process
    print("equal", family)
dist.destroy_process_group()
"""


@pytest.mark.slow  # two processes import transformers
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_the_states_are_those_of_a_whole_target(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="this transformers keeps no LM head whole")
    for family in FAMILIES:
        tiny_target(family).save_pretrained(tmp_path / family)
    program = tmp_path / "states.py"
    program.write_text(PROGRAM)
    output = run_python(*TORCHRUN, "2", str(program), str(tmp_path), *FAMILIES)
    assert output.count("equal") == 2 * len(FAMILIES)
