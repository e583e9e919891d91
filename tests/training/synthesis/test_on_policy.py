"""On-policy data: whose replies are in a row, which rows they are in, and that a resumed run reads the same ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.heads import create_heads
from draftsmith.inference import Decoder, Target, generate
from draftsmith.training.options.command_line import parse_arguments
from draftsmith.training.run.preparation import prepare_run
from draftsmith.training.synthesis.on_policy import (
    FILE,
    TREE,
    OnPolicyArguments,
    OnPolicyRows,
    Rewritten,
    rewrite_rows,
    split_turns,
)
from draftsmith.training.synthesis.reply_decoding import TurnDecoder, TurnSettings, find_problem, turn_seed
from draftsmith.training.synthesis.turn_template import TurnTemplate
from tests.tiny_tokenizers import read_whole_words
from tests.training.runner import Runner, assert_same

SETTINGS = TurnSettings(max_new_tokens=24)
STOP_IDS = [3, 20, 30, 40]  # words as well, since this target seldom ends a turn
ON_POLICY: dict[str, Any] = {
    "head_type": "medusa",
    "head_overrides": ["num_heads=2"],
    "validation_fraction": 0,
    "num_eval_prompts": 0,
    "on_policy_fraction": 0.5,
    "on_policy_max_new_tokens": 40,
    "on_policy_batch_size": 4,
}


def test_worked_example_of_turns() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0, 0, 1, 1, 0, 1, 0]}
    assert split_turns(row) == ([[1, 2], [5]], [7])
    assert split_turns({"input_ids": [1, 2], "loss_mask": [1, 0]}) == ([[]], [2])


@pytest.fixture(scope="module")
def target(target_path: Path) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(target_path).requires_grad_(False).eval())


@pytest.fixture(scope="module")
def template(target_path: Path) -> TurnTemplate:
    return TurnTemplate(AutoTokenizer.from_pretrained(target_path))


@pytest.fixture(scope="module")
def rows(template: TurnTemplate) -> dict[int, dict[str, list[int]]]:
    """Conversations of one to three turns with replies of two words, and one that begins with the assistant's."""
    found = {}
    for index in range(24):
        row: dict[str, list[int]] = {"input_ids": [], "loss_mask": []}
        for turn in range(1 + index % 3):
            question = template.encode(f"<|user|> word{index} word{turn} <|end|> <|assistant|>")
            reply = template.encode(f"word{turn} word3 <|end|>")
            row["input_ids"] += question + reply
            row["loss_mask"] += [0] * len(question) + [1] * len(reply)
        row["input_ids"] += template.encode("<|user|>")
        row["loss_mask"] += [0]
        found[index] = row
    found[7]["loss_mask"][0] = 1
    return found


class TestRewriting:
    def rewrite(
        self, rows: Any, target: Target, template: TurnTemplate, drafter: Any = None, **options: Any
    ) -> dict[int, Rewritten]:
        decoder = Decoder(target, drafter, tree=TREE if drafter else None)
        writer = TurnDecoder(decoder, SETTINGS, batch_size=options.pop("batch_size", 8), special_ids={1, 2})
        options = {"stop_ids": STOP_IDS, "seed": 11, "max_length": 64, **options}
        return {one.index: one for one in rewrite_rows(rows, writer, **options)}

    def test_replies_are_the_targets_own_one_after_the_other(
        self, rows: dict[int, dict[str, list[int]]], target: Target, template: TurnTemplate
    ) -> None:
        found = self.rewrite(rows, target, template)
        assert found.keys() == rows.keys()
        for index, row in rows.items():
            prompts, rest = split_turns(row)
            ids: list[int] = []
            mask: list[int] = []
            problem = "" if prompts[0] else "no prompt"
            for turn, given in enumerate(prompts):
                if problem:
                    break
                ids, mask = ids + given, mask + [0] * len(given)
                seed = turn_seed(11, str(index), turn)
                options: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": STOP_IDS, "pad_token_id": 3}
                prompt = torch.tensor([ids])
                text = generate(
                    target, None, prompt, torch.ones_like(prompt), seed=[seed], max_new_tokens=24, **options
                ).sequences[0, len(ids) :]
                problem = find_problem(text.tolist(), STOP_IDS, {1, 2})
                ids, mask = ids + text.tolist(), mask + [1] * len(text)
            assert found[index].problem == problem, index
            if problem:
                assert found[index].row is None
            else:
                assert found[index].row == {"input_ids": (ids + rest)[:64], "loss_mask": (mask + [0])[:64]}
        problems = {one.problem for one in found.values()}
        assert {"", "truncated", "no prompt"} <= problems, "else this test shows less than it should"
        assert any(one.row and len(split_turns(rows[index])[0]) > 1 for index, one in found.items())

    def test_whoever_drafts_and_whatever_the_batch(
        self, rows: dict[int, dict[str, list[int]]], target: Target, template: TurnTemplate
    ) -> None:
        """So processes may share the work as they like."""
        expected = self.rewrite(rows, target, template)
        heads = create_heads("medusa", target, num_heads=2)
        parts = [dict(list(rows.items())[start::3]) for start in range(3)]
        found = {}
        for part in parts:
            found |= self.rewrite(part, target, template, heads, batch_size=5)
        assert found == expected
        assert self.rewrite(rows, target, template, seed=12) != expected


class TestRows:
    @pytest.fixture
    def rows(self) -> OnPolicyRows:
        ids = [[index, index] for index in range(10)]
        return OnPolicyRows(datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": [[0, 1]] * 10}))

    def test_chosen_rows_are_a_share_and_others_in_each_epoch(self, rows: OnPolicyRows) -> None:
        chosen = [rows.choose(0.3, seed=1, epoch=epoch) for epoch in range(40)]
        assert {len(set(one)) for one in chosen} == {3}
        assert {row for one in chosen for row in one} == set(range(10))
        assert len({tuple(sorted(one)) for one in chosen}) > 20
        assert rows.choose(0.3, seed=1, epoch=5) == chosen[5] != rows.choose(0.3, seed=2, epoch=5)
        assert sorted(rows.choose(1.0, seed=1, epoch=0)) == list(range(10))

    def test_replaced_rows_are_read_in_place_and_come_back_from_a_checkpoint(
        self, rows: OnPolicyRows, tmp_path: Path
    ) -> None:
        new = {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}
        rows.replace(
            2, [Rewritten(4, new), Rewritten(5, None, "looping"), Rewritten(6, {**new, "input_ids": [1, 2, 3]})]
        )
        assert len(rows) == 10
        assert rows[4] == new
        assert rows[5] == {"input_ids": [5, 5], "loss_mask": [0, 1]}
        assert rows[6]["input_ids"] == [1, 2, 3]
        rows.save(tmp_path)
        again = OnPolicyRows(rows.rows)
        again.load(tmp_path)
        assert again[4]["input_ids"] == [4, 4], "not before the epoch begins: its order is that of lengths"
        assert again.resume(2)
        assert all(again[index] == rows[index] for index in range(10))
        assert not again.resume(2)
        again.load(tmp_path)
        assert not again.resume(3)
        rows.replace(3, [])
        assert rows[4]["input_ids"] == [4, 4]
        (tmp_path / FILE).unlink()
        with pytest.raises(ValueError, match=r"on_policy\.safetensors is missing; resume from another"):
            again.load(tmp_path)


class TestRuns:
    def history(self, folder: Path, step: int) -> list[dict[str, Any]]:
        state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
        return [entry for entry in state["log_history"] if "on_policy_replaced" in entry]

    def test_counts_and_drafting(self, train: Runner) -> None:
        """24 conversations, 6 steps an epoch; the first epoch has nobody to draft for it."""
        train(**ON_POLICY, max_steps=14, save_strategy="steps", save_steps=14)
        entries = self.history(train.output_dir, 14)
        assert [entry["epoch"] for entry in entries] == [0, 1, 2]
        for entry in entries:
            kept = sum(count for name, count in entry.items() if name.startswith("on_policy_kept"))
            assert entry["on_policy_replaced"] + kept == 12
            assert entry["on_policy_replaced"] > 0
            assert entry["on_policy_tokens_per_second"] > 0
        assert entries[0]["on_policy_acceptance_length"] == 1 < entries[2]["on_policy_acceptance_length"]

    def test_what_is_trained_on_is_what_the_target_wrote(self, train: Runner) -> None:
        """Every batch of two epochs: rows that were replaced, and others as they are."""
        trainer = prepare_run(*parse_arguments(train.arguments(**ON_POLICY, max_steps=12))).trainer
        rows = trainer.train_dataset
        assert isinstance(rows, OnPolicyRows)
        collate, seen, fresh = trainer.data_collator, [], {}

        def note(batch: list[dict[str, list[int]]]) -> Any:
            fresh[rows.epoch] = [rows[index]["input_ids"] for index in rows.new]
            seen.extend((rows.epoch, row["input_ids"]) for row in batch)
            return collate(batch)

        trainer.data_collator = note
        trainer.train()
        assert len(seen) == 48
        assert fresh.keys() == {0, 1}
        given = [row["input_ids"] for row in rows.rows]
        for epoch in (0, 1):
            assert fresh[epoch]
            read = [ids for number, ids in seen if number == epoch]
            assert len(read) == 24
            assert all(ids in read for ids in fresh[epoch])
            assert all(ids in given or ids in fresh[epoch] for ids in read)
            assert not any(ids in given for ids in fresh[epoch])
        assert not any(ids in fresh[1] for ids in fresh[0])

    @pytest.mark.parametrize("is_joint", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_resuming_changes_nothing(self, train: Runner, is_joint: bool) -> None:
        """In the middle of an epoch whose replies came from heads and, if adapters are trained, from a target that are
        no more; and at its end. Batches by length read the lengths before anything is replaced."""
        options = {
            **ON_POLICY,
            "max_steps": 10,
            "on_policy_fraction": 0.25,
            "save_strategy": "steps",
            "save_steps": 2,
            "train_sampling_strategy": "group_by_length",
        }
        if is_joint:
            pytest.importorskip("peft", reason="peft is an optional extra")
            options |= {"lora_r": 4, "heads_warmup_steps": 0, "learning_rate": 0.01, "heads_loss_weight": 0.2}
        train(**options)
        resumed = train.output_dir.with_name("resumed")
        for step in (7, 9):  # checkpoints 6 (the end of the first epoch) and 8
            train.break_off(step, **options, output_dir=resumed, resume_from_checkpoint=True)
        train(**options, output_dir=resumed, resume_from_checkpoint=True)
        assert_same(load_file(resumed / "model.safetensors"), train.weights())
        one, other = self.history(train.output_dir, 10), self.history(resumed, 10)
        names = ("epoch", "on_policy_replaced", "on_policy_acceptance_length")
        assert [[entry[name] for name in names] for entry in one] == [
            [entry[name] for name in names] for entry in other
        ]

    # peft asks transformers by a name that transformers has deprecated.
    pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def test_what_the_generation_config_adds_is_recorded(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling has settings of its own, which the greedy decoding of evaluations does not have."""
    target = tmp_path / "target"
    shutil.copytree(train.defaults["target"], target)
    own = {"min_p": 0.01, "repetition_penalty": 1.1, "stop_strings": ["@word1"]}
    GenerationConfig(eos_token_id=STOP_IDS, do_sample=True, **own).save_pretrained(target)
    read_whole_words(monkeypatch)
    train(**ON_POLICY, target=target, max_steps=1)
    record = json.loads((train.output_dir / "training_record.json").read_text())
    assert record["on_policy_generation_config"] == own
    assert record["generation_config"] == {}, "no prompt is measured"


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"on_policy_fraction": 1.5}, r"got on_policy_fraction 1\.5: it must be"),
            ({"on_policy_temperature": -1.0}, r"temperature is -1\.0"),
            ({"on_policy_batch_size": 0}, "got on_policy_batch_size 0"),
            ({"on_policy_temperature": 0.5}, "got on_policy_temperature without on_policy_fraction: give"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            OnPolicyArguments(**options)

    def test_streams(self, train: Runner) -> None:
        with pytest.raises(ValueError, match="on_policy_fraction with streaming"):
            train(**ON_POLICY, streaming=True)

    def test_replies_as_long_as_the_target(self, train: Runner) -> None:
        with pytest.raises(ValueError, match=r"max_new_tokens is 4096, but the target has \d+ positions"):
            train(**{**ON_POLICY, "on_policy_max_new_tokens": 4096})
