"""compare.py: texts of both sides end alike, and a stand-in for the authors' code goes the whole way."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftsmith.inference import DraftLogits, DraftSampling
from draftsmith.scripts.benchmarks.peers import compare
from draftsmith.scripts.benchmarks.peers.cases import AuthorsTree
from draftsmith.scripts.benchmarks.peers.compare import make_grid
from draftsmith.scripts.benchmarks.peers.worker import Text, Worker, mean_and_error, trim
from tests.conftest import CHAT_TARGET, REPOSITORY

EOS = 2

# Their classes and generators, as the worker calls them: plain decoding, one token a step.
STAND_IN = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

class EaModel(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, use_eagle3, base_model_path, ea_model_path, torch_dtype, total_token, depth, top_k):
        model = cls()
        model.target = AutoModelForCausalLM.from_pretrained(base_model_path, dtype=torch_dtype)
        model.eos = AutoTokenizer.from_pretrained(base_model_path).eos_token_id
        assert torch.load(f"{ea_model_path}/pytorch_model.bin")
        return model

    def ea_generate(self, ids, temperature, max_new_tokens):
        print("a line of a library")
        for step in range(max_new_tokens + 1):
            ids = torch.cat([ids, self.target(ids).logits[:, -1:].argmax(-1)], dim=1)
            yield ids
            if ids[0, -1] == self.eos:
                break
"""


ECHO = """
import json, sys
print("Loading")
print(json.dumps({"torch": "2", "job": json.load(open(sys.argv[1]))}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print("[1]")
    text = {"tokens": asked["prompt"], "lengths": [asked["prompt"][0], asked["seed"]]}
    print(json.dumps(text), flush=True)
"""


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([2, 1, 3], 9, [2, 1]),  # the second step's bonus token is EOS: the step after it does not count
        ([3, 1, 2], 9, [3]),  # EOS was known after the first step
        ([1, 1, 4], 9, [1, 1, 4]),  # EOS was accepted; the tokens after it count, because the step emitted them
        ([1, 1, 4], 3, [1, 1]),
        ([1, 1, 4], 1, []),  # the prompt pass gave the only token
    ],
)
def test_a_text_ends_where_ours_does(lengths: list[int], limit: int, expected: list[int]) -> None:
    tokens = [5, 6, 7, EOS, 9, 9]
    assert trim(Text(tokens, lengths), EOS, limit) == Text(tokens[: min(4, limit)], expected)


def test_each_step_counts_once() -> None:
    """Prompt 1: five tokens in two steps. Prompt 2: three tokens in two steps. The mean is 2, and each prompt is one
    token off, which is half a token a step."""
    texts = [Text([1], [2]), Text([1], [3]), Text([1], []), Text([1], [1, 2])]
    assert mean_and_error(texts, 2) == (2.0, pytest.approx(0.5))
    assert mean_and_error(texts[:2], 2) == (2.5, 0.0)


def test_scores_and_width_are_the_authors() -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0, 2.0, -1.0, 0.5]]])
    tree = AuthorsTree(1, 3, 9).grow(None, None, torch.tensor([4]), DraftLogits(logits), DraftSampling())
    expected = logits[0, 0].log_softmax(-1)
    assert tree.token_ids.tolist() == [[4, 1, 3, 2]]
    torch.testing.assert_close(tree.log_probs[0, 1:], expected[[1, 3, 2]])


@pytest.mark.slow
def test_a_stand_in_goes_the_whole_way(tmp_path: Path) -> None:
    package = tmp_path / "checkout" / "eagle" / "model"
    package.mkdir(parents=True)
    (package / "ea_model.py").write_text(STAND_IN)
    args = compare.CompareArguments(
        eagle=str(tmp_path / "checkout"),
        eagle_python=sys.executable,
        target=str(CHAT_TARGET),
        heads=str(REPOSITORY / "examples" / "heads"),
        prompts=str(REPOSITORY / "examples" / "prompts.jsonl"),
        num_prompts=2,
        max_new_tokens=12,
        cases=["eagle-60"],
        json=str(tmp_path / "out.json"),
    )
    grid = compare.run(args, Console(file=io.StringIO()))
    assert grid.cells[0][2] == "1.000 ± 0.000"
    assert grid.cells[0][-1] == "2/2"
    (found,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert found["same_settings"]["mean"] > 1.5
    assert found["differences"] == []


def test_a_worker_answers_prompt_by_prompt(tmp_path: Path) -> None:
    """Lines of libraries are skipped."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    with Worker(Path(sys.executable), script, tmp_path, tmp_path, {"heads": "eagle"}) as worker:
        assert worker.header == {"torch": "2", "job": {"heads": "eagle"}}
        assert worker.decode([5, 6], 7) == Text([5, 6], [5, 7])
        assert worker.decode([8], 9) == Text([8], [8, 9])
        with pytest.raises(ValueError, match=r"echo.py failed: (?s:.*)IndexError"):
            worker.decode([], 0)


def test_a_text_that_differs_is_counted_and_explained() -> None:
    numbers = {name: {"mean": 2.5, "error": 0.25} for name in compare.SIDES}
    greedy = {"case": "EAGLE-3", "temperature": 0.0, "num_texts": 3, **numbers}
    found = [{"prompt": "a", "place": 4, "reason": "A near-tie."}]
    grid = make_grid([greedy | {"differences": found}, greedy | {"temperature": 1.0}])
    means = ["2.500 ± 0.250"] * 3
    assert grid.cells == [["EAGLE-3", "0", *means, "2/3"], ["EAGLE-3", "1", *means, "–"]]
    assert grid.notes[0] == "EAGLE-3: a differs at token 4. A near-tie."
