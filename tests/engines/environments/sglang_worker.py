"""Runs in SGLang's own environment: its loader reads exported heads on the CPU, as its server does when it starts.

    python sglang_worker.py JOB.json FOLDER

The job: target and heads (folders), algorithm (`--speculative-algorithm`). Into the folder go the draft model's
parameters after loading (`loaded.safetensors`, with `hot_token_id` where there is one), and `loaded.json`: the class of
the draft model, and the layers of the target whose inputs it would get.

SGLang's loading code runs as it is. torchvision has no build for torch's CPU wheels, and vllm is imported for a RoPE
kernel only: stand-ins take their places.
"""

# ruff: noqa: E402

import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

from safetensors.torch import save_file
from transformers.utils import is_torchvision_available

ABSENT = ("torchvision", "vllm")


class StandIn(ModuleType):
    """A module that has whatever is imported from it."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


assert not is_torchvision_available()  # transformers remembers it, and never asks the stand-in
sys.meta_path.append(StandIns())

from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import resolve_spec_aux_hidden_state_config
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def main() -> None:
    job, folder = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    args = ServerArgs(model_path=job["target"], device="cpu", dtype="float32", skip_tokenizer_init=True)
    args.resolve_once()
    # After the checks of a start, which refuse DFlash and DSpark on a CPU.
    speculation = {"speculative_algorithm": job["algorithm"], "speculative_draft_model_path": job["heads"]}
    declare_resolution(args, "the job", **speculation)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    start_groups(args)
    draft = load(args, job["heads"], is_draft_model=True)
    result = {"class": type(draft).__name__, "tapped": find_tapped_layers(args, job)}
    (folder / "loaded.json").write_text(json.dumps(result), encoding="utf-8")
    tensors = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    if getattr(draft, "hot_token_id", None) is not None:
        tensors["hot_token_id"] = draft.hot_token_id
    save_file(tensors, folder / "loaded.safetensors")


def start_groups(args: Any) -> None:
    """Groups of one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=place, backend="gloo")
    initialize_model_parallel()
    initialize_dp_attention(args)


def load(args: Any, path: str, *, is_draft_model: bool = False) -> Any:
    config = ModelConfig.from_server_args(args, model_path=path, is_draft_model=is_draft_model)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def find_tapped_layers(args: Any, job: dict[str, Any]) -> list[int]:
    """Layer i is one whose input the target hands over: transformers' hidden_states[i]."""
    found = resolve_spec_aux_hidden_state_config(
        server_args=args,
        model_config=ModelConfig.from_server_args(args, model_path=job["target"]),
        spec_algorithm=SpeculativeAlgorithm.from_string(job["algorithm"]),
        is_draft_worker=False,
    )
    if not (found.eagle_use_aux_hidden_state or found.dflash_use_aux_hidden_state):
        return []
    target = load(args, job["target"])
    if found.eagle_use_aux_hidden_state:
        target.set_eagle3_layers_to_capture(found.eagle_aux_hidden_state_layer_ids)
    else:
        target.set_dflash_layers_to_capture(found.dflash_target_layer_ids)
    return list(target.model.layers_to_capture)


if __name__ == "__main__":
    main()
