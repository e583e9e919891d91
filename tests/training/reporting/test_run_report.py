"""What a finished run says of itself: the page and the card."""

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from draftsmith.heads import DraftHeads
from draftsmith.training.data.learned_turns import EMPTY, UNLEARNED
from draftsmith.training.reporting.examples import Example, Piece, send_examples
from draftsmith.training.reporting.model_card import render_card
from draftsmith.training.reporting.report import render_report
from draftsmith.training.run import outcome
from tests.tiny_tokenizers import read_whole_words
from tests.training.runner import Runner, write_conversations


class TestReport:
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
            runner(report=True, eval_strategy="steps", eval_steps=4, max_steps=8, num_eval_prompts=2)
            yield runner

    def test_a_run_leaves_a_page_of_its_own(self, finished: Runner) -> None:
        text = (finished.output_dir / "report.html").read_text()
        assert {"loss", "acceptance length", "learning rate"} < {*re.findall(r'<img alt="([^"]+)"', text)}
        links = re.findall(r'\b(?:src|href)="([^"]*)"', text)
        assert all(link.startswith("data:image/svg+xml;base64,") for link in links), "no network"
        assert not re.search(r"<(script|link)\b", text)
        record = json.loads((finished.output_dir / "training_record.json").read_text())
        assert record["generation_config"] == {"repetition_penalty": 1.1, "stop_strings": ["@word1"]}
        assert f">{record['metrics']['eval_acceptance_length']:.4g}</td>" in text
        assert "<th>learning_rate</th><td>0.003</td>" in text
        assert "<th>tokens in the loss</th>" in text
        nothing = f"dropped: nothing to learn: {UNLEARNED}"
        assert record["data"] == {nothing: 1, "dropped: no token of the assistant's within max_length=64": 1, EMPTY: 1}
        for name in (nothing, EMPTY):
            assert f'<th>{name}</th><td class="number">1</td>' in text
        assert text.count("<h3>") == 2
        assert text.count('<span class="drafted">') > 1, "something is drafted and accepted, besides the legend"

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
            has_report=False,
        )
        data = yaml.safe_load(card.split("---\n")[1])
        assert (data["base_model"], data["datasets"]) == ("org/model", ["org/data"])
        assert "| loss | 1.5 |" in card
        assert "runtime" not in card
        assert "report.html" not in card

    def test_without_matplotlib_there_are_no_curves(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        text = render_report("t", summary={}, history=[{"step": 1, "loss": 2.0}], options={}, data={})
        assert "<img" not in text
        assert "pip install &#34;draftsmith[train]&#34;" in text
        assert "matplotlib is not installed" in caplog.text

    def test_what_goes_wrong_here_leaves_the_heads(
        self, train: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> str:
            raise TypeError("a plot of nothing")

        monkeypatch.setattr(outcome, "render_report", fail)
        train(max_steps=1, report=True)
        assert train.weights()
        assert "the heads are saved, but their report or model card could not be written" in caplog.text
        assert not (train.output_dir / "report.html").exists()

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
        train(max_steps=1, report=True, push_to_hub=True, hub_model_id="me/heads", hub_strategy="end")
        assert len(uploaded) == 1
        assert {"README.md", "report.html", "model.safetensors", "training_record.json"} <= uploaded[0]
        assert 'DraftHeads.from_pretrained("me/heads"' in (train.output_dir / "README.md").read_text()


def test_wandb_gets_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    wandb = SimpleNamespace(run=object(), log=sent.append, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    examples = [Example("<|user|> Hi", [Piece("Hel", True), Piece("lo", False)], 1.5)]
    send_examples(examples, ["tensorboard", "wandb"])
    columns = ["prompt", "reply", "acceptance length"]
    assert sent == [{"examples": {"columns": columns, "data": [["<|user|> Hi", "Hello", 1.5]]}}]
    send_examples(examples, ["tensorboard"])
    monkeypatch.setattr(wandb, "run", None)  # in the other processes
    send_examples(examples, ["wandb"])
    assert len(sent) == 1
