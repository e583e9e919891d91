"""Features from a server: those that are computed here, after faults that pass; other faults are told with their cure.

tests/engines/test_endpoint.py does the same with vLLM.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.inference import Target
from draftsmith.training.endpoint import hidden_states
from draftsmith.training.features.store import FeatureStore
from draftsmith.training.features.store_checks import identify_target
from draftsmith.training.features.target_loading import load_first_layers
from draftsmith.training.features.target_options import ModelArguments
from tests.tiny_targets import tiny_target
from tests.training import runner
from tests.training.runner import Runner
from tests.training.states_server import LAYERS, StatesServer

Extract = Callable[..., int]
CLOSE = 1e-5


@pytest.fixture
def extract(server: StatesServer, target_path: Path, conversations: Path, tmp_path: Path) -> Extract:
    """Extracts into `tmp_path`/remote, from the server unless `endpoint` is None."""

    def run(**options: Any) -> int:
        defaults = {"target": target_path, "dataset": conversations, "max_length": 64, "head_type": "eagle3"}
        defaults |= {"head_overrides": f"feature_layers={LAYERS}", "output_dir": tmp_path / "remote"}
        if options.get("endpoint", "") is not None:
            defaults |= {"endpoint": server.url, "endpoint_model": "tiny", "concurrency": 4}
        return runner.extract(**{**defaults, **options})

    return run


def assert_close(one: Path, other: Path) -> None:
    """The same settings, shards and rows, whose states differ by rounding only."""
    first, second = FeatureStore(one), FeatureStore(other)
    assert first.settings == second.settings
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    assert len(first) == len(second) == 24
    for path in one.glob("*.safetensors"):
        tensors, expected = (hidden_states.load_file(folder / path.name) for folder in (one, other))
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=CLOSE, atol=CLOSE)


def test_a_server_gives_the_states_that_are_computed_here(
    extract: Extract, server: StatesServer, tmp_path: Path, train: Runner
) -> None:
    """Several requests at a time, over several shards; files are deleted. Heads train from the store."""
    total = extract(endpoint=None, output_dir=tmp_path / "local", shard_mb=0.03)
    assert extract(shard_mb=0.03) == total
    assert_close(tmp_path / "remote", tmp_path / "local")
    assert FeatureStore(tmp_path / "remote").num_finished > 5
    assert 1 < server.max_in_flight <= 4
    assert list(server.folder.iterdir()) == []
    train(features=tmp_path / "remote", head_overrides=[f"feature_layers={LAYERS}", "ttt_steps=2"])


def test_a_broken_run_continues_after_the_shards_it_wrote(
    extract: Extract, server: StatesServer, tmp_path: Path
) -> None:
    """Faults that pass are tried again; at the last one the run stops, and the next run asks for the rest."""
    total = extract(endpoint=None, output_dir=tmp_path / "local", shard_mb=0.03)
    complete = server.extract

    def dying(ids: list[int], num_best: int) -> dict[str, Any]:
        if len(server.bodies) > 15:
            server.faults.extend([(503, {}, "loading")] * 100)
        return complete(ids, num_best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "extract", dying)
        server.faults.extend([None, (503, {}, "loading"), (500, {}, "sorry")])
        with pytest.raises(ConnectionError, match=r"503 .*loading"):
            extract(shard_mb=0.03)
    server.faults.clear()
    assert 0 < FeatureStore(tmp_path / "remote").num_finished < FeatureStore(tmp_path / "local").num_finished
    assert 0 < extract(shard_mb=0.03) < total
    assert_close(tmp_path / "remote", tmp_path / "local")
    assert extract(shard_mb=0.03) == 0


def no_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


def other_tokens(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"token_ids": tensors["token_ids"].flip(0)}


def not_finite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    states = tensors["hidden_states"].clone()
    states[0, 1, 2] = float("nan")
    return tensors | {"hidden_states": states}


def swapped_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"hidden_states": tensors["hidden_states"][:, [1, 0, 2, 3]].contiguous()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_tensors, r"0\.3 seconds.*--shared_folder"),
        (other_tokens, "other tokens"),
        (not_finite, r"not finite.*--dtype"),
        (swapped_layers, r"hidden\.1 .*numbers its layers"),
    ],
)
def test_wrong_files_are_refused(
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    message: str,
    extract: Extract,
    server: StatesServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.spoil = spoil
    if spoil is no_tensors:
        monkeypatch.setattr(hidden_states, "FILE_TIMEOUT", 0.3)
    if spoil is swapped_layers:  # as in a large target, whose later layers are not here
        monkeypatch.setattr("draftsmith.training.features.extraction.NUM_LAYERS", 2)
    with pytest.raises(ValueError, match=message):
        extract()
    assert not (tmp_path / "remote").exists()  # other options may follow


def test_a_server_without_the_method_or_with_other_layers(extract: Extract, server: StatesServer) -> None:
    server.is_extracting = False
    with pytest.raises(ValueError, match="Start it with: vllm serve") as error:
        extract()
    assert "--dtype float32 --served-model-name tiny" in str(error.value)
    server.reset(server.folder.parent, [0, 1, 2, 4])
    with pytest.raises(ValueError, match=r"layers-0-1-2-4.*layers-1-2-3-4"):
        extract()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"endpoint": "http://127.0.0.1:9/v1"}, ConnectionError, "http://127.0.0.1:9/v1"),
        ({"endpoint_model": "other"}, ValueError, "'other'.*tiny.*--endpoint_model"),
        ({"batch_size": 4}, ValueError, "batch_size 4 .*endpoint"),
    ],
)
def test_wrong_options(options: dict[str, Any], kind: type[Exception], message: str, extract: Extract) -> None:
    with pytest.raises(kind, match=message):
        extract(**options)


def test_the_first_layers_are_known_as_the_whole_target(tmp_path: Path) -> None:
    """The same identity; the final norm gives the last state."""
    tiny_target("gemma3").save_pretrained(tmp_path)
    whole = Target(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    first = load_first_layers(ModelArguments(target=str(tmp_path), head_type="eagle3"), 2)
    assert (first.num_loaded, first.num_layers) == (2, whole.num_layers)
    assert identify_target(first, "tiny") == identify_target(whole, "tiny")
    before_norm: list[Tensor] = []
    whole.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    output = whole.model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert torch.equal(first.apply_final_norm(before_norm[0]), output.hidden_states[-1])
    assert torch.equal(first.compute_logits(output.hidden_states[-1]), output.logits)
