"""The embedded target: what the README says about it, and that its files load without a warning."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def test_chat_target_answers_a_chat_prompt(
    chat_target: PreTrainedModel, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs: Any = chat_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = chat_target.generate(**inputs, max_new_tokens=16, do_sample=False)
    reply = chat_tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert reply.strip()
    assert chat_target.config.num_hidden_layers == 16
    assert chat_target.config.max_position_embeddings == 1024
    assert round(sum(weight.numel() for weight in chat_target.parameters()) / 1e6, 2) == 12.85
