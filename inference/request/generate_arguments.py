"""One call of transformers' `generate`, as the decode loop sees it.

`make_request` goes through the model's own `generate(custom_generate=...)`. This hook merges generation configs, builds
logits processors and stopping criteria, and expands `num_return_sequences`. This file handles the arguments that the
hook drops. The request is returned before decoding begins, so that the loop can run step by step.
"""

import copy
from collections.abc import Collection, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from draftsmith.inference.cache.source import Source
from draftsmith.inference.request.prompt_checks import check_prompt, check_source, pad_left
from draftsmith.inference.request.request import Request
from draftsmith.inference.targets.forward_names import CACHE_NAMES, read_cache
from draftsmith.inference.targets.media_proof import prove_media
from draftsmith.inference.targets.multimodal import media_names, prepare_media
from draftsmith.inference.targets.target import Target

# Options that transformers accepts silently and this loop cannot honour: name -> (allowed values, cure).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several texts a row; use num_beams=1, with do_sample=True for variety"),
    "num_beam_groups": ((None, 1), "use num_beams=1"),
    "penalty_alpha": ((None, 0.0), "contrastive search is another decoding method; leave it out"),
    "prompt_lookup_num_tokens": ((None,), "pass a draftsmith.NgramDrafter as the drafter instead"),
    "assistant_early_exit": ((None,), "pass heads as the drafter instead"),
    "use_mtp": ((None, False), "pass heads as the drafter instead"),
    "speculation_type": ((None,), "pass heads as the drafter instead"),
    "dola_layers": ((None,), "DoLa compares layers, which is another decoding method; leave it out"),
    "force_words_ids": ((None,), "constraints need beam search; leave it out, or use a logits processor"),
    "constraints": ((None,), "constraints need beam search; leave it out, or use a logits processor"),
    "use_cache": ((None, True), "the loop needs its cache; leave it out"),
    "output_attentions": ((None, False), "a verify step has attention over a tree; leave it out"),
    "output_hidden_states": ((None, False), "hidden states are not collected; leave it out"),
}
_ONE_ADAPTER = (
    "every row has the model's active adapters; leave it out, call model.set_adapter(...), and decode the rows of each "
    "adapter in a call of their own"
)
# Arguments of generate that arrive here; any other argument of the model's forward would be dropped.
_READ = {"use_cache", "attention_mask", "decoder_attention_mask", "decoder_input_ids", "encoder_outputs", "tokenizer"}
_REFUSED_ARGUMENTS = {
    "assistant_model": "pass a draftsmith.SmallModelDrafter of it as the drafter instead",
    **dict.fromkeys((*CACHE_NAMES, "inputs_embeds", "position_ids", "custom_generate", "synced_gpus"), "leave it out"),
}


def make_request(
    target: Target,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    *,
    inputs: Tensor | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    **generate_kwargs: Any,
) -> Request:
    """Calls `model.generate` with a decoding method that decodes nothing and returns the request.

    Raises:
        TypeError: ids or a mask that are no tensors, and other arguments of a wrong type.
        ValueError: for options that transformers or PEFT would accept and this loop cannot honour, and for everything
            that `Target.check_again` refuses.
    """
    target.check_again()
    _refuse_arguments(target.model, generate_kwargs)
    input_ids = _choose_prompt(input_ids, inputs, attention_mask)
    given = {name for name, value in generate_kwargs.items() if value is not None}
    media = sorted(media_names(target) & given)
    model, given_ids = cast(Any, target.model), input_ids.to(target.device)
    if target.is_encoder_decoder:
        check_source(model, input_ids, attention_mask)
    elif attention_mask is not None:
        input_ids, attention_mask = _move_padding(target, given_ids, attention_mask.to(target.device), media)
    kwargs = {name: value for name, value in generate_kwargs.items() if name not in _REFUSED_ARGUMENTS}
    kwargs |= {name: kwargs[name].to(target.device) for name in media if isinstance(kwargs[name], Tensor)}
    own = _take_stop_strings(model, tokenizer, stop_strings, kwargs)
    criteria = StoppingCriteriaList([*own, *(kwargs.pop("stopping_criteria", None) or ())])

    def custom_generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Request:
        _refuse_options(generation_config, (model_kwargs.keys() & given) - {*media})
        mask = model_kwargs.get("decoder_attention_mask" if target.is_encoder_decoder else "attention_mask")
        source = _encoded_source(target, given_ids, model_kwargs) if target.is_encoder_decoder else None
        request = Request(
            input_ids, mask, logits_processor, stopping_criteria, generation_config, target, streamer, source
        )
        if not target.is_encoder_decoder:  # padding where the caller had it
            request.given_ids = given_ids.repeat_interleave(len(input_ids) // len(given_ids), dim=0)
            _take_media(request, target, input_ids, {*media}, model_kwargs)
        return request

    request = model.generate(
        inputs=input_ids,  # by name: PEFT's generate for encoder-decoder models takes no positional argument
        attention_mask=attention_mask,
        stopping_criteria=criteria,
        custom_generate=custom_generate,
        **kwargs,
    )
    return cast(Request, request)


def _choose_prompt(input_ids: Tensor | None, inputs: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """The prompts, by either of transformers' names."""
    if input_ids is not None and inputs is not None:
        raise ValueError("got input_ids and inputs, two names of the prompts: give one of them")
    prompts = cast(Tensor, inputs if input_ids is None else input_ids)
    check_prompt(prompts, attention_mask)
    return prompts


def _take_media(
    request: Request, target: Target, input_ids: Tensor, names: Set[str], model_kwargs: dict[str, Any]
) -> None:
    """Gives a request the media among the arguments of its call, after the proof that the target reads them exactly."""
    request.media = prepare_media(target, input_ids, [*map(len, request.prompts)], names, model_kwargs)
    if request.media is not None:
        if (mask := model_kwargs.get("attention_mask")) is not None:
            _check_padding(mask, names)
        prove_media(target, input_ids, request.media, frozenset(names), model_kwargs)


def _move_padding(
    target: Target, input_ids: Tensor, attention_mask: Tensor, media: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Ids and mask with padding on the left, where transformers' processors expect it. They look padding up, so it gets
    valid ids. Other arguments with an entry per token are not moved."""
    _check_padding(attention_mask, media)
    padded_ids, mask = pad_left(input_ids, attention_mask)
    is_token = (padded_ids >= 0) & (padded_ids < target.num_embeddings)
    return padded_ids.where((mask != 0) | is_token, 0), mask


def _check_padding(attention_mask: Tensor, media: Collection[str]) -> None:
    if media and not torch.equal(pad_left(attention_mask, attention_mask)[1], (attention_mask != 0).long()):
        raise ValueError(f"give prompts with {', '.join(sorted(media))} padding on the left (padding_side='left')")


def _encoded_source(target: Target, given_ids: Tensor, model_kwargs: dict[str, Any]) -> Source:
    """The source that transformers has encoded; the `num_return_sequences` rows of a source stand together."""
    states, mask = model_kwargs["encoder_outputs"].last_hidden_state, model_kwargs.get("attention_mask")
    source_ids = given_ids.repeat_interleave(len(states) // len(given_ids), dim=0)
    is_real = torch.ones_like(source_ids) if mask is None else mask.to(target.device)
    return Source(source_ids, is_real.bool(), states.to(target.device))


# What transformers prepares for a decoding method, and this loop prepares anew.
_PREPARED = {"position_ids", "logits_to_keep", "cache_position", *CACHE_NAMES}


def request_of_hook(
    target: Target,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: Sequence[Any],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any = None,
) -> Request:
    """The request of transformers' `generate`, from what it hands to its `custom_generate`."""
    target.check_again()
    name = type(target.model).__name__
    if target.is_encoder_decoder:
        raise ValueError(f"custom_generate does not give the sources that {name} reads: call draftsmith.generate")
    media = media_names(target) & {name for name, value in model_kwargs.items() if value is not None}
    _refuse_options(config, model_kwargs.keys() - _PREPARED - media)
    mask = model_kwargs.get("attention_mask")
    check_prompt(input_ids, mask)
    if mask is not None:
        _check_padding(mask, media)
    cache = read_cache(model_kwargs)
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("the cache holds tokens already, and this decode loop has its own: leave it out")
    real = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    positions = model_kwargs.get("position_ids")
    if positions is not None and not media and not (positions * real == (real.cumsum(1) - 1) * real).all():
        raise ValueError("position_ids is not supported by this decode loop: leave it out")
    request = Request(input_ids, mask, processors, criteria, config, target, streamer)
    _take_media(request, target, input_ids, media, model_kwargs)
    return request


def _take_stop_strings(model: Any, tokenizer: Any, stop_strings: Any, kwargs: dict[str, Any]) -> list[Any]:
    """A stopping criterion for the stop strings of the call, or else of its config, or else of the model's config; none
    for an empty list.

    The hook drops the tokenizer, so transformers must not see the stop strings.
    """
    given = kwargs.get("generation_config")
    for config in (given, model.generation_config):
        stop_strings = getattr(config, "stop_strings", None) if stop_strings is None else stop_strings
    if stop_strings and not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"stop_strings={stop_strings!r} needs the tokenizer, and tokenizer is {tokenizer!r}: pass what "
            "AutoTokenizer.from_pretrained returns, or stop_strings=[] for none"
        )
    if getattr(given, "stop_strings", None) is not None:
        kwargs["generation_config"] = copy.deepcopy(given)
        kwargs["generation_config"].stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # an argument outranks both configs
    return [StopStringCriteria(tokenizer, stop_strings)] if stop_strings else []


def _refuse_arguments(model: Any, generate_kwargs: dict[str, Any]) -> None:
    """Refuses arguments of generate that would be ignored (ValueError), or are of another type (TypeError)."""
    # PEFT reads these only in its own generate.
    read_by_peft = dict.fromkeys(getattr(model, "special_peft_forward_args", ()), _ONE_ADAPTER)
    for name, cure in (read_by_peft | _REFUSED_ARGUMENTS).items():
        value = generate_kwargs.get(name)
        if value is not None and (name, value) != ("synced_gpus", False):
            raise ValueError(f"{name} is not supported by this decode loop: {cure}")
    if generate_kwargs.get("cache_implementation") == "paged":
        raise ValueError("cache_implementation='paged' is not supported by this decode loop: leave it out")
    for name in ("logits_processor", "stopping_criteria"):
        value = generate_kwargs.get(name) or []
        if not (isinstance(value, list | tuple) and all(map(callable, value))):
            raise TypeError(f"{name} is {value!r}; a list of functions is expected, as in transformers: [function]")
    configs = generate_kwargs.get("generation_config"), model.generation_config
    if not isinstance(configs[0], GenerationConfig | None):
        raise TypeError(f"generation_config is {configs[0]!r}; GenerationConfig(option=value, ...) is expected")
    if generate_kwargs.get("token_healing", any(getattr(config, "token_healing", False) for config in configs)):
        raise ValueError(
            "token_healing is not supported by this decode loop: leave it out, and give "
            "model.heal_tokens(input_ids, tokenizer) as the prompt; token_healing=False switches the model's own off"
        )


def _refuse_options(config: GenerationConfig, forward_names: Set[str]) -> None:
    """Refuses options of the config, and the call's arguments that transformers hands on to the model's forward."""
    for name, (fine, cure) in _REFUSED.items():
        if (value := getattr(config, name, None)) not in fine:
            raise ValueError(f"{name}={value!r} is not supported by this decode loop: {cure}")
    if dropped := sorted(forward_names - _READ):
        raise ValueError(f"{', '.join(dropped)}: this decode loop gives this model only token ids; leave it out")
