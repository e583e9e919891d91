"""Whole runs on stored features: extracted, trained from, refused."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads import create_heads
from draftsmith.inference import Target
from draftsmith.training.features import sources
from draftsmith.training.features.extraction import Extraction
from draftsmith.training.features.store import FeatureStore
from tests.tiny_targets import tiny_target
from tests.training import runner
from tests.training.feature_cases import count_computed
from tests.training.runner import TEMPLATE, WORDS, Runner, assert_same, save_chat_target, write_conversations

# One row at a time, so that every pass has the shape it has online: what is stored is then the same bit for bit.
ALONE: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "max_steps": None,
    "num_train_epochs": 2,
    "num_eval_prompts": 0,
    "validation_fraction": 0,
    "gradient_accumulation_steps": 4,
    "max_samples": 8,
    "head_overrides": ["ttt_steps=1", "draft_vocab_size=40"],
}

Extract = Callable[..., int]


@pytest.fixture
def extract(target_path: Path, conversations: Path, tmp_path: Path) -> Extract:
    """Extracts what `Runner` trains on into `folder`; options as on the command line."""

    def run(folder: Path = tmp_path / "features", **options: Any) -> int:
        defaults = {"target": target_path, "dataset": conversations, "max_length": 64, "head_type": "eagle3"}
        return runner.extract(**{"output_dir": folder, "batch_size": 1, **defaults, **options})

    return run


def test_online_and_stored_features_train_the_same_heads(
    train: Runner, extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs, bit for bit; with stored features the target runs for nothing but checks. A process loads data."""
    extract()
    passes = count_computed(monkeypatch)
    train(**ALONE)
    online, computed = train.weights(), len(passes)
    assert computed == 2 * ALONE["max_samples"] + 1  # the self-check's
    passes.clear()
    train(**ALONE, features=tmp_path / "features", dataloader_num_workers=1)
    assert_same(online, train.weights())
    assert passes == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_leaves_whole_shards(
    train: Runner, extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 while the third shard is computed; the same command then writes what is missing.
    Two processes, one after the other, write the same."""
    options = {"shard_mb": 0.03}
    total = extract(tmp_path / "whole", **options)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert len(whole) > 5

    run = Extraction.run

    def killed(self: Extraction, *, rank: int, num_processes: int, progress: Any) -> int:
        def report(tokens: int) -> None:
            if len(list(self.folder.glob("shard-*.safetensors"))) >= 2:
                os.kill(os.getpid(), signal.SIGKILL)

        return run(self, rank=rank, num_processes=num_processes, progress=report)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Extraction, "run", killed)
        extract(**options)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    folder = tmp_path / "features"
    assert len(list(folder.glob("shard-*.safetensors"))) >= 2
    before = FeatureStore(folder)
    with pytest.raises(ValueError, match=r"not finished: it has \d+ of \d+ shards"):
        train(features=folder)
    assert 0 < extract(**options) < total
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in whole} == whole
    assert len(FeatureStore(folder)) == 24 > len(before)
    assert extract(**options) == 0

    two = tmp_path / "two"
    assert extract(two, rank=1, num_processes=2, **options) + extract(two, num_processes=2, **options) == total
    assert {path.name: path.read_bytes() for path in two.iterdir()} == whole


@pytest.fixture(scope="module")
def other_target(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape and tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    for file in target_path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tiny_target("llama", seed=3, vocab_size=60, num_hidden_layers=4, initializer_range=0.2).save_pretrained(folder)
    return folder


class TestRefusals:
    def test_features_that_are_not_this_runs(
        self, train: Runner, extract: Extract, other_target: Path, tmp_path: Path
    ) -> None:
        extract(head_overrides=["feature_layers=[2]"], max_samples=20)
        stored = {"features": tmp_path / "features"}
        medusa = {"head_type": "medusa", "head_overrides": None, **stored}
        for options, message in (
            ({**medusa, "target": other_target}, "states of another target .* differ in weights_hash"),
            ({**medusa, "target_dtype": "bfloat16"}, r"differ in dtype float32 \(now bfloat16\), .*--target_dtype"),
            (stored, "holds hidden.2, last, and these eagle3 heads read .* extract again with --head_type eagle3"),
            (medusa, r"lacks \d+ of the \d+ training texts .* the max_length"),
            ({"features": tmp_path / "nowhere"}, "holds no features .* draftsmith features --output_dir"),
        ):
            with pytest.raises(ValueError, match=message):
                train(**options)
        # The rows in it are of use to any kind that reads the last state, whatever else is stored.
        assert train(**medusa, max_samples=20)["eval_loss"] > 0

    def test_a_self_check_that_fails_stops_the_run(
        self, train: Runner, extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """States before the final norm in the place of those after it."""
        encode = sources.encode

        def encode_wrongly(*args: Any, **kwargs: Any) -> Any:
            encoded = encode(*args, **kwargs)
            return replace(encoded, last_hidden=encoded.last_hidden * 1.3)

        with monkeypatch.context() as patch:
            patch.setattr(sources, "encode", encode_wrongly)
            extract()
        with pytest.raises(ValueError, match=r"the target's distribution: .* extract them again"):
            train(features=tmp_path / "features")

    def test_an_extraction_of_something_else(self, extract: Extract, other_target: Path) -> None:
        extract()
        for options, message in (
            ({"max_length": 16}, "holds other features .*data_hash was .*give another --output_dir"),
            ({"target": other_target}, "states of another target"),
        ):
            with pytest.raises(ValueError, match=message):
                extract(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"head_type": "medusas"}, "unknown head_type 'medusas'; did you mean medusa; known kinds: .*medusa"),
            ({"shard_target": "fsdp2"}, "got shard_target fsdp2: each process extracts"),
            ({"shard_mb": 0}, "got shard_mb 0.0: it must be above 0"),
        ],
    )
    def test_options(self, extract: Extract, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            extract(**options)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_heads_with_an_adapter_learn_from_the_adapted_targets_states(
    train: Runner, extract: Extract, target_path: Path, tmp_path: Path
) -> None:
    """Online and offline alike; states of the target as it is, or with another adapter, are refused."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    for name in ("one", "other"):
        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(target_path), config).eval()
        heads = create_heads("medusa", Target(model.requires_grad_(False)), num_heads=2)
        heads.belong_to_adapter(model)
        heads.save_pretrained(tmp_path / name)
    continued: dict[str, Any] = {**ALONE, "head_type": None, "head_overrides": None, "init_heads": tmp_path / "one"}
    features = tmp_path / "features"
    extract(head_type=None, init_heads=tmp_path / "one")
    train(**continued)
    online = train.weights()
    train(**continued, features=features)
    assert_same(online, train.weights())

    extract(plain := tmp_path / "plain", head_type="medusa")
    for folder, changes, message in (
        (features, {"init_heads": tmp_path / "other"}, r"adapter_hash \w{16} \(now \w{16}\)\. .*--init_heads"),
        (features, {"init_heads": None, "head_type": "medusa"}, r"adapter_hash \w{16} \(now None\)"),
        (plain, {}, r"adapter_hash None \(now \w{16}\)"),
    ):
        with pytest.raises(ValueError, match=message):
            train(**{**continued, **changes}, features=folder)
    with pytest.raises(ValueError, match=r"init_heads .* with an adapter"):
        extract(head_type=None, init_heads=tmp_path / "one", endpoint="http://127.0.0.1:9/v1", batch_size=None)


def test_a_template_that_writes_the_date_is_named(
    train: Runner,
    extract: Extract,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The texts of the next day are others; tokenized rows are cached with their date, until the file changes."""
    target = save_chat_target(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{{ strftime_now('word%d') }} " + TEMPLATE
    tokenizer.save_pretrained(target)

    def begin_day(day: int) -> None:
        today = SimpleNamespace(now=lambda: datetime(2026, 1, day))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", today)
        os.utime(conversations, ns=(day, day))

    stored = {"target": target, "features": tmp_path / "features", "max_steps": 1, "num_eval_prompts": 0}
    begin_day(11)
    extract(target=target)
    assert "strftime_now" in caplog.text
    train(**stored)
    begin_day(12)
    with pytest.raises(ValueError, match=r"lacks \d+ of the \d+ training texts .*\(strftime_now\)"):
        train(**stored)
    with pytest.raises(ValueError, match=r"lacks a text of this batch: .*\(strftime_now\)"):
        train(**stored, streaming=True, validation_fraction=0)


def test_a_training_configuration_names_what_to_extract(extract: Extract, tmp_path: Path) -> None:
    """What the two programs share; its learning rate and its output_dir are training's."""
    config = tmp_path / "train.yaml"
    config.write_text(f"max_length: 32\nlearning_rate: 0.1\nhead_type: medusa\noutput_dir: {tmp_path / 'heads'}\n")
    assert extract(config=config, max_length=None, head_type=None) > 0
    assert list(FeatureStore(tmp_path / "features").settings.tensors) == ["last"]
    assert not (tmp_path / "heads").exists()
    config.write_text("learning_rates: 0.1\n")
    with pytest.raises(ValueError, match=r"unknown key 'learning_rates' .* did you mean 'learning_rate'"):
        extract(config=config)


def test_features_of_another_data_set_are_found_by_their_text(train: Runner, extract: Extract, tmp_path: Path) -> None:
    """Order, split and duplicates are not part of the store."""
    more = write_conversations(tmp_path / "more.jsonl", words=WORDS, seed=5)
    both = tmp_path / "both.jsonl"
    first = Path(str(train.defaults["dataset"])).read_text()
    both.write_text(more.read_text() + first + first)
    extract(dataset=both)
    assert len(FeatureStore(tmp_path / "features")) == 48
    stored = {"features": tmp_path / "features", "num_eval_prompts": 0, "max_steps": 1}
    train(**stored)
    train(**stored, packing=True)
    train(**stored, streaming=True)
    with pytest.raises(ValueError, match="got streaming: an extraction"):
        extract(streaming=True)
