"""Whole training runs on a tiny chat target: what they leave behind, and how an interrupted one goes on."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads
from draftsmith.inference import Target
from draftsmith.training.run.trainer import HeadsTrainer
from tests.params import slow_but
from tests.tiny_targets import random_prompt, tiny_target
from tests.training.runner import (
    WORDS,
    Runner,
    assert_greedy_text_is_the_targets,
    assert_same,
    interrupt_at_step,
    save_chat_target,
    write_conversations,
)


class TestARun:
    @pytest.mark.parametrize("head_type", slow_but({"eagle3"}, ["medusa", "eagle3", "block"]))
    def test_learns_evaluates_and_saves(self, train: Runner, target_path: Path, head_type: str) -> None:
        options = {"max_steps": 30, "save_strategy": "steps", "save_steps": 30}
        metrics = train(head_type=head_type, head_overrides=None, **options)
        state = json.loads((train.output_dir / "checkpoint-30" / "trainer_state.json").read_text())
        losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
        assert len(losses) == 30
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert metrics["eval_loss"] > 0
        assert metrics["eval_acceptance_length"] >= 1

        files = {path.name for path in train.output_dir.iterdir()}
        assert files == {
            "README.md",
            "checkpoint-30",
            "config.json",
            "model.safetensors",
            "token_counts.safetensors",
            "training_config.yaml",
            "training_record.json",
        }
        record = json.loads((train.output_dir / "training_record.json").read_text())
        assert record["metrics"] == metrics
        assert record["command"].startswith("draftsmith train")
        assert {"torch", "transformers"} <= record["versions"].keys()

        heads = DraftHeads.from_pretrained(train.output_dir)
        assert heads.config.target_name_or_path == str(target_path)
        target = Target(tiny_target("llama", vocab_size=60, num_hidden_layers=4, initializer_range=0.2))
        assert_greedy_text_is_the_targets(target, heads)
        heads.bind(target)
        width = len(heads.feature_layers) * target.hidden_size
        num_steps = len(heads.unroll(torch.zeros(1, 6, width), random_prompt(6, vocab_size=60)))
        by_depth = {f"eval_top{n}_depth{depth}" for n in (1, 5) for depth in range(1, num_steps + 1)}
        assert by_depth == {name for name in metrics if "depth" in name}

    @pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in transformers
    @pytest.mark.parametrize(
        ("head_type", "options", "rate", "weights"),
        [
            ("medusa", {}, 1e-3, None),
            ("medusa", {"lora_r": 2}, 2.5e-4, None),  # of the adapters; the heads' is four times as large
            ("block", {}, 1e-4, "d_pace"),
        ],
    )
    def test_each_kind_has_its_rate_and_its_weights_of_depths(
        self, train: Runner, head_type: str, options: dict[str, Any], rate: float, weights: str | None
    ) -> None:
        given = {"head_type": head_type, "head_overrides": None, "learning_rate": None, **options}
        prepared = train.prepare(**given, max_steps=1)
        assert prepared.trainer.args.learning_rate == rate
        assert prepared.settings["learning_rate"] == rate
        assert prepared.trainer.depth_weights == weights

    @pytest.mark.parametrize(
        ("options", "evaluations"),
        [({"eval_strategy": "no"}, 1), ({"eval_strategy": "no", "validation_fraction": 0.0}, 0)],
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

    def test_acceptance_is_measured_without_held_out_conversations(
        self, train: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A prompt that the chat template does not write is left out."""
        prompts = tmp_path / "prompts.jsonl"
        rejected = '{"turns": ["word1"], "tools": [{"name": "look"}], "id": "p7"}\n'
        prompts.write_text(rejected + '{"turns": ["word1 word2"]}\n{"turns": ["word5"]}\n')
        metrics = train(max_steps=1, validation_fraction=0.0, eval_prompts=prompts)
        assert metrics.keys() == {"eval_acceptance_length"}
        assert "left out 1 prompts" in caplog.text

    def test_a_loss_of_the_tokens_that_decoders_draft(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("draftsmith.heads.draft_vocabulary.default_draft_vocabulary", lambda *_: 50)
        with caplog.at_level(logging.INFO):
            train(head_type="mtp", head_overrides=None, loss_vocabulary="draft", max_steps=2)
        assert "the loss compares the 50 tokens that decoders draft" in caplog.text
        heads = DraftHeads.from_pretrained(train.output_dir)
        assert heads.draft_token_ids is None, "saved heads are whole"
        with pytest.raises(ValueError, match="got loss_vocabulary draft with lora_r 2: "):
            train(head_type="medusa", head_overrides=None, loss_vocabulary="draft", lora_r=2)

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

    def test_starts_dflash2_from_dflash(self, train: Runner, tmp_path: Path) -> None:
        train(max_steps=2, head_type="block", head_overrides="block_size=4")
        before = train.weights()
        grown = Runner(Path(train.defaults["target"]), Path(train.defaults["dataset"]), tmp_path / "grown")
        grown.defaults |= {"init_heads": train.output_dir, "head_type": "dflash2"}
        grown(max_steps=1, head_overrides="selector_rank=8", learning_rate=0.0)
        after = grown.weights()
        assert after["selector.successor_embedding.weight"].shape[1] == 8
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        with pytest.raises(ValueError, match=r"head_type='medusa' and init_heads"):
            grown(head_type="medusa", head_overrides=None)

    def test_continues_on_a_fine_tuned_target(
        self, train: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It has another name and the same shape: the heads say so, and belong to it from then on."""
        train(max_steps=1)
        other = save_chat_target(tmp_path / "other", seed=1)
        again = Runner(other, Path(train.defaults["dataset"]), tmp_path / "again")
        again.defaults |= {"init_heads": train.output_dir, "head_type": None, "head_overrides": None}
        again(max_steps=1)
        assert str(train.defaults["target"]) in caplog.text
        assert f"are trained further for {other}" in caplog.text
        assert DraftHeads.from_pretrained(again.output_dir).config.target_name_or_path == str(other)

        caplog.clear()
        again(max_steps=1, init_heads=again.output_dir, output_dir=tmp_path / "third")
        assert "are trained further for" not in caplog.text
        deeper = save_chat_target(tmp_path / "deeper", num_hidden_layers=5)
        with pytest.raises(ValueError, match=r"layers 4, .* 5"):
            again(target=deeper)


class TestBadInput:
    def test_rows_are_cut_at_the_targets_limit(
        self, train: Runner, conversations: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        long = [{"role": "user", "content": "word1"}, {"role": "assistant", "content": " ".join(WORDS * 5)}]
        conversations.write_text(json.dumps({"messages": long}) + "\n")
        with caplog.at_level(logging.WARNING):
            prepared = train.prepare(max_length=1000)
        assert [len(row["input_ids"]) for row in prepared.trainer.train_dataset] == [256]
        assert "max_length is 1000" in caplog.text
        assert prepared.settings["max_length"] == 256

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"turns": ["a"]}\n{"turn": ["a"]}', r"prompts\.jsonl, line 2: .*'turn'"),
            ('{"turns": ["a"]', r"prompts\.jsonl, line 1"),
            ('{"turns": ["' + "word1 " * 300 + '"]}', r"303 tokens.*\b256\b"),
            ('{"turns": ["word1"], "tools": [{"name": "look"}], "id": "p7"}', r"prompts\.jsonl: .*p7: .* tools"),
            (None, r"eval_prompts .*prompts\.jsonl"),
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

    def test_compiling_is_refused(self, train: Runner) -> None:
        with pytest.raises(ValueError, match="torch_compile"):
            train(torch_compile=True)
