"""Fixtures shared by every test. Nothing here reaches the network: the hub is switched off before it is imported."""

import gc
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What tests tokenize is neither written to the user's cache nor found there; programs that tests start inherit this.
if multiprocessing.parent_process() is None:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="draftsmith-tests-")
os.environ.pop("HF_DATASETS_CACHE", None)  # it would win
os.environ["DRAFTSMITH_CACHE"] = os.environ["HF_HOME"]  # measured costs
# Workers share compiled kernels.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "draftsmith-test-kernels"))

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from draftsmith.inference import decoder as decoding

HF_HOME = Path(os.environ["HF_HOME"])
REPOSITORY = Path(__file__).resolve().parents[1]
CHAT_TARGET = REPOSITORY / "examples" / "chat-13m"

# The default tree follows the clock. Here it is the fixed one that takes its place where it may not.
DEFAULT_TREE = decoding._default_tree
FIXED = {"auto": "dynamic", "gamma": "chain"}
decoding._default_tree = lambda *args: FIXED.get(tree := DEFAULT_TREE(*args), tree)

# Workers run side by side (`-n auto`); tensor code that also spread over the cores would only fight over them.
torch.set_num_threads(1)

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")


def pytest_collection_finish() -> None:
    """What was imported lives to the end. Without it a full garbage collection, one in every training run, is quick."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count what is left at the exit
    shutil.rmtree(HF_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order() -> None:
    """Seeds Python, NumPy and torch before each test, so that a test does not depend on the ones before it."""
    set_seed(0)


@pytest.fixture
def traced_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile=True` makes its graphs, and torch runs them as they are: a break, a read on the host or a stale number
    shows in seconds. Inductor's code takes minutes for each decoder; the tests marked slow in test_compiled.py run it.
    With a parameter, only functions whose names match this pattern are traced, since each graph takes a second."""
    compile_with, names = torch.compile, re.compile(getattr(request, "param", ""))

    def trace(function: Any, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        if not names.match(function.__name__):
            return function
        kept = {key: value for key, value in (options or {}).items() if key == "guard_filter_fn"}
        return compile_with(function, backend="eager", options=kept, **settings)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", trace)


@pytest.fixture(scope="session")
def chat_target() -> PreTrainedModel:
    """The embedded target in float32, in eval mode. Shared by a worker's tests: do not change it."""
    return AutoModelForCausalLM.from_pretrained(CHAT_TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerBase:
    """The embedded target's tokenizer."""
    return AutoTokenizer.from_pretrained(CHAT_TARGET)


@pytest.fixture
def own_kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module examples/own_kind.py, freshly imported. Its kind of heads is known until the test ends."""
    from draftsmith.heads import HEAD_TYPES

    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.delitem(sys.modules, "own_kind", raising=False)
    yield importlib.import_module("own_kind")
    HEAD_TYPES.pop("bigram", None)
