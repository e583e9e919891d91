"""sizes.py on a tiny shape: scripted acceptance on top of real steps, and what is made of the numbers."""

from __future__ import annotations

import io
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.heads import HEAD_TYPES
from draftsmith.inference.trees.token_tree import TokenTree
from draftsmith.scripts.benchmarks import sizes
from draftsmith.scripts.benchmarks.scripted.counting import (
    SHAPES,
    make_config,
    make_counting_target,
    make_random_heads,
    script_tree,
)
from draftsmith.scripts.benchmarks.scripted.llama_cpp import write_llama
from draftsmith.scripts.benchmarks.scripted.summary import compare
from draftsmith.scripts.benchmarks.sizes import SizesArguments, make_contenders
from draftsmith.scripts.measuring.measure import Batch, Prompt

CPU = torch.device("cpu")


def tiny_arguments(**changes: Any) -> SizesArguments:
    settings = {"sizes": ["tiny"], "kinds": ["medusa"], "trees": ["dynamic:2,2,4", "dynamic:4,2,6"], "modes": ["eager"]}
    numbers = {"acceptance_lengths": [2, 5], "context": 16, "steps": 3, "repeats": 2, "device": "cpu"}
    return SizesArguments(**{**settings, **numbers, **changes})


def test_the_worked_example_of_a_scripted_tree() -> None:
    drafted = TokenTree(
        torch.tensor([[7, 3, 8, 4, 9]]),
        torch.tensor([[-1, 0, 0, 1, 2]]),
        torch.tensor([[0, 1, 1, 2, 2]]),
        torch.zeros(1, 5),
    )
    tree = script_tree(drafted, torch.tensor(2), 100)
    assert tree.token_ids.tolist() == [[7, 8, 9, 4, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 1]]
    nothing = script_tree(drafted, torch.tensor(0), 100)
    assert nothing.token_ids.tolist() == [[7, 3, 7, 4, 9]], "8 would have been right"


@pytest.mark.parametrize(
    ("kind", "dtype"), [*zip(sorted(HEAD_TYPES), itertools.cycle([torch.float32, torch.bfloat16]), strict=False)]
)
def test_every_kind_accepts_as_many_tokens_as_one_asks(kind: str, dtype: torch.dtype) -> None:
    """Beyond the last token the target counts on from 0."""
    target = make_counting_target("tiny", dtype, CPU)
    prompt = Batch.of(Prompt("", 0, torch.arange(505)[None]))
    args = tiny_arguments(trees=["dynamic:4,3,8"])
    (contender,) = make_contenders(kind, target, None, prompt, args)
    assert contender.script is not None
    for length in contender.lengths([1, 2, 4]):
        contender.script.num_right.fill_(length - 1)
        sample = contender.decode(3 * length, length)  # refuses another length, and another text
        assert 0 < sum(sample.parts.values()) < sample.seconds


def test_another_acceptance_length_or_text_is_refused() -> None:
    target = make_counting_target("tiny", torch.float32, CPU)
    prompt = Batch.of(Prompt("", 0, torch.arange(16)[None]))
    contender = next(make_contenders("medusa", target, None, prompt, tiny_arguments()))
    with pytest.raises(RuntimeError, match=r"1\.0 instead of 2"):
        contender.decode(4, 2)
    with torch.no_grad():
        target.model.lm_head.weight.copy_(target.model.lm_head.weight.roll(1, 0))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="does not count"):
        contender.decode(4, 1)


def test_heads_draft_from_a_reduced_vocabulary() -> None:
    """As published EAGLE-3 heads do; the target here has more tokens, but is as small otherwise."""
    target = make_counting_target("tiny", torch.float32, CPU)
    assert make_random_heads("eagle3", target).draft_token_ids is None
    for size in sorted(set(SHAPES) - {"tiny"}):
        assert make_config(size).vocab_size > 32_000


def test_the_numbers_that_follow_from_samples() -> None:
    def contender(name: str, dtype: str, tree: str, **samples: list[tuple[float, float, float]]) -> dict[str, Any]:
        found = {
            int(length[1:]): [{"seconds": s, "parts": {"draft": d, "verify": v}} for s, d, v in some]
            for length, some in samples.items()
        }
        return {"name": name, "dtype": dtype, "mode": "eager", "tree": tree, "samples": found}

    fast = contender("plain", "bfloat16", "", _1=[(2.0, 0.0, 2.0), (1.0, 0.0, 1.0), (2.0, 0.0, 2.0)])
    slow = contender("plain", "float32", "", _1=[(4.0, 0.0, 4.0)] * 3)
    heads = contender("medusa", "float32", "chain", _2=[(4.0, 1.0, 2.0)] * 3, _4=[(4.0, 1.0, 2.0)] * 3)
    rows = compare([{"size": "1B", "contenders": [slow, fast, heads]}])
    row = rows[-1]
    assert (row.fastest, row.fastest_way, row.step, row.break_even) == (2.0, "bfloat16, eager", 4.0, 2.0)
    assert row.parts == {"draft": 0.25, "verify": 0.5}, "of the plain step in float32"
    assert row.overhead == 0.25
    assert row.speedups == {2: 1.0, 4: 2.0}


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HereAndNow:
        """In the place of a pool of processes."""

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def submit(self, function: Any, *args: Any) -> Any:
            self.result = partial(function, *args)
            return self

    monkeypatch.setattr(sizes, "ProcessPoolExecutor", HereAndNow)
    console = Console(file=io.StringIO(), width=180)
    sizes.run(tiny_arguments(output=str(tmp_path / "out")), console)
    found = json.loads((tmp_path / "out.json").read_text())
    assert "SIMULATED" in found["environment"]["simulated"]
    assert len(found["groups"]) == 2, "one for each dtype of the heads"
    contenders = found["groups"][0]["contenders"]
    assert [(one["name"], one["dtype"]) for one in contenders[:4]] == [
        *(("plain", "float32"), ("generate", "float32"), ("plain", "bfloat16"), ("generate", "bfloat16"))
    ]
    assert [list(one["samples"]) for one in contenders[4:]] == [["2"], ["2", "5"]], (
        "a tree of depth 2 accepts 3 at most"
    )
    assert all(len(some) == 2 for one in contenders for some in one["samples"].values())
    assert "SIMULATED" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_the_written_llama_has_every_tensor(tmp_path: Path) -> None:
    read_gguf = pytest.importorskip("draftsmith.heads.formats.gguf_file").read_gguf
    target = make_counting_target("tiny", torch.bfloat16, CPU)
    write_llama(tmp_path / "target.gguf", target)
    metadata, tensors = read_gguf(tmp_path / "target.gguf")
    state = target.model.state_dict()
    assert len(tensors) == len(state)
    assert sum(one.numel() for one in tensors.values()) == sum(one.numel() for one in state.values())
    assert torch.equal(tensors["blk.3.ffn_up.weight"], state["model.layers.3.mlp.up_proj.weight"])
    assert metadata["llama.block_count"] == 4


def test_wrong_words_are_refused() -> None:
    for wrong in ({"sizes": ["2B"]}, {"kinds": []}, {"modes": ["fast"]}, {"trees": ["oak"]}, {"steps": 1}):
        with pytest.raises(ValueError):
            tiny_arguments(**wrong)
