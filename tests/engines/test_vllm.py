"""vLLM decodes with our exported heads: its texts, its drafts and its acceptance are ours.

`make test-engines` makes vLLM's environment and runs these; elsewhere VLLM_PYTHON names a Python that has vLLM.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Target
from tests.engines.chains import Texts, compare_with_vllm
from tests.engines.learning import learn_by_heart, load_trained

DEPTH = 4

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


def start_from_eagle3(target: Target, kind: str, **settings: Any) -> DraftHeads:
    """Heads with other settings and the weights of the repository's EAGLE-3 heads: they draft worse, but by the same
    rules everywhere."""
    trained = load_trained("eagle3", target)
    heads = create_heads(kind, target, feature_layers=trained.config.feature_layers, **settings)
    state = heads.state_dict()
    kept = {key: x for key, x in trained.state_dict().items() if key in state and state[key].shape == x.shape}
    heads.load_state_dict(state | kept)
    return heads.eval()


@pytest.mark.parametrize("name", ["eagle3", "full vocabulary", "fc_norm", "norm_output", "eagle"])
def test_vllm_drafts_as_we_do(
    name: str, target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "full vocabulary": {},
        "fc_norm": {"fc_norm": True},
        "norm_output": {"norm_output": True},
    }
    heads = start_from_eagle3(target, "eagle3", **changes[name]) if name in changes else load_trained(name, target)
    compare_with_vllm(run_vllm, heads, texts, DEPTH, heads=str(exported(heads)), method=heads.config.head_type)


@pytest.mark.parametrize("format_name", ["vllm", "speculators"])
def test_eagle3_of_two_layers(
    format_name: str, target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]
) -> None:
    vocabulary = load_trained("eagle3", target).config.draft_vocab_size
    heads = start_from_eagle3(target, "eagle3", num_layers=2, draft_vocab_size=vocabulary)
    learn_by_heart(heads, texts, num_steps=20)
    job = {"heads": str(exported(heads, format_name)), "method": "eagle3"}
    compare_with_vllm(run_vllm, heads, texts, DEPTH, **job)


@pytest.mark.parametrize("format_name", ["vllm", "speculators"])
def test_eagle3_with_a_window(
    format_name: str, target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]
) -> None:
    """One draft at a time: from the second on, vLLM's window slides with the drafts, and ours does not."""
    heads = start_from_eagle3(target, "eagle3", sliding_window=12)
    compare_with_vllm(run_vllm, heads, texts, 1, heads=str(exported(heads, format_name)), method="eagle3")


@pytest.mark.parametrize("format_name", ["vllm", "speculators"])
def test_p_eagle(
    format_name: str, target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]
) -> None:
    vocabulary = load_trained("eagle3", target).config.draft_vocab_size
    settings = {"draft_vocab_size": vocabulary, "num_depths": DEPTH, "num_layers": 2}
    heads = learn_by_heart(start_from_eagle3(target, "parallel", **settings), texts, num_steps=40)
    job = {"heads": str(exported(heads, format_name)), "method": "eagle3", "options": {"parallel_drafting": True}}
    compare_with_vllm(run_vllm, heads, texts, DEPTH, **job)


@pytest.mark.parametrize("format_name", ["vllm", "speculators"])
def test_blocks(
    format_name: str, target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]
) -> None:
    """DFlash with a mask of its own, which its training moves away from every token."""
    heads = create_heads("block", target, block_size=DEPTH + 1, num_layers=2, num_anchors=16)
    learn_by_heart(heads, texts, num_steps=60)
    compare_with_vllm(run_vllm, heads, texts, DEPTH, heads=str(exported(heads, format_name)), method="dflash")


def test_dflash2(target: Target, texts: Texts, run_vllm: Callable[..., Any], exported: Callable[..., Path]) -> None:
    """Six texts: interpreted kernels are slow."""
    few = Texts(texts.prompts[:6], texts.replies[:6], texts.max_new_tokens)
    heads = create_heads("dflash2", target, block_size=DEPTH + 1, num_layers=2, num_anchors=32, selector_rank=32)
    learn_by_heart(heads, few, num_steps=60)
    job = {"heads": str(exported(heads)), "method": "dflash"}
    compare_with_vllm(run_vllm, heads, few, DEPTH, "vllm_interpreted.py", **job)


def test_plain_vllm_writes_the_targets_texts(texts: Texts, run_vllm: Callable[..., Any]) -> None:
    result = run_vllm(prompts=texts.prompts, max_new_tokens=texts.max_new_tokens)
    assert [text["tokens"] for text in result["texts"]] == texts.replies
