"""The model card and the record of a finished run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from draftsmith.heads import DraftHeads
from draftsmith.training.data.learned_turns import EMPTY, UNLEARNED
from draftsmith.training.run.model_card import render_card
from tests.tiny_tokenizers import read_whole_words
from tests.training.runner import Runner, write_conversations


class TestCard:
    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
        folder = tmp_path_factory.mktemp("reported")
        target = Path(shutil.copytree(target_path, folder / "target"))
        own = {"repetition_penalty": 1.1, "top_k": 5, "stop_strings": ["@word1"]}
        GenerationConfig(do_sample=True, **own).save_pretrained(target)
        conversations = write_conversations(folder / "conversations.jsonl")
        user, reply = {"role": "user", "content": "word1"}, {"role": "assistant", "content": "word2"}
        rest = [[user, {**reply, "content": ""}, user, reply], [user, {**reply, "train": False}], [user]]
        with conversations.open("a") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in rest)
        runner = Runner(target, conversations, folder / "heads")
        with pytest.MonkeyPatch.context() as monkeypatch:
            read_whole_words(monkeypatch)
            runner(eval_strategy="steps", eval_steps=4, max_steps=8)
            yield runner

    def test_the_record_has_what_the_generation_config_says_and_what_was_dropped(self, finished: Runner) -> None:
        record = json.loads((finished.output_dir / "training_record.json").read_text())
        assert record["generation_config"] == {"repetition_penalty": 1.1, "stop_strings": ["@word1"]}
        nothing = f"dropped: nothing to learn: {UNLEARNED}"
        assert record["data"] == {nothing: 1, "dropped: no token of the assistant's within max_length=64": 1, EMPTY: 1}

    def test_its_card_says_how_to_decode(self, finished: Runner) -> None:
        text = (finished.output_dir / "README.md").read_text()
        _, front, body = text.split("---\n", 2)
        data = yaml.safe_load(front)
        assert data["library_name"] == "draftsmith"
        assert data["license"] == "unknown"
        assert data["tags"] == ["speculative-decoding", "draft-heads", "eagle3"]
        assert "base_model" not in data, "a folder is no hub id"
        assert "| acceptance_length | " in body
        assert "8 optimizer steps" in body
        code = body.split("```python\n")[1].split("```")[0].replace("print(", "found = (")
        scope: dict[str, Any] = {}
        exec(code.replace('"Hello"', '"word1 word2"').replace("max_new_tokens=128", "max_new_tokens=4"), scope)
        assert isinstance(scope["heads"], DraftHeads)
        assert scope["output"].sequences.shape[1] == scope["prompt"]["input_ids"].shape[1] + 4

    def test_hub_ids_stand_in_the_metadata_of_the_card(self) -> None:
        card = render_card(
            kind="medusa",
            target="org/model",
            location="me/heads",
            datasets=["org/data:part", "file.jsonl"],
            metrics={"eval_loss": 1.5, "eval_runtime": 3.0},
            num_prompts=0,
            record={"steps": 3, "tokens": 1000, "seconds": 2.5},
        )
        data = yaml.safe_load(card.split("---\n")[1])
        assert (data["base_model"], data["datasets"]) == ("org/model", ["org/data"])
        assert "| loss | 1.5 |" in card
        assert "runtime" not in card

    def test_a_card_that_somebody_wrote_is_kept(self, train: Runner, caplog: pytest.LogCaptureFixture) -> None:
        train.output_dir.mkdir()
        (train.output_dir / "README.md").write_text("mine")
        train(max_steps=1)
        assert (train.output_dir / "README.md").read_text() == "mine"
        assert "was written by someone else" in caplog.text

    def test_uploads_all_of_it(self, train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a hub: the files exist when the upload starts."""
        uploaded: list[set[str]] = []
        monkeypatch.setattr("draftsmith.training.run.trainer.HeadsTrainer.init_hf_repo", lambda self, *_: None)
        monkeypatch.setattr(
            "draftsmith.training.run.trainer.HeadsTrainer.push_to_hub",
            lambda self, *a, **k: uploaded.append({file.name for file in train.output_dir.iterdir()}),
        )
        train(max_steps=1, push_to_hub=True, hub_model_id="me/heads", hub_strategy="end")
        assert len(uploaded) == 1
        assert {"README.md", "model.safetensors", "training_record.json"} <= uploaded[0]
        assert 'DraftHeads.from_pretrained("me/heads"' in (train.output_dir / "README.md").read_text()
