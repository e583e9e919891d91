"""Features online and from disk: the same states."""

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from draftsmith.inference import Target
from draftsmith.training.features.sources import StoredFeatures, Texts, TextsCollator, look_ahead
from draftsmith.training.features.store import FeatureStore
from tests.training.feature_cases import COLLATE, ROWS, store_rows


@pytest.fixture(scope="module")
def everything(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """All hidden states of the rows."""
    return store_rows(target, tmp_path_factory.mktemp("store"), list(range(target.num_layers)))


def test_packed_documents_are_found_one_by_one(target: Target, everything: FeatureStore) -> None:
    """Two texts in one row, which the store has from rows of their own."""
    first, second = ROWS[0]["input_ids"], ROWS[1]["input_ids"]
    ids = torch.tensor([[*first, *second, 0, 0]])
    marks = torch.tensor([[0] * len(first) + [1] * len(second) + [-1, -1]])
    batch = {"input_ids": ids, "attention_mask": (marks >= 0).long(), "document_ids": marks}
    texts = Texts.find(batch)
    assert texts.places == [(0, 0, len(first)), (0, len(first), len(first) + len(second))]
    assert texts.ids(texts.places[1]).tolist() == second
    stored = StoredFeatures(target, (2,), everything)
    found = stored({**batch, "texts": texts})
    for text, start in ((first, 0), (second, len(first))):
        row = everything.read(torch.tensor(text), ["hidden.2", "last"])
        assert torch.equal(found.features[0, start : start + len(text)], row["hidden.2"])
        assert torch.equal(found.last_hidden[0, start : start + len(text)], row["last"])


def test_a_thread_reads_the_next_batch_while_one_trains(target: Target, everything: FeatureStore) -> None:
    """Each text once, one batch ahead and no more; a batch that is not expected is read between them."""
    read: list[int] = []

    class Noted(StoredFeatures):
        def find(self, texts: Texts, place: tuple[int, int, int]) -> Mapping[str, Tensor]:
            read.append(texts.input_ids[0, 0])
            assert threading.current_thread() is not threading.main_thread() or texts is other["texts"]
            return super().find(texts, place)

    stored, collate = Noted(target, (2,), everything), TextsCollator(COLLATE)
    batches = [collate([row]) for row in ROWS[:4]]
    other = collate([ROWS[4]])
    plain = StoredFeatures(target, (2,), everything)
    for number, batch in enumerate(look_ahead(iter(batches), stored)):
        assert batch is batches[number]
        assert torch.equal(stored(batch).features, plain(batch).features)
        if number == 1:
            assert torch.equal(stored(other).features, plain(other).features)
        if stored._reading is not None:
            stored._reading.result()
        assert len(read) == min(number + 2, 4) + (number > 0)
