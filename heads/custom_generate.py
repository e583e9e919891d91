"""Heads as a repository with a `custom_generate` folder, which transformers' `generate` runs.

    model.generate(**inputs, custom_generate="ORG/REPO", trust_remote_code=True, max_new_tokens=64)

The folder has the code; the heads lie beside it and are the default. `heads=` names others. Without a repository and
without trust there is `draftsmith.CustomGenerate`.
"""

import inspect
import os
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from draftsmith.heads.base import DraftHeads
from draftsmith.inference.custom_generate import as_transformers_returns
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.drafters.base import Drafter
from draftsmith.inference.generation import take_decoder_options

_KEPT = "_draftsmith_heads"  # attribute of a model: its heads, by their folder or hub id

# What transformers' generate hands on as None where nobody gave it. A setting that is given as None is switched off.
_NAMED = inspect.signature(GenerationMixin.generate).parameters

_CURE = "Name the heads: model.generate(..., heads=PATH_OR_HUB_ID)"


def generate_with_heads(
    model: PreTrainedModel,
    *,
    default_heads: str | None,
    heads: Drafter | str | os.PathLike[str] | None = None,
    inputs: Any = None,
    input_ids: Any = None,
    **arguments: Any,
) -> Any:
    """What the code in a `custom_generate` folder calls, with all arguments of `model.generate`.

    Args:
        default_heads: the hub id of the heads beside that code; None = they are not on the hub.
        heads: heads, another drafter, or a folder or hub id of heads, in any format that is read.
        inputs, input_ids: the prompts, under either name.
        **arguments: of `model.generate`, of `draftsmith.Decoder` (tree, acceptance, ...) and `seed`.

    Returns:
        what `model.generate` returns.
    """
    given = {name: value for name, value in arguments.items() if value is not None or name not in _NAMED}
    prompts = inputs if input_ids is None else input_ids
    if "custom_generate" in given:  # the model's generate was replaced by this one, and the decoder calls it
        stock: Any = type(model)
        return stock.generate(model, inputs=prompts, **given)
    if (chosen := heads or default_heads) is None:
        raise ValueError(f"these heads were not written for the hub. {_CURE}")
    drafter = chosen if isinstance(chosen, Drafter) else load_heads(os.fspath(chosen), model)
    if prompts is None:
        raise ValueError("there is no prompt: give input_ids (model.generate(**inputs, ...))")
    options = take_decoder_options(given)
    if "stop_strings" in given:
        given["stop_strings"] = given["stop_strings"] or []  # the decoder's None is the model's
    output = Decoder(model, drafter, **options).generate(prompts, given.pop("attention_mask", None), **given)
    own = model.generation_config
    found = [config.return_dict_in_generate for config in (given.get("generation_config", own), own)]
    is_dict = given.get("return_dict_in_generate", next((value for value in found if value is not None), False))
    return as_transformers_returns(output, is_dict=bool(is_dict))


def load_heads(path: str, model: PreTrainedModel) -> DraftHeads:
    """Heads for a model, which keeps them for later calls."""
    kept: dict[str, DraftHeads] = vars(model).setdefault(_KEPT, {})
    if path not in kept:
        try:
            kept[path] = DraftHeads.from_pretrained(path, target=model)
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}. {_CURE}") from error
    return kept[path]
