"""Streams of conversations: who reads what, in which order, and what a resumed run sees."""

import shutil
from collections import Counter
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from draftsmith.training.data.conversations import BadLineError
from draftsmith.training.data.options import DataArguments
from draftsmith.training.data.streaming import ConversationStream
from draftsmith.training.data.training_sets import load_datasets
from tests.training.conversation_cases import replies, sharegpt, write
from tests.training.runner import WORDS, Runner, assert_same

NUM_ROWS = 30


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Conversations whose replies are word0 to word19, and word20 to word29."""
    folder = tmp_path_factory.mktemp("streams")
    rows = [{"prompt": "word50", "response": word} for word in WORDS[:NUM_ROWS]]
    return [write(folder / "a.jsonl", rows[:20]), write(folder / "b.jsonl.gz", rows[20:])]


def make_stream(files: list[str], tokenizer: Any, **options: Any) -> ConversationStream:
    mine = {key: options.pop(key) for key in ("rank", "num_processes", "seed") if key in options}
    data_args = DataArguments(dataset=files, streaming=True, **{"shuffle_buffer": 8, **options})
    return ConversationStream(data_args, tokenizer, **{"seed": 0, **mine}, holds_out=data_args.validation_fraction > 0)


def test_every_epoch_has_every_conversation_once_in_another_order(files: list[str], word_tokenizer: Any) -> None:
    stream = make_stream(files, word_tokenizer, validation_fraction=0)
    said = replies(islice(stream, 3 * NUM_ROWS), word_tokenizer)
    epochs = [said[start : start + NUM_ROWS] for start in range(0, len(said), NUM_ROWS)]
    assert all(sorted(epoch) == sorted(WORDS[:NUM_ROWS]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert said == replies(islice(stream, 3 * NUM_ROWS), word_tokenizer)
    other = make_stream(files, word_tokenizer, validation_fraction=0, seed=1)
    assert said != replies(islice(other, 3 * NUM_ROWS), word_tokenizer)
    in_order = make_stream(files[:1], word_tokenizer, validation_fraction=0, shuffle_buffer=1)
    assert replies(islice(in_order, 20), word_tokenizer) == WORDS[:20]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_readers_share_an_epoch_without_overlap(files: list[str], word_tokenizer: Any, num_workers: int) -> None:
    """Two processes with two workers each, batches of 3; what is fetched is less than any reader's epoch."""
    said = []
    for rank in range(2):
        stream = make_stream(files, word_tokenizer, validation_fraction=0, rank=rank, num_processes=2)
        loader = DataLoader(stream, batch_size=3, num_workers=num_workers, collate_fn=list)
        for batch in islice(loader, 4):
            said += replies(batch, word_tokenizer)
    assert len(said) == len(set(said)) == 24


def test_packed_streams_have_the_same_conversations(files: list[str], word_tokenizer: Any) -> None:
    options = {"validation_fraction": 0, "max_length": 20}
    single = [row["input_ids"] for row in islice(make_stream(files, word_tokenizer, **options), NUM_ROWS)]
    packed: list[list[int]] = []
    for row in make_stream(files, word_tokenizer, **options, packing=True):
        assert len(row["input_ids"]) == len(row["loss_mask"]) == sum(row["document_lengths"]) <= 20
        ids = iter(row["input_ids"])
        packed += [list(islice(ids, length)) for length in row["document_lengths"]]
        if len(packed) >= NUM_ROWS:
            break
    assert max(map(len, single)) <= 10
    assert sorted(packed) == sorted(single)


def test_what_is_held_out_goes_by_the_hash_of_the_conversation(files: list[str], word_tokenizer: Any) -> None:
    options: dict[str, Any] = {"validation_fraction": 0.3, "streaming": True, "shuffle_buffer": 1}
    expected = []
    for word in WORDS[:NUM_ROWS]:
        turns = (("user", "word50"), ("assistant", word))
        text = ", ".join(f'{{"role": "{role}", "content": "{content}"}}' for role, content in turns)
        digest = blake2b(f'{{"messages": [{text}]}}'.encode(), digest_size=8).hexdigest()
        if int(digest, 16) / 16**16 < 0.3:
            expected.append(word)
    assert 3 < len(expected) < 15
    stream, held_out = load_datasets(DataArguments(dataset=files, **options), word_tokenizer, seed=0)
    assert replies(held_out, word_tokenizer) == expected
    num_learned = NUM_ROWS - len(expected)
    learned = replies(islice(stream, 2 * num_learned), word_tokenizer)
    assert Counter(learned) == {word: 2 for word in WORDS[:NUM_ROWS] if word not in expected}
    _, first = load_datasets(DataArguments(dataset=files, **options, max_eval_samples=2), word_tokenizer, seed=1)
    assert replies(first, word_tokenizer) == expected[:2]
    assert isinstance(stream, ConversationStream)
    assert replies(stream.first_rows(4), word_tokenizer) == learned[:4]
    _, given = load_datasets(
        DataArguments(dataset=files[:1], eval_dataset=files[1:], streaming=True), word_tokenizer, seed=0
    )
    assert replies(given, word_tokenizer) == WORDS[20:30]


def test_reading_is_lazy_and_bad_lines_are_named(
    tmp_path: Path, word_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good, unanswered = sharegpt("word1", "word2"), sharegpt("word1")
    file = write(tmp_path / "a.jsonl", [good, good, unanswered, "{", good])
    options = {"validation_fraction": 0, "shuffle_buffer": 1}
    rows = iter(make_stream([file], word_tokenizer, **options))
    assert next(rows) == next(rows)
    with pytest.raises(BadLineError, match=r"a.jsonl, line 4: Expecting .*--skip_bad_lines"):
        next(rows)
    assert len(list(islice(make_stream([file], word_tokenizer, **options, skip_bad_lines=True), 4))) == 4
    warnings = [record.getMessage() for record in caplog.records]
    assert [warning.partition(": ")[0] for warning in warnings] == ["dropped 1 of 5 conversations"] * 2
    assert "malformed line" in caplog.text
    assert "no token of the assistant's" in caplog.text
    bad = write(tmp_path / "b.jsonl", [unanswered])
    for empty in (bad, write(tmp_path / "c.jsonl", [])):
        stream = make_stream([empty], word_tokenizer, validation_fraction=0, skip_bad_lines=True)
        with pytest.raises(ValueError, match=r"no conversation of .* one of 1 processes;"):
            next(iter(stream))


class TestRuns:
    """24 conversations, of which a fraction is held out, in batches of 4: three steps cross into the next epoch."""

    STREAMED: dict[str, Any] = {  # noqa: RUF012
        "streaming": True,
        "shuffle_buffer": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 0,
        "load_best_model_at_end": False,  # the result is the last step, after the interruption
    }

    def test_an_interrupted_run_sees_the_same_batches(self, train: Runner) -> None:
        options = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1, "max_steps": 4}
        assert train(**self.STREAMED, **options)["eval_top1_depth1"] >= 0
        uninterrupted = train.weights()
        shutil.rmtree(train.output_dir)
        train.break_off(3, **self.STREAMED, **options)
        assert not (train.output_dir / "model.safetensors").exists()
        train(**self.STREAMED, **options, resume_from_checkpoint=True)
        assert_same(train.weights(), uninterrupted)

    def test_what_changes_the_order_is_refused_on_resuming(self, train: Runner) -> None:
        train(**self.STREAMED, max_steps=2)
        (train.output_dir / "model.safetensors").unlink()
        for option, value in (("dataloader_num_workers", 2), ("eval_dataset", train.defaults["dataset"])):
            with pytest.raises(ValueError, match=option):
                train(**self.STREAMED, resume_from_checkpoint=True, **{option: value})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_steps": -1}, "got streaming without max_steps"),
            ({"train_sampling_strategy": "group_by_length"}, "got streaming True with train_sampling_strategy group"),
        ],
    )
    def test_what_a_stream_cannot_do_is_refused(self, train: Runner, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            train(**{**self.STREAMED, **options})
