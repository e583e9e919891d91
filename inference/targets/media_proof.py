"""Proof, once per target, that text after media goes on as in the model's own `generate`.

A family may count positions in another way, or give its media to later passes as well. So the first prompts with media
are also continued by the model itself for a few tokens, and the logits are compared.

Legend: B batch, L prompt length with padding, V target vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.cache.kv_cache import Span
from draftsmith.inference.targets.forward_names import CACHE_NAMES
from draftsmith.inference.targets.model_config import chooses_experts, is_quantised
from draftsmith.inference.targets.multimodal import Media, read_media
from draftsmith.inference.targets.refusals import is_single, refusing, relative_error
from draftsmith.inference.targets.target import Target

_NUM_TOKENS = 3


@torch.no_grad()
def prove_media(
    target: Target, input_ids: Tensor, media: Media, names: frozenset[str], model_kwargs: Mapping[str, Any]
) -> None:
    """Compares our continuation of prompts with the model's own, unless these arguments have passed before.

    Args:
        input_ids: [B, L] long, padded on the left.
        names, model_kwargs: as for `prepare_media`.

    Raises:
        ValueError: the logits differ by more than rounding.
    """
    if names in target.capabilities.proven_media:
        return
    causal_lm, batch_size = target.backbone.causal_lm, len(media.counts)
    name, shown = type(causal_lm).__name__, ", ".join(sorted(names))
    num_tokens = _NUM_TOKENS if target.max_length is None else min(_NUM_TOKENS, target.max_length - media.longest + 1)
    with refusing(f"{name} does not run with {shown}"):
        wanted = _continue_by_model(causal_lm, input_ids, num_tokens, model_kwargs)
    cache = target.new_cache(batch_size, media.longest + _NUM_TOKENS + target.min_pass_tokens)
    found = [read_media(target, cache, media).logits]
    new_ids = wanted.sequences[:, input_ids.shape[1] :]
    ones = torch.ones_like(media.counts)
    shortest = int(media.counts.min())
    for place, token_ids in enumerate(new_ids[:, :-1].unbind(1)):
        span = Span(shortest + place, media.longest + place)
        found.append(target.prefill(cache, token_ids[:, None], ones, span=span).logits)
    errors = [relative_error(ours[:, 0], own) for ours, own in zip(found, wanted.logits, strict=True)]
    allowed = 1e-3 if is_single(found[0], causal_lm) and not is_quantised(causal_lm) else 0.1
    # A choice of experts at a near-tie changes one step.
    later = min(errors[1:]) if chooses_experts(causal_lm) else max(errors[1:])
    if not (errors[0] <= allowed and later <= allowed):
        raise ValueError(
            f"{name} goes on in its own way after prompts with {shown}: the scores of its first tokens differ by "
            f"{', '.join(f'{error:.2g}' for error in errors)} of their size from a decoder's. Give prompts of text only"
        )
    if new_ids.shape[1] == _NUM_TOKENS:
        target.capabilities.proven_media.add(names)


def _continue_by_model(causal_lm: Any, input_ids: Tensor, num_tokens: int, model_kwargs: Mapping[str, Any]) -> Any:
    """The output of transformers' greedy `generate`, with logits."""
    left_out = (*CACHE_NAMES, "use_cache", "logits_to_keep")
    arguments = {name: value for name, value in model_kwargs.items() if name not in left_out}
    return causal_lm.generate(
        input_ids,
        **arguments,
        # They outrank the model's generation config.
        max_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        eos_token_id=None,
        stop_strings=None,
        cache_implementation=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
