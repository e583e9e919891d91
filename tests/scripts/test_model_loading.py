"""Programs apply the adapter that heads bring, limit the tokens that heads score, and refuse heads that need another
target."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.heads import DraftHeads, create_heads
from draftsmith.inference import Decoder, Target
from draftsmith.scripts.shared import model_loading
from draftsmith.scripts.shared.draft_vocabulary import DraftVocabulary
from draftsmith.scripts.shared.model_loading import load_drafter, load_heads, load_target
from tests.conftest import CHAT_TARGET, REPOSITORY
from tests.tiny_targets import random_prompt, tiny_target

# peft asks transformers by a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: two heads with an adapter each, and heads without."""
    peft = pytest.importorskip("peft", reason="peft is an optional extra")
    folder = tmp_path_factory.mktemp("heads")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    for name in ("one", "two"):
        model = peft.get_peft_model(tiny_target("llama").requires_grad_(False), config).eval()
        heads = create_heads("medusa", Target(model), num_heads=2)
        heads.belong_to_adapter(model)
        heads.save_pretrained(folder / name)
    create_heads("medusa", tiny_target("llama"), num_heads=1).save_pretrained(folder / "plain")
    return folder


def test_the_adapter_is_merged_into_the_target_that_is_there(stored: Path) -> None:
    target, prompt = Target(tiny_target("llama")), random_prompt(7)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    before = Decoder(target).generate(prompt, **options).sequences
    drafter = load_drafter(target, None, heads=str(stored / "one"))
    text = Decoder(target, drafter).generate(prompt, **options).sequences
    assert torch.equal(text, Decoder(target).generate(prompt, **options).sequences)
    adapted = DraftHeads.from_pretrained(stored / "one").apply_adapter(tiny_target("llama"), merge=True).model
    assert torch.equal(text, adapted.generate(prompt, **options))
    assert not torch.equal(text, before)
    again = Decoder(target, load_heads(str(stored / "one"), target)).generate(prompt, **options).sequences
    assert torch.equal(again, text), "it was added twice"


@pytest.mark.parametrize("names", [("one", "two"), ("plain", "one")])
def test_heads_for_different_targets_do_not_run_together(stored: Path, names: tuple[str, str]) -> None:
    target = Target(tiny_target("llama"))
    load_heads(str(stored / names[0]), target)
    with pytest.raises(ValueError, match="different adapters of the target"):
        load_heads(str(stored / names[1]), target)


def test_the_tokens_that_heads_score_come_from_given_conversations(tmp_path: Path) -> None:
    """Heads that were saved without counts; replies count, questions do not."""
    turns = [{"role": "user", "content": "zebra"}, {"role": "assistant", "content": "hello hello world"}]
    (tmp_path / "replies.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    target, tokenizer = load_target(str(REPOSITORY / "examples" / "chat-13m"))
    place = str(REPOSITORY / "examples" / "heads" / "mtp")
    hello, world, zebra = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("hello", " world", "zebra"))
    vocabulary = DraftVocabulary(300, [str(tmp_path / "replies.jsonl")])
    drafter = load_drafter(target, tokenizer, heads=place, vocabulary=vocabulary)
    ids = drafter.for_target(target).draft_token_ids.tolist()
    assert len(ids) == 300
    assert {hello, world} <= set(ids)
    assert zebra not in ids
    with pytest.raises(ValueError, match=r"draft_vocab_size 300.*--draft_vocab_data FILE"):
        load_drafter(target, tokenizer, heads=place, vocabulary=DraftVocabulary(300, []))


# The dtype is one that the processor computes fast in; training says what is slow.


@pytest.mark.parametrize(("is_fast", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_float32_on_a_cpu_without_bfloat16(
    is_fast: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: is_fast)
    target, _ = model_loading.load_target(str(CHAT_TARGET), device="cpu")
    assert target.dtype == expected
    assert ("--dtype bfloat16 keeps the dtype of its weights" in caplog.text) is not is_fast


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"keeps_dtype": True}], ids=str)
def test_a_dtype_that_is_named_or_written_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: False)
    assert model_loading.load_target(str(CHAT_TARGET), device="cpu", **options)[0].dtype == torch.bfloat16


def test_processes_of_one_run_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "has_bfloat16", lambda: False)
    assert model_loading.resolve_dtype(str(CHAT_TARGET), "auto", "cpu") == "float32"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert model_loading.resolve_dtype(str(CHAT_TARGET), "auto", "cpu") == "auto"


def test_weights_are_packed_where_memory_is_plenty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Target(tiny_target("llama"))
    assert not model_loading.packs_weights(target, None)  # it stays in the processor's caches
    monkeypatch.setattr(model_loading, "LEAST_PACKED", 0)
    assert model_loading.packs_weights(target, None)
    assert not model_loading.packs_weights(target, choice=False)
    half = Target(tiny_target("llama").half())  # which oneDNN's packed kernels do not take
    assert not model_loading.packs_weights(half, None)
    memory = 3 * target.model.get_memory_footprint()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=memory))
    assert not model_loading.packs_weights(target, None)
    assert model_loading.packs_weights(target, choice=True)
    monkeypatch.undo()
    monkeypatch.setattr(model_loading, "LEAST_PACKED", 0)
    monkeypatch.setattr(model_loading, "CGROUP", tmp_path)
    for limit, used, fits in ((memory, 0, False), (9 * memory, 0, True), (9 * memory, 8 * memory, False)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used + 100}\n")
        (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\n")
        assert model_loading.packs_weights(target, None) == fits
