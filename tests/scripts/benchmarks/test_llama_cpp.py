"""llama.cpp as a contender: a server in a process of its own."""

from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference import Target, generate
from draftsmith.scripts.benchmarks.llama_cpp import LlamaCppDecoding, write_llama
from draftsmith.scripts.measuring.measure import Batch, Prompt, Settings
from draftsmith.scripts.shared.model_loading import encode_messages

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")


def test_its_text_is_ours_and_its_process_ends(tmp_path: Path, chat_target: Any, chat_tokenizer: Any) -> None:
    target = Target.of(chat_target)
    write_llama(tmp_path / "target.gguf", target, chat_tokenizer)
    prompt = encode_messages(chat_tokenizer, [{"role": "user", "content": "Tell me about the sea."}])
    decoding = LlamaCppDecoding(tmp_path / "target.gguf", context=256)
    run = decoding(Batch.of(Prompt("p", 0, prompt)), Settings(max_new_tokens=12))
    ours = generate(target, None, prompt, max_new_tokens=12, do_sample=False).sequences[0, prompt.shape[1] :]
    assert run.texts[0] == ours.tolist()
    process = decoding.process
    del decoding
    assert process.poll() == 0


def test_a_file_that_it_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "target.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"llama\.cpp cannot load .*: [A-Z]"):
        LlamaCppDecoding(tmp_path / "target.gguf")
