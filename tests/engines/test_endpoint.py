"""Features from vLLM's server: the states that are computed here, and heads that train from them.

`make test-engines` makes vLLM's environment and runs these; elsewhere VLLM_PYTHON names a Python that has vLLM.
"""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file

from draftsmith.training.features.store import FeatureStore
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.engines.environments.servers import running_vllm
from tests.training import runner

LAYERS = "feature_layers=[2,8,13]"
CONVERSATIONS = REPOSITORY / "examples/conversations.jsonl.gz"
LARGEST_ERROR = 1e-4

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def extract(folder: Path, **options: Any) -> int:
    given = {"target": CHAT_TARGET, "target_dtype": "float32", "dataset": CONVERSATIONS, "max_samples": 80}
    given |= {"head_type": "eagle3", "head_overrides": LAYERS, "shard_mb": 5, "output_dir": folder, **options}
    return runner.extract(**given)


def find_command(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words after `vllm serve` that the program prints where no server runs, with the connector for CPUs."""
    with monkeypatch.context() as patch:
        patch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.01)
        with pytest.raises(ConnectionError, match="start one with: vllm serve ") as error:
            extract(shared_folder / "none", endpoint="http://127.0.0.1:9/v1", shared_folder=shared_folder)
    words = shlex.split(str(error.value).partition("vllm serve ")[2])
    place = words.index("--kv-transfer-config") + 1
    connector = {"kv_connector": "CPUHiddenStatesConnector", "kv_connector_module_path": "cpu_connector"}
    words[place] = json.dumps(json.loads(words[place]) | connector)
    return words


def test_vllm_gives_our_states(
    vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "draftsmith.training.features")
    words = find_command(tmp_path / "shared", monkeypatch)
    total = extract(tmp_path / "local")
    modules = Path(__file__).with_name("environments")
    with running_vllm(vllm_python, words, tmp_path / "log", modules=modules) as address:
        options = {"endpoint": f"{address}/v1", "shared_folder": tmp_path / "shared"}
        assert extract(tmp_path / "remote", **options) == total
        (tmp_path / "remote/shard-00001.safetensors").unlink()
        assert 0 < extract(tmp_path / "remote", **options) < total
    assert list((tmp_path / "shared/layers-2-8-13-16").iterdir()) == []
    assert FeatureStore(tmp_path / "remote").settings == FeatureStore(tmp_path / "local").settings

    errors: dict[str, float] = {}
    for path in (tmp_path / "local").glob("*.safetensors"):
        found = load_file(tmp_path / "remote" / path.name)
        for name, tensor in load_file(path).items():
            errors[name] = max(errors.get(name, 0.0), float((tensor - found[name]).abs().max()))
    print(f"{total} tokens; largest differences:", {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < LARGEST_ERROR
    check_training(tmp_path)
    checks = [message for message in caplog.messages if message.startswith("self-check")]
    print(*checks, sep="\n")
    assert len(checks) == 4  # two extractions from the server, two runs


def check_training(folder: Path) -> None:
    """Heads that learn a few steps from the server's states have the held-out loss of those that learn from ours."""
    losses = []
    for name in ("local", "remote"):
        train = runner.Runner(CHAT_TARGET, CONVERSATIONS, folder / f"heads-{name}")
        options: dict[str, Any] = {"target_dtype": "float32", "max_samples": 80, "max_length": 2048}
        options |= {"head_overrides": [LAYERS, "ttt_steps=2"], "features": folder / name, "num_eval_prompts": 0}
        losses.append(train(**options)["eval_loss"])
    print("held-out losses after eight steps from our states and from vLLM's:", losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
