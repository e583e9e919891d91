"""docs/your-model.md from top to bottom: its commands and its Python, with a tiny Qwen3 in the place of Qwen3-8B, and
with a server and a hub on this machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from transformers import AutoTokenizer

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder
from draftsmith.scripts import cli
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.test_readme import BLOCK, DOCS, split_commands
from tests.tiny_targets import tiny_target
from tests.training.openai_server import serving

PAGE = DOCS / "your-model.md"
# Added to each program's command, where the last word wins: a few tokens of a few texts.
SMALL = {
    "chat": "--max_new_tokens 4",
    "data": "--num_conversations 4 --keep_truncated true --max_new_tokens 8",
    "inspect": "",
    "train": "--max_steps 2 --max_length 64 --validation_fraction 0.25 --num_eval_prompts 1 --eval_max_new_tokens 4 "
    "--use_cpu true --bf16 false",
    "bench": "--num_prompts 1 --max_new_tokens 4 --repeats 1 --compile false",
    "export": "",
}


def save_qwen3(folder: Path, seed: int = 0) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(CHAT_TARGET)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "initializer_range": 0.1}
    tiny_target("qwen3", seed, eos_token_id=tokenizer.eos_token_id, **size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads arrive in a folder of the repository's name in the current folder."""

    def create_commit(repo_id: str, operations: list[Any], **kwargs: Any) -> str:
        (tmp_path / repo_id).mkdir(parents=True)
        for file in operations:
            shutil.copyfile(file.path_or_fileobj, tmp_path / repo_id / file.path_in_repo)
        return "done"

    def create_repo(repo_id: str, **kwargs: Any) -> Any:
        return type("RepoUrl", (str,), {"repo_id": repo_id})()

    for function in (create_commit, create_repo):
        # transformers calls them as methods of HfApi, and in older releases as functions of its own.
        monkeypatch.setattr(HfApi, function.__name__, staticmethod(function))
        monkeypatch.setattr(f"transformers.utils.hub.{function.__name__}", function, raising=False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A folder with the repository's files and the user's; and what a name of the page stands for."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copyfile(REPOSITORY / "examples" / "conversations.jsonl.gz", "YOURS.jsonl.gz")
    save_qwen3(tmp_path / "outputs" / "qwen3-8b-tuned", seed=1)
    model = tiny_target("qwen3", vocab_size=4096, max_position_embeddings=512)
    with serving(Decoder(model), AutoTokenizer.from_pretrained(CHAT_TARGET)) as server:
        yield {"Qwen/Qwen3-8B": str(save_qwen3(tmp_path / "qwen3")), "http://localhost:8000/v1": server.url}


def run(words: list[str], names: dict[str, str]) -> None:
    program, *options = [names.get(word, word) for word in words[1:]]
    if "--config" in options:  # the recipe's target is a hub id
        options += ["--target", names["Qwen/Qwen3-8B"], "--head_overrides", "draft_vocab_size=4000"]
    small = SMALL[program].split()
    if "--endpoint" in options:
        small += ["--endpoint_model", "tiny"]
    assert cli.main([program, *options, *small]) == 0


@pytest.mark.slow
def test_the_page_from_top_to_bottom(
    place: dict[str, str], hub: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    namespace: dict[str, Any] = {}
    commands = 0
    for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if match["language"] == "bash":
            for words in split_commands(match["code"]):
                if words[0] == "draftsmith":
                    run(words, place)
                    commands += 1
                else:
                    assert words[0] in ("git", "cd", "pip")
        elif match["language"] == "python":
            code = match["code"].replace("cuda", "cpu").replace("compile=True", "compile=False")
            exec(compile(code.replace("Qwen/Qwen3-8B", place["Qwen/Qwen3-8B"]), str(PAGE), "exec"), namespace)
    assert commands == 12
    assert "vllm serve" in capsys.readouterr().out
    assert (tmp_path / "outputs" / "benchmark.json").exists()
    assert DraftHeads.from_pretrained("YOU/qwen3-8b-eagle3").config.head_type == "eagle3"
    tuned = DraftHeads.from_pretrained("outputs/tuned-heads").config
    assert tuned.target_name_or_path == "outputs/qwen3-8b-tuned"
