"""generate() and stream(): one call of a fresh `Decoder`."""

import inspect
from typing import Any

from torch import Tensor, nn

from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.engine import GenerationOutput
from draftsmith.inference.streaming.token_stream import TokenStream
from draftsmith.inference.targets.target import Target


def generate(
    target: Target | nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> GenerationOutput:
    """Decodes with a target and a drafter. `generate(target, None, ...)` is plain decoding on the same stack.

    Examples:
        >>> out = generate(target, heads, **inputs, max_new_tokens=64)  # doctest: +SKIP
        >>> out.sequences, out.stats.acceptance_length  # doctest: +SKIP

    Args:
        target: a model of transformers, or a `Target`.
        drafter: trained heads, another `Drafter`, or None.
        input_ids: [B, L] int64.
        attention_mask: [B, L], 0 on padding.
        **options: the options of `Decoder` (tree, acceptance, is_coupled, compile, ...) and of `Decoder.generate`
            (seed, max_new_tokens, do_sample, temperature, ...), where they are described.
    """
    decoder = Decoder(target, drafter, **take_decoder_options(options))
    return decoder.generate(input_ids, attention_mask, **options)


def stream(
    target: Target | nn.Module,
    drafter: Drafter | None,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> TokenStream:
    """`generate` of one row, step by step; see `Decoder.stream`. Arguments as for `generate`.

    Examples:
        >>> for tokens in stream(target, heads, **inputs, max_new_tokens=64):  # doctest: +SKIP
        ...     print(tokenizer.decode(tokens), end="")
    """
    decoder = Decoder(target, drafter, **take_decoder_options(options))
    return decoder.stream(input_ids, attention_mask, **options)


def take_decoder_options(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the keyword options of `Decoder` out of `options`, and returns them."""
    names = inspect.signature(Decoder).parameters.keys() - {"target", "drafter"}
    return {name: options.pop(name) for name in names & options.keys()}
