"""Runs whose states a server computes while the heads train: as online, resumable, with clear errors."""

import threading
from typing import Any

import pytest
import torch

from draftsmith.training.run import preparation
from draftsmith.training.run.stopping import TrainingStoppedError
from tests.tiny_targets import tiny_target
from tests.training.runner import Runner
from tests.training.states_server import LAYERS, StatesServer

OPTIONS: dict[str, Any] = {
    "head_overrides": [f"feature_layers={LAYERS}", "ttt_steps=2", "draft_vocab_size=40"],
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "num_eval_prompts": 0,
    "eval_strategy": "steps",
    "eval_steps": 4,
}
CLOSE = 1e-4  # online, batches of several texts are rounded otherwise


def served(server: StatesServer, **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "features_endpoint": server.url, "endpoint_model": "tiny", "concurrency": 6, **options}


def wait_for_threads() -> None:
    """Until no request is in flight."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "ThreadPoolExecutor" in thread.name:
            thread.join(0.5)


def test_heads_learn_as_online(
    train: Runner, server: StatesServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses; requests run ahead of training, and no file stays. Of the target only embedding, norm and LM
    head are here, and the acceptance length is not measured."""
    online = train(**OPTIONS)
    weights = train.weights()
    held: list[list[str]] = []
    make = preparation._make_trainer

    def noted(options: Any, models: Any, *args: Any) -> Any:
        held.append(sorted(name for name, _ in models.target.model.named_parameters()))
        return make(options, models, *args)

    monkeypatch.setattr(preparation, "_make_trainer", noted)
    metrics = train(**served(server))
    assert metrics["eval_loss"] == pytest.approx(online["eval_loss"], rel=CLOSE)
    assert metrics.keys() == online.keys()
    for name, weight in train.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-3)
    assert held == [["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]]
    assert "the acceptance length needs the whole target" in caplog.text
    assert 1 < server.max_in_flight <= 6
    wait_for_threads()
    assert list(server.folder.iterdir()) == []


def test_heads_that_run_layers_of_the_target_learn_as_online(train: Runner, server: StatesServer) -> None:
    """Kangaroo heads run the target's first layers in decoding, and in training only read what the layers give."""
    options = {**OPTIONS, "head_type": "kangaroo", "head_overrides": ["exit_layer=1"]}
    online = train(**options)
    server.reset(server.folder, [1, 4])
    metrics = train(**{**served(server), **options})
    assert metrics["eval_loss"] == pytest.approx(online["eval_loss"], rel=CLOSE)


def test_a_server_that_gets_another_model(train: Runner, server: StatesServer) -> None:
    """At the start, and later, when its states have another width."""
    right, server.model = server.model, tiny_target("llama", vocab_size=60, num_hidden_layers=4)
    try:
        with pytest.raises(ValueError, match=r"states hidden\.1 differ .* the server has other weights"):
            train(**served(server))
    finally:
        server.model = right
    complete, asked = server.extract, []

    def other(ids: list[int], num_best: int) -> dict[str, Any]:
        asked.append(ids)
        if len(asked) == 12:
            server.spoil = lambda tensors: tensors | {"hidden_states": tensors["hidden_states"][..., :8].contiguous()}
        return complete(ids, num_best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "extract", other)
        message = (
            r"stopped at step \d: .* another model: its states have 8 numbers, .*vllm serve.* no complete checkpoint"
        )
        with pytest.raises(TrainingStoppedError, match=message):
            train(**served(server))
    wait_for_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "x"}, "got features x with features_endpoint http"),
        ({"features_endpoint": None}, "got endpoint_model, concurrency without features_endpoint"),
        ({"shard_target": "fsdp2"}, r"got features_endpoint http\S+ with shard_target fsdp2: .* splits the target"),
        ({"eval_prompts": "x.jsonl"}, r"got features_endpoint \S+ with eval_prompts x\.jsonl: .* the target decode"),
        ({"target_device_map": "auto"}, "got target_device_map auto with a server"),
        (
            {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 4},
            "features_endpoint excludes both: the target is elsewhere",
        ),
    ],
)
def test_options_that_need_the_target(
    options: dict[str, Any], message: str, train: Runner, server: StatesServer
) -> None:
    with pytest.raises(ValueError, match=message):
        train(**served(server, **options))
