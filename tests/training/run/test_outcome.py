"""The last words of a run, and how the program ends when the user's input is wrong."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.scripts import cli
from draftsmith.training import train_heads
from draftsmith.training.run.outcome import written_command
from tests.training.runner import Runner, interrupt_at_step


def run_program(train: Runner, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["train_heads.py", *train.arguments(**options)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return train_heads.main()


class TestLastWords:
    @pytest.mark.ci
    @pytest.mark.slow
    def test_a_run_names_its_files_its_acceptance_length_and_the_next_command(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_program(train, monkeypatch, max_steps=1) == 0
        wrote, length, chain, few, speed, command, other = capsys.readouterr().out.splitlines()[-7:]
        assert (
            wrote
            == f"wrote {train.output_dir}: model.safetensors, token_counts.safetensors, training_record.json, README.md"
        )
        record = json.loads((train.output_dir / "training_record.json").read_text())
        assert length.startswith(f"acceptance length: {record['metrics']['eval_acceptance_length']:.2f} tokens per ")
        assert f"a chain of 4 gives {record['chain_acceptance_length']:.2f}, as usual" in chain
        assert "3 million" in few
        assert f"{record['speed_over_plain']:.2f} times plain decoding" in speed
        assert "draftsmith bench" in other
        words = shlex.split(command.removeprefix("next: "))
        assert words[:2] == ["draftsmith", "chat"]
        assert cli.main([*words[1:-1], "word1", "--max_new_tokens", "3"]) == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "wrong.jsonl"}, "line 1: expected an object, got int. Correct it"),
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
        with pytest.raises(SystemExit) as exit_:
            run_program(train, monkeypatch, **options)
        assert str(exit_.value.code).startswith("draftsmith train: ")
        assert message in str(exit_.value.code)


def test_records_hold_no_secrets(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program(train, monkeypatch, max_steps=1, num_eval_prompts=0, hub_token="hf_1")
    command = json.loads((train.output_dir / "training_record.json").read_text())["command"]
    assert "--hub_token ..." in command
    assert "hf_1" not in command
    assert "hf_1" not in written_command(["--hub-token", "hf_1"])
