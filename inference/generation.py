"""generate() and stream(): one call of a fresh `Decoder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from inference.acceptance.rules import AcceptanceRule
from inference.decoder import Decoder
from inference.drafters.base import Drafter
from inference.loop import GenerationOutput
from inference.streaming.token_stream import TokenStream
from inference.targets.target import Target
from inference.trees.policy import TreePolicy


def generate(
    target: Target | nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tree: TreePolicy | str | Sequence[Sequence[int]] | None = None,
    seed: int | Sequence[int] | None = None,
    acceptance: AcceptanceRule | str = "exact",
    is_coupled: bool = True,
    compile: bool = False,  # noqa: A002
    **generate_kwargs: Any,
) -> GenerationOutput:
    """One call of a fresh `Decoder`; see there. `generate(target, None, ...)` is plain decoding on the same stack.

    >>> out = generate(target, heads, **tokenizer("Hi", return_tensors="pt"), max_new_tokens=64)   # doctest: +SKIP
    >>> out.sequences, out.stats.acceptance_length                                                 # doctest: +SKIP
    """
    decoder = Decoder(target, drafter, tree=tree, acceptance=acceptance, is_coupled=is_coupled, compile=compile)
    return decoder.generate(input_ids, attention_mask, seed=seed, **generate_kwargs)


def stream(
    target: Target | nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tree: TreePolicy | str | Sequence[Sequence[int]] | None = None,
    seed: int | Sequence[int] | None = None,
    acceptance: AcceptanceRule | str = "exact",
    is_coupled: bool = True,
    compile: bool = False,  # noqa: A002
    **generate_kwargs: Any,
) -> TokenStream:
    """`generate` of one row, step by step; see `Decoder.stream`.

    >>> for tokens in stream(target, heads, **tokenizer("Hi", return_tensors="pt"), max_new_tokens=64): # doctest: +SKIP
    ...     print(tokenizer.decode(tokens), end="")
    """
    decoder = Decoder(target, drafter, tree=tree, acceptance=acceptance, is_coupled=is_coupled, compile=compile)
    return decoder.stream(input_ids, attention_mask, seed=seed, **generate_kwargs)
