"""Whole training runs on a tiny chat target: what they leave behind, and how an interrupted one goes on."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from heads import HEAD_TYPES, DraftHeads, create_heads
from inference import Target, generate
from tests.conftest import REPOSITORY, needs_muon
from tests.tiny_targets import random_prompt, tiny_target
from training import run as run_module
from training import train_heads
from training.arguments import parse_arguments
from training.run import load_datasets, run_training
from training.trainer import HeadsTrainer

SPECIAL = ("<pad>", "<|user|>", "<|assistant|>", "<|end|>")
WORDS = [f"word{index}" for index in range(60 - len(SPECIAL))]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 60 tokens with a tokenizer of one token per word and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama", vocab_size=60, num_hidden_layers=4, initializer_range=0.2).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: index for index, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:3])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write_conversations(path: Path, *, count: int = 24, words: list[str] = WORDS, seed: int = 0) -> Path:
    """Questions of 3 to 8 words; the answers count up through `words` from the question's last."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        question = draw.choices(words, k=draw.randint(3, 8))
        start = words.index(question[-1])
        answer = [words[(start + step) % len(words)] for step in range(1, draw.randint(10, 20))]
        turns = (("user", question), ("assistant", answer))
        lines.append(json.dumps({"messages": [{"role": role, "content": " ".join(text)} for role, text in turns]}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    return write_conversations(tmp_path / "conversations.jsonl")


class InterruptedRunError(Exception):
    """Stands for whatever breaks off a run."""


class Runner:
    """Runs training into `output_dir` with options as on the command line."""

    def __init__(self, target_path: Path, conversations: Path, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.defaults: dict[str, Any] = {
            "target": target_path,
            "dataset": conversations,
            "output_dir": output_dir,
            "head_type": "eagle3",
            "head_overrides": ["ttt_steps=2", "draft_vocab_size=40"],
            "validation_fraction": 0.25,
            "max_length": 64,
            "num_eval_prompts": 2,
            "eval_max_new_tokens": 8,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.003,
            "max_steps": 8,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
        }

    def arguments(self, **options: Any) -> list[str]:
        words = []
        for key, value in {**self.defaults, **options}.items():
            if value is not None:
                words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        return words

    def __call__(self, **options: Any) -> dict[str, float]:
        return run_training(*parse_arguments(self.arguments(**options)))

    def weights(self) -> dict[str, Tensor]:
        return load_file(self.output_dir / "model.safetensors")


@pytest.fixture
def train(target_path: Path, conversations: Path, tmp_path: Path) -> Runner:
    return Runner(target_path, conversations, tmp_path / "heads")


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


class TestARun:
    @pytest.mark.parametrize("head_type", HEAD_TYPES)
    def test_learns_evaluates_and_saves(self, train: Runner, target_path: Path, head_type: str) -> None:
        metrics = train(head_type=head_type, head_overrides=None, max_steps=30, save_strategy="steps", save_steps=30)
        state = json.loads((train.output_dir / "checkpoint-30" / "trainer_state.json").read_text())
        losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
        assert len(losses) == 30
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert metrics["eval_loss"] > 0
        assert metrics["eval_acceptance_length"] >= 1
        assert {"eval_top1_depth1", "eval_top5_depth1", "eval_top1_depth2", "eval_top5_depth2"} <= metrics.keys()

        files = {path.name for path in train.output_dir.iterdir()}
        assert files == {
            "checkpoint-30",
            "config.json",
            "model.safetensors",
            "training_config.yaml",
            "training_record.json",
        }
        record = json.loads((train.output_dir / "training_record.json").read_text())
        assert record["metrics"] == metrics
        assert record["command"].startswith("train_heads.py")
        assert {"torch", "transformers"} <= record["versions"].keys()

        heads = DraftHeads.from_pretrained(train.output_dir)
        assert heads.config.target_name_or_path == str(target_path)
        model: Any = tiny_target("llama", vocab_size=60, num_hidden_layers=4, initializer_range=0.2)
        prompt = random_prompt(6, vocab_size=60)
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        found = generate(Target(model), heads, prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(found.sequences, expected)

    def test_its_config_reads_back_to_the_same_arguments(self, train: Runner) -> None:
        before = parse_arguments(train.arguments(max_steps=1, weight_decay=0.125, seed=7))
        run_training(*before)
        after = parse_arguments(["--config", str(train.output_dir / "training_config.yaml")])
        for one, other in zip(before, after, strict=True):
            assert one == other
        settings = yaml.safe_load((train.output_dir / "training_config.yaml").read_text())
        assert settings["head_overrides"] == {"ttt_steps": 2, "draft_vocab_size": 40}
        assert settings["weight_decay"] == 0.125

    def test_its_config_is_there_when_it_is_interrupted(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        interrupt_at_step(1, monkeypatch)
        with pytest.raises(InterruptedRunError):
            train()
        assert yaml.safe_load((train.output_dir / "training_config.yaml").read_text())["max_steps"] == 8

    @pytest.mark.parametrize(
        ("options", "evaluations"),
        [
            ({"eval_strategy": "no"}, 1),
            ({"eval_strategy": "steps", "eval_steps": 2}, 2),
            ({"eval_strategy": "steps", "eval_steps": 3}, 2),
            ({"eval_strategy": "no", "validation_fraction": 0.0}, 0),
        ],
    )
    def test_evaluates_its_last_step_once(
        self, train: Runner, options: dict[str, Any], evaluations: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []
        evaluation_loop = HeadsTrainer.evaluation_loop

        def counted(self: HeadsTrainer, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.state.global_step)
            return evaluation_loop(self, *args, **kwargs)

        monkeypatch.setattr(HeadsTrainer, "evaluation_loop", counted)
        metrics = train(max_steps=4, **options)
        assert len(calls) == evaluations
        assert ("eval_loss" in metrics) == (evaluations > 0)
        assert evaluations == 0 or (calls[-1] == 4 and {"eval_loss", "eval_acceptance_length"} <= metrics.keys())

    def test_returns_the_metrics_of_the_best_checkpoint_it_loads(self, train: Runner) -> None:
        """A huge learning rate makes the loss worse from step to step."""
        metrics = train(
            max_steps=3,
            learning_rate=2.0,
            lr_scheduler_type="constant",
            warmup_steps=0,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            save_total_limit=3,
        )
        state = json.loads((train.output_dir / "checkpoint-3" / "trainer_state.json").read_text())
        losses = {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}
        best = min(losses, key=lambda step: losses[step])
        assert best < 3
        assert metrics["eval_loss"] == losses[best]
        assert_same(train.weights(), load_file(train.output_dir / f"checkpoint-{best}" / "model.safetensors"))

    def test_acceptance_is_measured_without_held_out_conversations(self, train: Runner, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"turns": ["word1 word2"]}\n\n{"turns": ["word5"]}\n')
        metrics = train(max_steps=1, validation_fraction=0.0, eval_prompts=prompts)
        assert metrics.keys() == {"eval_acceptance_length"}

    def test_continues_from_trained_heads(self, train: Runner, tmp_path: Path) -> None:
        """Weights and draft vocabulary are theirs, though the new conversations would give another one."""
        train(max_steps=2)
        before = train.weights()
        others = write_conversations(tmp_path / "others.jsonl", words=WORDS[::-1][:30], seed=5)
        again = Runner(Path(train.defaults["target"]), others, tmp_path / "again")
        again.defaults |= {"init_heads": train.output_dir, "head_type": None, "head_overrides": None}
        again(max_steps=1, learning_rate=0.0)
        assert_same(again.weights(), before)
        again(max_steps=2)
        assert torch.equal(again.weights()["d2t"], before["d2t"])
        assert not torch.equal(again.weights()["fc.weight"], before["fc.weight"])
        train(max_steps=1, dataset=others)
        assert not torch.equal(train.weights()["d2t"], before["d2t"]), "the data would give another one"

    def test_tensorboard_is_opt_in_and_works_offline(self, train: Runner) -> None:
        pytest.importorskip("tensorboard")
        train(max_steps=1)
        assert not list(train.output_dir.rglob("events.out.tfevents.*"))
        train(max_steps=1, report_to="tensorboard")
        assert list(train.output_dir.rglob("events.out.tfevents.*"))

    def test_wandb_is_opt_in_and_works_offline(self, train: Runner, tmp_path: Path) -> None:
        pytest.importorskip("wandb")
        folder = tmp_path / "wandb"
        folder.mkdir()
        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
        words = train.arguments(max_steps=1, report_to="wandb")
        command = [sys.executable, str(REPOSITORY / "training" / "train_heads.py"), *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert list(folder.rglob("run-*.wandb")), "nothing was logged"


class TestHeldOutConversations:
    def load(self, train: Runner, **options: Any) -> tuple[list[Any], list[Any]]:
        _, data_args, _ = parse_arguments(train.arguments(**options))
        rows, held_out = load_datasets(data_args, AutoTokenizer.from_pretrained(train.defaults["target"]), seed=0)
        assert held_out is not None
        return list(rows), list(held_out)

    def test_a_file_of_its_own(self, train: Runner, tmp_path: Path) -> None:
        file = write_conversations(tmp_path / "held_out.jsonl", count=5, seed=1)
        rows, held_out = self.load(train, eval_dataset=file)
        assert (len(rows), len(held_out)) == (24, 5), "nothing is split off the training conversations"
        assert held_out == self.load(train, dataset=file, eval_dataset=train.defaults["dataset"])[0]
        assert train(max_steps=1, eval_dataset=file)["eval_loss"] > 0

    def test_a_hub_dataset_is_read_at_its_own_split(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        read = []

        def load_dataset(name: str, split: str) -> datasets.Dataset:
            read.append((name, split))
            turns = [{"role": role, "content": "word1 word2"} for role in ("user", "assistant")]
            return datasets.Dataset.from_list([{"messages": turns}] * 2)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        self.load(train, dataset="some/set", eval_dataset="some/set")
        assert read == [("some/set", "train"), ("some/set", "validation")]
        self.load(train, dataset="some/set", eval_dataset="some/set", eval_split="test_sft")
        assert read[2:] == [("some/set", "train"), ("some/set", "test_sft")]

    def test_zero_samples_are_all_of_them(self, train: Runner, tmp_path: Path) -> None:
        file = write_conversations(tmp_path / "held_out.jsonl", count=5, seed=1)
        for max_eval_samples, from_file, split_off in ((0, 5, 6), (3, 3, 3)):
            _, held_out = self.load(train, eval_dataset=file, max_eval_samples=max_eval_samples)
            assert len(held_out) == from_file
            rows, held_out = self.load(train, max_eval_samples=max_eval_samples)
            assert (len(rows), len(held_out)) == (18, split_off)


class TestBadInput:
    def test_rows_are_cut_at_the_targets_limit(
        self, train: Runner, conversations: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": " ".join(WORDS * 5)}]
        conversations.write_text(json.dumps({"messages": long}) + "\n")
        widths = []
        compute_loss = HeadsTrainer.compute_loss

        def noted(self: HeadsTrainer, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            widths.append(inputs["input_ids"].shape[1])
            return compute_loss(self, model, inputs, *args, **kwargs)

        monkeypatch.setattr(HeadsTrainer, "compute_loss", noted)
        with caplog.at_level(logging.WARNING):
            train(max_steps=1, max_length=1000)
        assert widths == [256]
        assert "max_length is 1000, the target takes 256 tokens (max_position_embeddings=256)" in caplog.text
        assert yaml.safe_load((train.output_dir / "training_config.yaml").read_text())["max_length"] == 256

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"turns": ["a"]}\n{"turn": ["a"]}', r"prompts\.jsonl, line 2: expected {'turns': \['...'\]} \(KeyError"),
            ('{"turns": ["a"]', r"prompts\.jsonl, line 1: expected .*JSONDecodeError"),
            ('{"turns": []}', r"prompts\.jsonl, line 1: expected .*IndexError"),
            (
                '\n{"turns": ["' + "word1 " * 300 + '"]}',
                r"prompts\.jsonl, line 2: the prompt has 303 tokens, the target takes fewer than 256",
            ),
            (None, r"eval_prompts is .*prompts\.jsonl, which is no file"),
        ],
    )
    def test_prompts_are_checked_before_training(
        self, train: Runner, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interrupt_at_step(0, monkeypatch)
        if content is not None:
            (tmp_path / "prompts.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            train(eval_prompts=tmp_path / "prompts.jsonl")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "nowhere.jsonl"}, "dataset nowhere.jsonl does not exist"),
            ({"dataset": "wrong.jsonl"}, "line 1: expected an object, got int. Mend it"),
            ({"head_overrides": ["ttt_stepz=2"]}, "ttt_stepz"),
            ({"target": "./nowhere"}, "./nowhere"),
            ({"resume_from_checkpoint": "nowhere"}, "cannot resume from nowhere: config.json is missing"),
            ({"output_dir": "wrong.jsonl/heads"}, "Not a directory"),
        ],
    )
    def test_the_program_ends_in_one_line(
        self, train: Runner, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interrupt_at_step(0, monkeypatch)
        (tmp_path / "wrong.jsonl").write_text("3\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train_heads.py", *train.arguments(**options)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as exit_:
            train_heads.main()
        assert str(exit_.value.code).startswith("train_heads.py: ")
        assert message in str(exit_.value.code)

    def test_an_error_of_the_training_itself_keeps_its_traceback(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> Tensor:
            raise ValueError("from somewhere deep inside")

        monkeypatch.setattr(HeadsTrainer, "training_step", fail)
        monkeypatch.setattr(sys, "argv", ["train_heads.py", *train.arguments()])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(ValueError, match="from somewhere deep inside"):
            train_heads.main()

    def test_zero_3(self, train: Runner) -> None:
        model, data, training = parse_arguments(train.arguments())
        training.deepspeed_plugin = SimpleNamespace(zero_stage=3)
        with pytest.raises(ValueError, match="ZeRO-3 would split the frozen target as well: use stage 1 or 2"):
            run_training(model, data, training)

    def test_several_gpus_in_one_process(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        model, data, training = parse_arguments(train.arguments())
        monkeypatch.setattr(type(training), "n_gpu", 2)
        with pytest.raises(ValueError, match=r"one process sees 2 GPUs.*accelerate launch --num_processes N"):
            run_training(model, data, training)

    def test_heads_of_another_target(self, train: Runner, tmp_path: Path) -> None:
        create_heads("medusa", tiny_target("llama")).save_pretrained(tmp_path / "others")
        with pytest.raises(ValueError, match=r"vocabulary size 128, this target .* has 60"):
            train(init_heads=tmp_path / "others", head_type=None, head_overrides=None)


def interrupt_at_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks off training when `step` optimizer steps have been made."""
    training_step = HeadsTrainer.training_step

    def interrupted(self: HeadsTrainer, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == step:
            raise InterruptedRunError
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "training_step", interrupted)


class TestResume:
    """Eight steps of which every second is saved; six batches an epoch, so that the run crosses into the next one."""

    SAVED: dict[str, Any] = {  # noqa: RUF012
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_total_limit": 0,
    }

    @pytest.fixture
    def uninterrupted(self, train: Runner) -> dict[str, Tensor]:
        train(**self.SAVED)
        weights = train.weights()
        shutil.rmtree(train.output_dir)
        return weights

    def interrupt(self, train: Runner, step: int, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at_step(step, patch)
            with pytest.raises(InterruptedRunError):
                train(**self.SAVED, **options)

    @pytest.mark.parametrize("step", [5, 7])
    def test_gives_the_weights_of_an_uninterrupted_run(
        self, train: Runner, uninterrupted: dict[str, Tensor], step: int
    ) -> None:
        self.interrupt(train, step)
        assert not (train.output_dir / "model.safetensors").exists()
        train(**self.SAVED, resume_from_checkpoint=True)
        assert_same(train.weights(), uninterrupted)
        state = json.loads((train.output_dir / "checkpoint-8" / "trainer_state.json").read_text())
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 9))

    @needs_muon
    def test_goes_on_with_muon(self, train: Runner, uninterrupted: dict[str, Tensor]) -> None:
        options = {**self.SAVED, "muon_learning_rate": 0.02}
        train(**options)
        weights = train.weights()
        assert not torch.equal(weights["fc.weight"], uninterrupted["fc.weight"]), "that is what AdamW learns"
        shutil.rmtree(train.output_dir)
        self.interrupt(train, 5, muon_learning_rate=0.02)
        train(**options, resume_from_checkpoint=True)
        assert_same(train.weights(), weights)

    def test_passes_over_a_torn_checkpoint(
        self, train: Runner, uninterrupted: dict[str, Tensor], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.interrupt(train, 7)
        weights = train.output_dir / "checkpoint-6" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        (train.output_dir / "checkpoint-4" / "trainer_state.json").unlink()
        with caplog.at_level(logging.WARNING):
            train(**self.SAVED, resume_from_checkpoint=True)
        assert "checkpoint-6 is passed over: model.safetensors is cut off" in caplog.text
        assert "checkpoint-4 is passed over: trainer_state.json is missing" in caplog.text
        assert_same(train.weights(), uninterrupted)

    def test_a_full_disk_leaves_the_checkpoint_before(
        self, train: Runner, uninterrupted: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = torch.save
        written: list[str] = []

        def fail_at_the_third_optimizer(content: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            written.append(Path(path).name)
            if written.count("optimizer.pt") == 3:
                Path(path).write_bytes(b"half")
                raise OSError(28, "No space left on device")
            save(content, path, *args, **kwargs)

        monkeypatch.setattr(torch, "save", fail_at_the_third_optimizer)
        with pytest.raises(OSError, match="No space left"):
            train(**self.SAVED)
        monkeypatch.setattr(torch, "save", save)
        assert (train.output_dir / "checkpoint-6" / "model.safetensors").exists()
        train(**self.SAVED, resume_from_checkpoint=True)
        assert_same(train.weights(), uninterrupted)

    def test_keeps_the_draft_vocabulary_of_the_checkpoint(
        self, train: Runner, conversations: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.interrupt(train, 5)
        vocabulary = load_file(train.output_dir / "checkpoint-4" / "model.safetensors")["d2t"]
        write_conversations(conversations, words=WORDS[::-1][:30], seed=5)
        train(**self.SAVED, resume_from_checkpoint=True)
        assert torch.equal(train.weights()["d2t"], vocabulary)
        shutil.rmtree(train.output_dir)
        train(max_steps=1)
        assert not torch.equal(train.weights()["d2t"], vocabulary), "the data would give another one"

    def test_counts_no_tokens(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interrupt(train, 5)

        def fail(*args: Any) -> Tensor:
            raise AssertionError("the vocabulary is stored with the heads")

        monkeypatch.setattr(run_module, "count_tokens", fail)
        train(**self.SAVED, resume_from_checkpoint=True)

    def test_a_finished_run_trains_and_evaluates_nothing(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = train(**self.SAVED)
        weights = train.weights()
        interrupt_at_step(8, monkeypatch)
        monkeypatch.setattr(HeadsTrainer, "evaluation_loop", None)
        assert train(**self.SAVED, resume_from_checkpoint=True) == pytest.approx(metrics, abs=1e-4)
        assert_same(train.weights(), weights)

    def test_other_heads_are_refused(self, train: Runner) -> None:
        self.interrupt(train, 5)
        with pytest.raises(ValueError, match=r"checkpoint-4 holds heads with ttt_steps 2 \(now 3\): resume"):
            train(resume_from_checkpoint=True, head_overrides=["ttt_steps=3", "draft_vocab_size=40"])

    def test_nothing_to_resume_starts_from_the_beginning(self, train: Runner, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            train(max_steps=1, resume_from_checkpoint=True)
        assert "no complete checkpoint in" in caplog.text
        assert train.weights()


@pytest.mark.slow
class TestLaunching:
    """The entry point in processes of its own."""

    TWO_PROCESSES = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    DEEPSPEED = ("accelerate.commands.launch", "--config_file", "configs/accelerate/deepspeed_zero2.yaml")
    EXACT: dict[str, Any] = {  # noqa: RUF012
        "head_overrides": ["ttt_steps=2"],
        "optim": "sgd",
        "learning_rate": 0.02,
        "max_grad_norm": 0.0,
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def launch(self, launcher: Sequence[str], arguments: list[str]) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", *launcher, "training/train_heads.py", *arguments]
        result = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    def test_accelerate_launch(self, train: Runner, tmp_path: Path) -> None:
        launcher = ["accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml"]
        config = tmp_path / "run.yaml"
        config.write_text(f"target: {train.defaults['target']}\nmax_steps: 100\n")
        arguments = train.arguments(target=None, config=config, max_steps=2)
        output = self.launch(launcher, arguments)
        assert "eval_acceptance_length" in output
        launched = train.weights()
        shutil.rmtree(train.output_dir)
        train(max_steps=2)
        assert_same(launched, train.weights())

    def test_a_wrong_option_ends_it_in_one_line_and_a_foreign_package_is_not_imported(self, tmp_path: Path) -> None:
        """Another distribution ships a package named `inference` as well."""
        (tmp_path / "inference").mkdir()
        (tmp_path / "inference" / "__init__.py").write_text("raise SystemExit('the foreign package was imported')\n")
        result = subprocess.run(
            [sys.executable, "training/train_heads.py", "--learning_rat", "0.1"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1
        assert (
            "train_heads.py: unknown key 'learning_rat' on the command line; did you mean 'learning_rate'"
            in result.stderr
        )
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize("launcher", [TWO_PROCESSES, DEEPSPEED], ids=["data parallel", "DeepSpeed ZeRO-2"])
    def test_two_processes_train_as_one_with_batches_of_twice_the_size(
        self, train: Runner, launcher: tuple[str, ...]
    ) -> None:
        """Plain SGD and the whole vocabulary, so that every predicted token has a loss and equal means equal; the
        second half is a resumed run."""
        if launcher == self.DEEPSPEED:
            pytest.importorskip("deepspeed")
        # With use_cpu accelerate would fall back to plain data parallelism.
        options = {**self.EXACT, "per_device_train_batch_size": 2, "use_cpu": launcher != self.DEEPSPEED}
        self.launch(launcher, train.arguments(**options))
        newest = train.output_dir / "checkpoint-4"
        assert {path.name for path in newest.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
        assert (newest / "global_step4").is_dir() == (launcher == self.DEEPSPEED)
        (newest / "trainer_state.json").unlink()
        output = self.launch(launcher, train.arguments(**options, resume_from_checkpoint=True))
        assert output.count("checkpoint-4 is passed over: trainer_state.json is missing") == 1
        two = train.weights()
        metrics = json.loads((train.output_dir / "training_record.json").read_text())["metrics"]

        shutil.rmtree(train.output_dir)
        expected = train(**self.EXACT, per_device_train_batch_size=4)
        for name, tensor in train.weights().items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
        for name in ("eval_loss", "eval_top1_depth1", "eval_top5_depth2", "eval_acceptance_length"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3)
