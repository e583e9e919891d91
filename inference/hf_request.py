"""One call of transformers' `generate`, as the decode loop sees it: prompts in, tokens out, when to stop.

`make_request` goes through the model's own `generate(custom_generate=...)`, which merges generation configs, builds
logits processors and stopping criteria and expands `num_return_sequences`; what that hook drops is handled here. The
request is handed out before anything is decoded, so that the loop may run step by step.

Legend: B batch, L padded prompt length as given, T longest prompt without padding.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from inference.acceptance import NO_TOKEN
from inference.encoder_decoder import Source
from inference.row_processors import ask_criterion
from inference.target import Target

logger = logging.getLogger(__name__)

# Options transformers would accept silently and this loop cannot honour: name -> (values that are fine, what to do).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several texts a row; use num_beams=1, with do_sample=True for variety"),
    "num_beam_groups": ((None, 1), "use num_beams=1"),
    "penalty_alpha": ((None, 0.0), "contrastive search is another decoding method; leave it out"),
    "prompt_lookup_num_tokens": ((None,), "pass an inference.ngram.NgramDrafter as the drafter instead"),
    "assistant_early_exit": ((None,), "pass heads as the drafter instead"),
    "use_mtp": ((None, False), "pass heads as the drafter instead"),
    "dola_layers": ((None,), "DoLa compares layers, which is another decoding method; leave it out"),
    "force_words_ids": ((None,), "constraints need beam search; leave it out, or use a logits processor"),
    "constraints": ((None,), "constraints need beam search; leave it out, or use a logits processor"),
    "use_cache": ((None, True), "the loop needs its cache; leave it out"),
    "output_attentions": ((None, False), "a verify step has attention over a tree; leave it out"),
    "output_hidden_states": ((None, False), "hidden states are not collected; leave it out"),
}
_LEAVE_OUT = "leave it out"
_ONE_ADAPTER = (
    "every row has the model's active adapters; leave it out, call model.set_adapter(...), and decode the rows of each "
    "adapter in a call of their own"
)
# What transformers makes of these arguments of generate is read here; whatever else the model takes would be dropped.
_READ = {"use_cache", "attention_mask", "decoder_attention_mask", "decoder_input_ids", "encoder_outputs", "tokenizer"}
_REFUSED_ARGUMENTS = {
    "assistant_model": "pass an inference.small_model.SmallModelDrafter of it as the drafter instead",
    "past_key_values": _LEAVE_OUT,
    "inputs_embeds": _LEAVE_OUT,
    "position_ids": _LEAVE_OUT,
    "custom_generate": _LEAVE_OUT,
    "synced_gpus": _LEAVE_OUT,
    # PEFT reads these itself, and hooks them into its own generate alone.
    "adapter_names": _ONE_ADAPTER,
    "alora_offsets": _ONE_ADAPTER,
}


class Request:
    """The rows of one call and what was emitted so far. All of its state lives on the host.

    Attributes:
        prompt_ids: [B, T] int64, right-padded; prompt_counts: [B] int64 real tokens.
        last_prompt_ids: [B] the last real token of each prompt.
        prompts: the real tokens of each row.
        processors: transformers' logits processors, in order.
        max_length: tokens a row may reach at most, prompt without padding included.
        unfinished: rows still decoding.
        source: what an encoder-decoder target decodes about; then prompts are what its decoder begins with.
        given_ids: [B, L] the prompts as `sequences` begins with them, padded on whichever side.
        keeps_scores, keeps_logits: whether the caller asked for them (and for a dictionary to hold them).
    """

    source: Source | None = None

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: Sequence[Any],
        config: GenerationConfig,
        target: Target,
        streamer: Any,
    ) -> None:
        self.input_ids = self.given_ids = input_ids.to(target.device)
        mask = torch.ones_like(self.input_ids) if attention_mask is None else attention_mask.to(target.device)
        mask = (mask != 0).long()
        counts: list[int] = mask.sum(1).tolist()
        if min(counts) < 1:
            raise ValueError(
                f"row {counts.index(min(counts))} of the prompt is all padding: give each row at least 1 token"
            )
        self.prompt_counts = torch.tensor(counts, device=target.device)
        # A stable sort moves the real tokens to the front in their order, whichever side the padding is on.
        order = mask.argsort(dim=1, descending=True, stable=True)
        self.prompt_ids = (self.input_ids * mask).gather(1, order)[:, : max(counts)]
        self._left_padded = _pad_left(self.input_ids, mask)[0]
        self.last_prompt_ids = self.prompt_ids.gather(1, (self.prompt_counts - 1)[:, None])[:, 0]
        self.prompts: list[list[int]] = [
            row[:count] for row, count in zip(self.prompt_ids.tolist(), counts, strict=True)
        ]
        _check_token_ids(self.prompts, target.num_embeddings)
        keeps = bool(config.return_dict_in_generate)
        self.keeps_scores, self.keeps_logits = (
            keeps and bool(config.output_scores),
            keeps and bool(config.output_logits),
        )

        self.processors = processors
        self.do_sample = bool(config.do_sample)
        self.streamer = streamer
        self.eos_token_ids: set[int] = set()
        self.criteria: list[Any] = []
        limit: int | None = None  # on input_ids, padding included, as transformers counts
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                limit = criterion.max_length if limit is None else min(limit, criterion.max_length)
            else:
                self.criteria.append(criterion)
        if limit is None:
            raise ValueError("there is no length limit: pass max_new_tokens or max_length")
        self.pad_token_id = _pad_token_id(config)
        self._prompt_lengths = counts
        self._new: list[list[int]] = [[] for _ in counts]
        self.unfinished = set(range(len(counts)))
        self.budgets = [limit - self.input_ids.shape[1]] * len(counts)
        self._is_cut = [False] * len(counts)
        if target.max_length is not None:
            self._cut_budgets(target.max_length, target.length_limit_reason)
        # A limit that the prompt has passed still gives one token, as transformers does.
        self.max_length = max(count + max(budget, 1) for count, budget in zip(counts, self.budgets, strict=True))

    def _cut_budgets(self, max_length: int, reason: str) -> None:
        longest = max(self._prompt_lengths)
        if longest >= max_length:
            raise ValueError(
                f"the prompt has {longest} tokens; this target takes fewer than {max_length} ({reason}): shorten it"
            )
        cut = [min(b, max_length - n) for b, n in zip(self.budgets, self._prompt_lengths, strict=True)]
        if cut != self.budgets:
            logger.warning(
                "generation will stop at the target's limit of %d tokens (%s), before max_new_tokens",
                max_length,
                reason,
            )
        self._is_cut = [after < before for after, before in zip(cut, self.budgets, strict=True)]
        self.budgets = cut

    @property
    def batch_size(self) -> int:
        return len(self._new)

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self._new))

    @property
    def stopped_at_position_limit(self) -> list[bool]:
        """Of each row, whether it took all positions the target has, before its length limit and without an EOS."""
        return [
            is_cut and budget <= 0 and new[-1] not in self.eos_token_ids
            for is_cut, budget, new in zip(self._is_cut, self.budgets, self._new, strict=True)
        ]

    def num_committed(self, row: int) -> int:
        """A row's tokens in the cache: all but the newest, which is the next tree's root."""
        return self._prompt_lengths[row] + len(self._new[row]) - 1

    def text(self, row: int) -> list[int]:
        """The row so far, prompt without padding included."""
        return self.prompts[row] + self._new[row]

    def prefixes(self, rows: Sequence[int]) -> list[Tensor]:
        """These rows as transformers shows them to a processor: the prompt with its padding, in front on whichever side
        it was given, then the new tokens; each [1, L + new]."""
        return [self._shown(row) for row in rows]

    def _shown(self, row: int) -> Tensor:
        new = torch.tensor(self._new[row], dtype=torch.long, device=self.input_ids.device)
        return torch.cat([self._left_padded[row], new])[None]

    def open_budgets(self, rows: Sequence[int]) -> list[int]:
        """How many tokens each of these rows may still emit."""
        return [self.budgets[row] if row in self.unfinished else 0 for row in rows]

    def emit(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Takes what each of these rows emitted, cuts it where the row ends, and returns what was kept. Finished rows
        emit nothing.

        Raises:
            ValueError: when a row cannot go on, and has not ended before.
        """
        kept: list[list[int]] = [[] for _ in rows]
        for place, row in enumerate(rows):
            for token in tokens[place]:
                if token == NO_TOKEN:
                    self._raise_no_token(row)
                self._new[row].append(token)
                kept[place].append(token)
                self.budgets[row] -= 1
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token]))
                if token in self.eos_token_ids or self.budgets[row] <= 0 or self._meets_criteria(row):
                    self.unfinished.remove(row)
                    break
        if self.is_finished and self.streamer is not None:
            self.streamer.end()
        return kept

    def _raise_no_token(self, row: int) -> None:
        raise ValueError(
            f"no token can follow the {len(self.text(row))} tokens of row {row}: the target's logits are NaN there "
            "(hidden states of a token drafted in the same pass can be why), or logits processors forbid every token. "
            "Look at target(**inputs).logits (half-precision weights that overflow give NaN), and at the processors, "
            "with their bad words, prefixes or grammar"
        )

    def _meets_criteria(self, row: int) -> bool:
        if not self.criteria:
            return False
        text = self._shown(row)
        answers = [ask_criterion(criterion, text, row, self.batch_size) for criterion in self.criteria]
        return any(answers)  # all are asked: they may count

    def sequences(self) -> Tensor:
        """[B, L + longest continuation], padded on the right."""
        longest = max(map(len, self._new))
        rows = [new + [self.pad_token_id] * (longest - len(new)) for new in self._new]
        new_ids = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        return torch.cat([self.given_ids, new_ids], dim=1)


def _pad_token_id(config: GenerationConfig) -> int:
    pad = config.pad_token_id
    if pad is None:
        eos = config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
    return int(pad) if pad is not None else 0


def _pad_left(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's tokens in their order behind all of its padding, and the mask [B, L] of 0 and 1 of that."""
    mask = (attention_mask != 0).long()
    order = mask.argsort(dim=1, stable=True)
    return input_ids.gather(1, order), mask.gather(1, order)


def check_prompt(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Refuses what is no prompt at all (ValueError)."""
    shape = tuple(input_ids.shape)
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty (shape {shape}): give each row at least one token")
    if len(shape) != 2:
        raise ValueError(f"input_ids has shape {shape}; expected [batch, length]: a single row is input_ids[None]")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids is of dtype {input_ids.dtype}; token ids are int64: take the tokenizer's")
    if attention_mask is not None and tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and input_ids {shape}: give one entry for each "
            "id, 1 for a token and 0 for padding"
        )


def _check_token_ids(prompts: Sequence[Sequence[int]], num_embeddings: int) -> None:
    for row, prompt in enumerate(prompts):
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < num_embeddings:
                raise ValueError(
                    f"token {prompt.index(token)} of row {row} is {token}; this target has the ids 0 to "
                    f"{num_embeddings - 1}: was the prompt written with another tokenizer, or is padding not masked?"
                )


def _are_tokens(ids: Tensor, num_embeddings: int) -> Tensor:
    return (ids >= 0) & (ids < num_embeddings)


def _check_source(model: Any, source_ids: Tensor, attention_mask: Tensor | None) -> None:
    """What the encoder reads: it looks padding up as well."""
    embeddings = model.get_encoder().get_input_embeddings()
    num_embeddings = embeddings.weight.shape[0]
    wrong = (~_are_tokens(source_ids, num_embeddings)).nonzero().tolist()
    if wrong:
        row, place = wrong[0]
        raise ValueError(
            f"token {place} of row {row} of the source is {int(source_ids[row, place])}; this target's encoder has the "
            f"ids 0 to {num_embeddings - 1}, for padding too: was the source written with another tokenizer?"
        )
    if attention_mask is not None and not (attention_mask != 0).any(dim=1).all():
        row = int((attention_mask != 0).any(dim=1).int().argmin())
        raise ValueError(f"row {row} of the source is all padding: give each row at least 1 token")


def make_request(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    generate_kwargs: dict[str, Any],
) -> Request:
    """Calls `model.generate`, whose decoding method is here one that decodes nothing.

    Raises:
        ValueError: for options that transformers or PEFT would take and this loop cannot honour; for what a target does
            not decode with (`Target.check_again`).
    """
    target.check_again()
    # Arguments that another release of PEFT reads itself would not arrive either.
    read_by_peft = dict.fromkeys(getattr(target.model, "special_peft_forward_args", ()), _ONE_ADAPTER)
    for name, cure in (read_by_peft | _REFUSED_ARGUMENTS).items():
        if generate_kwargs.get(name) is not None:
            raise ValueError(f"{name} is not supported by this decode loop: {cure}")
    if generate_kwargs.get("cache_implementation") == "paged":
        raise ValueError("cache_implementation='paged' is not supported by this decode loop: leave it out")
    check_prompt(input_ids, attention_mask)
    model, given_ids, is_moved = cast(Any, target.model), input_ids, False
    if target.is_encoder_decoder:
        _check_source(model, input_ids, attention_mask)
    elif attention_mask is not None:
        # On the left, where transformers' processors tell it from tokens. They look it up, so it may not be anything.
        input_ids, attention_mask = _pad_left(input_ids.to(target.device), attention_mask.to(target.device))
        input_ids = input_ids.where((attention_mask != 0) | _are_tokens(input_ids, target.num_embeddings), 0)
        is_moved = not torch.equal(input_ids, given_ids.to(target.device))
    kwargs = dict(generate_kwargs)
    criteria = list(kwargs.pop("stopping_criteria", None) or [])
    # transformers drops the tokenizer on its way to a custom_generate: what needs it is done here, and switched off
    # there.
    stop_strings = _take_option("stop_strings", stop_strings, kwargs, model)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} needs the tokenizer: pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    is_healed = _take_option("token_healing", kwargs.pop("token_healing", None), kwargs, model)
    if is_healed and target.is_encoder_decoder:
        raise ValueError(f"token_healing is for prompts, and {type(model).__name__} reads a source: leave it out")
    if is_healed and tokenizer is None:
        raise ValueError("token_healing needs the tokenizer: pass tokenizer=...")

    def custom_generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Request:
        for name, (fine, cure) in _REFUSED.items():
            if (value := getattr(generation_config, name, None)) not in fine:
                raise ValueError(f"{name}={value!r} is not supported by this decode loop: {cure}")
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer takes a batch of 1, got {input_ids.shape[0]} rows: stream them one by one")
        dropped = sorted((model_kwargs.keys() & generate_kwargs.keys()) - _READ)
        if dropped:
            raise ValueError(f"{', '.join(dropped)}: this decode loop hands the model token ids alone; leave it out")
        mask, source = model_kwargs.get("attention_mask"), None
        if target.is_encoder_decoder:  # the mask is the source's, and the ids are the decoder's
            source = Source.of_call(given_ids, mask, model_kwargs["encoder_outputs"].last_hidden_state)
            mask = model_kwargs.get("decoder_attention_mask")
        if is_healed:
            input_ids = _heal_tokens(model, input_ids, mask, tokenizer)
        request = Request(input_ids, mask, logits_processor, stopping_criteria, generation_config, target, streamer)
        request.source = source
        if is_moved and not is_healed:
            request.given_ids = given_ids.repeat_interleave(len(input_ids) // len(given_ids), dim=0).to(target.device)
        return request

    request = model.generate(
        inputs=input_ids,  # by name: PEFT's generate for encoder-decoder models takes nothing else
        attention_mask=attention_mask,
        stopping_criteria=StoppingCriteriaList(criteria),
        custom_generate=custom_generate,
        **kwargs,
    )
    return cast(Request, request)


def _take_option(name: str, value: Any, kwargs: dict[str, Any], model: Any) -> Any:
    """The value of an option of generation: the argument, or the call's config's, or the model's. Switches it off in
    `kwargs`: in a copy of the call's config, and as an argument where transformers would fill it in again."""
    given = kwargs.get("generation_config")
    for config in (given, model.generation_config):
        value = getattr(config, name, None) if value is None else value
    if getattr(given, name, None) not in (None, False):
        kwargs["generation_config"] = copy.deepcopy(given)
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) not in (None, False):
        kwargs[name] = None  # an argument outranks both
    return value


def _heal_tokens(model: Any, input_ids: Tensor, mask: Tensor | None, tokenizer: Any) -> Tensor:
    if tokenizer.padding_side != "left" and mask is not None and not mask.all():
        raise ValueError("token_healing reads each row's last token: set tokenizer.padding_side = 'left'")
    healed = cast(Tensor, model.heal_tokens(input_ids, tokenizer))
    if healed.shape != input_ids.shape:
        raise ValueError(
            f"token_healing tokenizes prompts anew, and made shape {tuple(healed.shape)} of {tuple(input_ids.shape)}: "
            "pass ids as the tokenizer gives them, of texts without spaces around them"
        )
    return healed
