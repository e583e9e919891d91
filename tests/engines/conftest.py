"""The embedded target with prompts and its own texts, and vLLM in an environment of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads import DraftHeads
from draftsmith.heads.formats.registry import find_format
from draftsmith.inference import Target
from tests.conftest import CHAT_TARGET
from tests.engines.chains import Texts, read_turns, write_texts
from tests.engines.environments.running import find_python, run_worker

NUM_PROMPTS, MAX_NEW_TOKENS = 12, 64


@pytest.fixture(scope="session")
def target(chat_target: Any) -> Target:
    return Target(chat_target)


@pytest.fixture(scope="session")
def texts(vllm_python: str, target: Target, chat_tokenizer: Any) -> Texts:
    """Prompts, and what transformers writes after them; only vLLM's tests read them,
    and without vLLM nothing is written."""
    turns = read_turns(NUM_PROMPTS)
    prompts = [chat_tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in turns]
    return write_texts(target, prompts, MAX_NEW_TOKENS)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return find_python("VLLM_PYTHON")


@pytest.fixture
def run_vllm(vllm_python: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs vllm_worker.py, or another script that calls it; its job is these settings, with the given ones in place of
    them."""

    def run(script: str = "vllm_worker.py", **job: Any) -> dict[str, Any]:
        usual = {"target": str(CHAT_TARGET), "heads": None, "method": None, "max_length": 512}
        path = run_worker(vllm_python, script, {**usual, **job}, tmp_path, "result.json")
        return json.loads(path.read_text(encoding="utf-8"))

    return run


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """Writes bound heads in a format; returns the folder."""

    def export(heads: DraftHeads, name: str = "vllm") -> Path:
        folder = tmp_path / "exported"
        folder.mkdir()
        find_format(name, heads.config.head_type).write(heads.config, heads.state_dict(), heads.target).save(folder)
        return folder

    return export
