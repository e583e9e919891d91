"""Packing: which conversations share a row, what the collator makes of them, and that runs learn the same."""

import json
import random
from collections import Counter
from typing import Any

import datasets
import pytest
import torch

from draftsmith.heads.modules.host_tensors import read_on_host
from draftsmith.training.data.collation import ConversationCollator
from draftsmith.training.data.packing import fit_best, pack_rows
from tests.training.runner import Runner


def make_rows(count: int = 2500, seed: int = 0) -> datasets.Dataset:
    """Every token says which conversation it is of."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 60) for _ in range(count)]
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[index] * size for index, size in enumerate(sizes)],
            "loss_mask": [[index % 2] * size for index, size in enumerate(sizes)],
        }
    )


class TestFitting:
    def test_one_that_is_too_long_stands_alone(self) -> None:
        assert fit_best([130, 10], 100) == [[0], [1]]

    @pytest.mark.parametrize("seed", range(3))
    def test_rows_are_nearly_full_and_hold_everything_once(self, seed: int) -> None:
        draw = random.Random(seed)
        lengths = [draw.randint(20, 700) for _ in range(400)]
        packs = fit_best(lengths, 1024)
        assert sorted(index for pack in packs for index in pack) == list(range(400))
        assert max(sum(lengths[index] for index in pack) for pack in packs) <= 1024
        assert len(packs) <= 1.03 * sum(lengths) / 1024 + 1


class TestPacking:
    def test_conversations_are_kept_whole_each_once(self) -> None:
        rows = make_rows()
        seen: Counter[int] = Counter()
        for row in pack_rows(rows, 100, seed=1):
            assert len(row["input_ids"]) == len(row["loss_mask"]) == sum(row["document_lengths"]) <= 100
            start = 0
            for length in row["document_lengths"]:
                (index,) = set(row["input_ids"][start : start + length])
                assert row["loss_mask"][start : start + length] == [index % 2] * length
                assert length == len(rows[index]["input_ids"])
                seen[index] += 1
                start += length
        assert seen == Counter(range(len(rows)))

    def test_is_a_function_of_the_seed(self) -> None:
        rows = make_rows(60)
        one, again, other = (pack_rows(rows, 100, seed=seed).to_list() for seed in (1, 1, 2))
        assert one == again
        assert one != other


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_collator_pads_on_the_right_and_says_whose_each_token_is(is_packed: bool) -> None:
    rows: list[dict[str, list[int]]] = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]},
        {"input_ids": [4], "loss_mask": [1]},
    ]
    expected = {
        "input_ids": [[5, 6, 7, 8, 9, 3, 3, 3], [4, 3, 3, 3, 3, 3, 3, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
        "loss_mask": [[0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
    }
    if is_packed:
        rows[0]["document_lengths"], rows[1]["document_lengths"] = [3, 2], [1]
        expected["document_ids"] = [[0, 0, 0, 1, 1, -1, -1, -1], [0, -1, -1, -1, -1, -1, -1, -1]]
    batch = ConversationCollator(3)(rows)
    assert {name: read_on_host(tensor).tolist() for name, tensor in batch.items() if name != "token_keys"} == expected
    assert all(read_on_host(tensor).dtype == torch.int64 for tensor in batch.values())
    for length, width in ((8, 8), (9, 16)):
        row = {"input_ids": [5] * length, "loss_mask": [1] * length}
        assert ConversationCollator(0)([row])["input_ids"].shape == (1, width)


def test_a_documents_keys_are_the_same_in_any_row() -> None:
    documents = [[5, 6, 7], [8, 9], [5, 6]]
    own = ConversationCollator(0)([{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in documents])
    packed = ConversationCollator(0)(
        [{"input_ids": [8, 9, 5, 6, 7, 5, 6], "loss_mask": [1] * 7, "document_lengths": [2, 3, 2]}]
    )
    long, short, start = (keys[: len(ids)] for keys, ids in zip(own["token_keys"].values, documents, strict=True))
    assert torch.equal(packed["token_keys"].values[0, :7], torch.cat([short, long, start]))
    assert len(set(packed["token_keys"].values[0, :7].tolist())) == 7, "a document's start has keys of its own"


class TestRuns:
    def test_learn_what_rows_of_their_own_teach(self, train: Runner) -> None:
        """All conversations in every optimizer step, so that only the rows they share differ: weights, token counts and
        the metrics of evaluation are the same, with packed batches accumulated."""
        options: dict[str, Any] = {
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "max_grad_norm": 0,
            "max_steps": 3,
            "head_overrides": ["ttt_steps=2"],
            "max_length": 100,
        }
        expected = train(**options, per_device_train_batch_size=18)
        weights, (tokens, steps) = train.weights(), read_tokens(train)
        found = train(**options, packing=True, per_device_train_batch_size=3, gradient_accumulation_steps=2)
        assert read_tokens(train) == (tokens, steps)
        for name, tensor in train.weights().items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-5)
        for name, value in expected.items():
            if name.startswith(("eval_loss", "eval_top", "eval_acceptance")):
                assert found[name] == pytest.approx(value, rel=1e-3), name


def read_tokens(train: Runner) -> tuple[int, int]:
    training = json.loads((train.output_dir / "training_record.json").read_text())["training"]
    return training["tokens"], training["steps"]
