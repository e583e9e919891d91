"""Reference texts at batch size 1: transformers' greedy text, or the sampled text of plain decoding.

References are made once per process and shared by all cells. They run beyond the longest text a cell asks for, without
EOS, and are cut: so the scripted drafter knows what would follow a text's end, and steps overshoot it.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.inference import Decoder, Target
from tests.tiny_targets import attention_implementations, random_prompt, tiny_target

CHAT = "chat-13m"
PAD = 0
BEYOND = 8  # tokens of a reference after the longest text
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=0.7": {"temperature": 0.7, "top_k": 0},
    "T=1": {"temperature": 1.0, "top_k": 0},
    "top-k 5": {"temperature": 1.0, "top_k": 5},
    "top-p 0.8": {"temperature": 0.9, "top_p": 0.8},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty 1.3": {"temperature": 0.8, "repetition_penalty": 1.3},
    # It counts padding too, as in transformers. That would matter if the padding token could be drawn.
    "no repeated bigram": {"temperature": 1.0, "no_repeat_ngram_size": 2, "suppress_tokens": [PAD]},
    "greedy, repetition penalty 1.3": {"repetition_penalty": 1.3},
    "greedy, no repeated bigram": {"no_repeat_ngram_size": 2, "suppress_tokens": [PAD]},
}


@dataclass(frozen=True)
class Row:
    """A random prompt of `length` tokens, which draws with `seed`.

    Rows with the same `num_shared` share their first `num_shared` tokens. The chat target has a prompt for each number.
    """

    length: int
    seed: int
    num_shared: int = 0


def do_sample(sampling: str) -> bool:
    return not sampling.startswith("greedy")


@cache
def target_of(family: str, attention: str, seed: int, dtype: torch.dtype = torch.float32) -> Target:
    """A family's target with these weights (the chat target has only its own); in bfloat16 in batch-invariant mode."""
    if family == CHAT:
        from tests.lossless.test_real_heads import chat_target

        target = chat_target(dtype)
    else:
        target = Target(tiny_target(family, seed, attn_implementation=attention, dtype=dtype, initializer_range=0.3))
    return target if dtype == torch.float32 else target.batch_invariant()


def attentions_of(family: str) -> tuple[str, ...]:
    return attention_implementations("llama" if family == CHAT else family)


@cache
def prompt_of(family: str, row: Row) -> Tensor:
    """[L]"""
    if family == CHAT:
        from tests.lossless.test_real_heads import chat_prompts

        return chat_prompts()[row.length][0]
    own = random_prompt(row.length, seed=1000 + row.seed)[0]
    shared = random_prompt(256, seed=999)[0][: min(row.num_shared, row.length - 1)]
    return torch.cat([shared, own[len(shared) :]])


@cache
def reference_of(
    family: str,
    attention: str,
    seed: int,
    row: Row,
    sampling: str,
    max_new_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The row's text [L + max_new_tokens + BEYOND] at batch size 1, without EOS. In bfloat16 it is plain decoding's."""
    prompt, target = prompt_of(family, row)[None], target_of(family, attention, seed, dtype)
    options = {"max_new_tokens": max_new_tokens + BEYOND, "eos_token_id": None, "pad_token_id": PAD}
    options |= SAMPLING[sampling]
    if do_sample(sampling) or dtype != torch.float32:
        seed = [row.seed] if do_sample(sampling) else None
        return Decoder(target).generate(prompt, do_sample=do_sample(sampling), seed=seed, **options).sequences[0]
    model: PreTrainedModel = target.model
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, **options)[0]
