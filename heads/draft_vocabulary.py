"""A draft vocabulary for heads of any kind, without training: FR-Spec (arXiv 2502.14856).

The LM head takes a large part of a draft's time, and most of its rows belong to tokens that texts seldom have. So heads
that are trained may score only the tokens that their training data have most often. The target still verifies with all
tokens, so the text stays the same.

How often the data have each token stands beside the weights of trained heads, in `token_counts.safetensors`.

Legend: V target vocabulary, C tokens that the heads score, D hidden size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from draftsmith.heads.modules.vocabulary import most_frequent_tokens
from draftsmith.inference.targets.target import Target

COUNTS_FILE = "token_counts.safetensors"
_KEY = "token_counts"
# 32,000 as in EAGLE-3's heads for Llama 3; for small targets less.
DRAFT_VOCABULARIES = (32_000, 8_192)
# Above, training spends most of its memory on scores.
MOST_TOKENS = 65_536
# The LM head runs at every level of a draft, so it may have this share of the target's weights.
LM_HEAD_SHARE = 0.08


def default_draft_vocabulary(vocab_size: int, hidden_size: int, layers_size: int) -> int | None:
    """How many tokens heads score where nobody says it: all (None), or the first of `DRAFT_VOCABULARIES` whose LM head
    is small beside the target.

    Args:
        layers_size: parameters of the target's layers.

    >>> default_draft_vocabulary(49_152, 576, 106_000_000)  # SmolLM2-135M, whose LM head is 21% of a pass
    8192
    >>> default_draft_vocabulary(128_256, 4096, 7_000_000_000)  # Llama-3.1-8B
    32000
    >>> default_draft_vocabulary(32_000, 4096, 6_500_000_000)  # Llama-2-7B
    """
    whole = layers_size + vocab_size * hidden_size
    sizes = [size for size in (vocab_size, *DRAFT_VOCABULARIES) if size <= min(vocab_size, MOST_TOKENS)]
    size = next((size for size in sizes if size * hidden_size <= LM_HEAD_SHARE * whole), sizes[-1])
    return None if size == vocab_size else size


def write_counts(folder: Path, token_counts: Tensor) -> None:
    save_file({_KEY: token_counts.cpu().contiguous()}, folder / COUNTS_FILE)


def read_counts(path: str, **hub: Any) -> Tensor | None:
    """[V] int64, the counts beside heads in a folder or hub repository; None = there are none."""
    if os.path.isfile(path):  # a GGUF file
        return None
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, COUNTS_FILE, **hub, **optional)
    return None if file is None else load_file(file)[_KEY]


def choose_columns(size: int, token_counts: Tensor | None, vocab_size: int, own_ids: Tensor | None) -> Tensor | None:
    """The columns [size] int64 of a draft's scores that stay, in ascending order; None = all of them.

    Args:
        token_counts: [V].
        vocab_size: V.
        own_ids: the token id of each column; None = column number and token id are the same.
    """
    num_columns = vocab_size if own_ids is None else own_ids.numel()
    if not 0 < size <= num_columns:
        raise ValueError(
            f"draft_vocab_size is {size}; allowed is 1 to {num_columns}, the tokens that these heads score without it"
        )
    if size == num_columns:
        return None
    if token_counts is None:
        raise ValueError(
            f"got draft_vocab_size {size}, and there are no counts of tokens ({COUNTS_FILE}) beside these heads, from "
            "which to choose the most frequent ones: give conversations such as those that the heads were trained on "
            "(--draft_vocab_data FILE of a program, or token_counts in Python), or leave draft_vocab_size out"
        )
    if token_counts.shape != (vocab_size,):
        raise ValueError(
            f"token_counts has the shape {list(token_counts.shape)}; allowed is [{vocab_size}], a count for each token "
            "of the target: count with the target's tokenizer"
        )
    return most_frequent_tokens(token_counts.cpu() if own_ids is None else token_counts.cpu()[own_ids.cpu()], size)


@torch.no_grad()
def take_lm_head_rows(target: Target, token_ids: Tensor) -> nn.Linear:
    """An LM head that scores these tokens [C] as the target's own does, for `Target.compute_logits`."""
    weight = target.lm_head_weight()[token_ids]
    bias: Tensor = target.lm_head(weight.new_zeros(1, weight.shape[1]))[0].to(weight.device)[token_ids]
    linear = nn.Linear(weight.shape[1], len(weight), bias=bool(bias.any()), device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
