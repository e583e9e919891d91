"""The contenders of a benchmark: transformers' decoding and ours, with and without drafters, eager and compiled."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from draftsmith.heads.formats.transformers_dflash import MODEL_TYPE as DFLASH_ASSISTANT
from draftsmith.inference import Decoder, Drafter, Target
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.trees.options import TreeOption, resolve_policy
from draftsmith.scripts.measuring.measure import (
    COMPILED,
    PLAIN,
    TRANSFORMERS,
    WITHOUT_MODE,
    Batch,
    Contender,
    Prompt,
    Run,
    Settings,
)
from draftsmith.scripts.shared.clock import read_clock

NGRAMS = "n-gram drafter"
PROMPT_LOOKUP_TOKENS = 10  # as in transformers' documentation


class TransformersDecoding:
    """The target's own `generate`, with options such as transformers' own speculation."""

    def __init__(self, target: Target, **options: Any) -> None:
        self.target = target
        self.options = options

    @torch.no_grad()
    def __call__(self, batch: Batch, settings: Settings, *, max_new_tokens: int | None = None) -> Run:
        model, device = self.target.model, self.target.device
        torch.manual_seed(settings.seed + batch.prompts[0].index)
        with _count_forwards(model) as num_forwards:
            start = read_clock(device)
            sequences = model.generate(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                pad_token_id=_find_filler(self.target),
                **settings.generate_kwargs(max_new_tokens),
                **self.options,
            )
            seconds = read_clock(device) - start
        texts = _read_texts(sequences, batch, self.target)
        # transformers does not speculate in batches: a pass gives one token to every row that has not ended.
        return Run(texts, seconds, len(num_forwards) if len(texts) == 1 else sum(map(len, texts)))


def _read_texts(sequences: Tensor, batch: Batch, target: Target) -> list[list[int]]:
    """Each row's new tokens up to its EOS or stop string; the rest of `sequences` [B, L + new] is padding."""
    eos_ids, filler = _find_eos(target), _find_filler(target)
    texts: list[list[int]] = sequences[:, batch.input_ids.shape[1] :].tolist()
    for text in texts:
        del text[next((place for place, token in enumerate(text, 1) if token in eos_ids), len(text)) :]
        while target.model.generation_config.stop_strings and text[-1:] == [filler]:
            text.pop()
    return texts


def _find_eos(target: Target) -> set[int | None]:
    eos = target.model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [eos])


def _find_filler(target: Target) -> int:
    """The token after the end of rows that end before others: no EOS, so that the ends of stop strings are seen."""
    eos_ids = _find_eos(target)
    return next(token for token in itertools.count() if token not in eos_ids)


def compiled_options() -> dict[str, Any]:
    """Options with which transformers' `generate` compiles its forward, on a CPU too (where it does not by default)."""
    config = CompileConfig(mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


@contextmanager
def _count_forwards(model: Any) -> Iterator[list[None]]:
    """A list with one entry for each forward pass inside the block."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


class OurDecoding:
    """A `Decoder`, kept from prompt to prompt; `options` are further ones of it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        tree: TreeOption | None = None,
        is_compiled: bool | Decoder = False,
        **options: Any,
    ) -> None:
        self.decoder = Decoder(target, drafter, tree=tree, compile=is_compiled, batch_invariant=False, **options)

    def __call__(
        self,
        batch: Batch,
        settings: Settings,
        *,
        max_new_tokens: int | None = None,
        is_synchronised: bool = False,
    ) -> Run:
        device = self.decoder.target.device
        self.decoder.is_synchronised = is_synchronised
        seeds = None
        if settings.is_sampled:  # each row samples the text that it samples by itself
            seeds = [int(row_seeds(settings.seed + prompt.index, 1, "cpu")) for prompt in batch.prompts]
        start = read_clock(device)
        output = self.decoder.generate(
            batch.input_ids,
            batch.attention_mask,
            seed=seeds,
            pad_token_id=_find_filler(self.decoder.target),
            **settings.generate_kwargs(max_new_tokens),
        )
        seconds = read_clock(device) - start
        texts = _read_texts(output.sequences, batch, self.decoder.target)
        return Run(texts, seconds, output.stats.num_target_forwards, output.stats)


class AssistedDecoding(TransformersDecoding):
    """The target's own `generate` with a small model (arXiv 2211.17192) or DFlash heads (arXiv 2602.06036) that draft.

    Raises:
        ValueError: when the two cannot work together.
    """

    def __init__(self, target: Target, assistant: PreTrainedModel) -> None:
        is_dflash = assistant.config.model_type == DFLASH_ASSISTANT  # which has the target's vocabulary
        models = [target.model] if is_dflash else [target.model, assistant]
        sizes = [model.get_output_embeddings().weight.shape[0] for model in models]
        if sizes[0] != sizes[-1]:
            raise ValueError(
                f"the target has a vocabulary of {sizes[0]} tokens, the assistant one of {sizes[-1]}: give an "
                "assistant with the target's tokenizer"
            )
        how = {"speculation_type": "dflash"} if is_dflash else {}
        super().__init__(target, assistant_model=assistant, **how)
        prompt = Prompt("probe", 0, torch.zeros((1, 4), dtype=torch.long, device=target.device))
        try:
            self(Batch.of(prompt), Settings(), max_new_tokens=4)
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:  # as each family fails
            raise ValueError(f"transformers cannot decode with this assistant: {error}") from error


def make_contenders(
    target: Target,
    heads: Mapping[str, Drafter],
    trees: Sequence[str],
    settings: Settings,
    *,
    is_compiled: bool = False,
    acceptance: Sequence[str] = ("exact",),
    assistant: PreTrainedModel | None = None,
    without_mode: Target | None = None,
) -> list[Contender]:
    """The baselines, then every drafter with every tree; at temperature > 0 with every acceptance rule.

    If a tree is too deep for a drafter, or a rule refuses the tree, the contender gets a `problem`; there is no error.

    Args:
        is_compiled: heads run compiled; plain decoding and transformers' `generate` both ways.
        acceptance: names of rules. They make no difference in greedy decoding.
        assistant: a small causal LM or a DFlash assistant; adds transformers' assisted generation as a baseline.
        without_mode: the same target where `target` is in batch-invariant mode; adds our decodings with it.

    Raises:
        ValueError: for an unknown tree, and for two trees of the same name.
    """
    names = _name_trees(trees)
    rules = acceptance if settings.is_sampled else ("exact",)
    drafters = [(NGRAMS, NgramDrafter(), trees[:1]), *((name, drafter, trees) for name, drafter in heads.items())]
    graphs: bool | Decoder = is_compiled  # of the target: one compiled decoder makes them for all
    contenders: dict[str, list[Contender]] = {name: [] for name, _, _ in drafters}
    for name, drafter, own_trees in sorted(drafters, key=lambda one: -len(one[1].feature_layers)):
        mode = is_compiled and name in heads  # compiling does not help n-gram look-ups
        for tree, rule in itertools.product(own_trees, rules):
            ending = "" if rule == "exact" else f", {rule}"
            contender = Contender(_mark(name + ending, mode), names[tree], is_compiled=mode, is_exact=rule == "exact")
            try:
                contender.decode = OurDecoding(target, drafter, tree=tree, acceptance=rule, is_compiled=mode and graphs)
            except ValueError as error:
                contender.problem = str(error)
            else:
                graphs = contender.decode.decoder if mode and graphs is True else graphs
            contenders[name].append(contender)
    baselines = _make_baselines(target, graphs, assistant, settings.batch_size)
    found = [*baselines, *itertools.chain(*contenders.values())]
    if without_mode is not None:
        others = make_contenders(without_mode, heads, trees, settings, is_compiled=is_compiled, acceptance=acceptance)
        for other in others:
            if isinstance(other.decode, OurDecoding):
                found.append(replace(other, name=other.name + WITHOUT_MODE, is_exact=False))
    return found


def _name_trees(trees: Sequence[str]) -> dict[str, str]:
    """The name of each tree in reports."""
    for tree in trees:
        resolve_policy(tree, None)
    names = {tree: Path(tree).stem or tree for tree in trees}
    if len(set(names.values())) < len(trees):
        raise ValueError(
            f"--tree has the same tree twice, or two files with the same name: {', '.join(trees)}; leave one out or "
            "rename a file"
        )
    return names


def _make_baselines(
    target: Target, graphs: bool | Decoder, assistant: PreTrainedModel | None, batch_size: int
) -> list[Contender]:
    """The contenders without heads: transformers' decodings and plain decoding; with graphs also compiled."""
    modes = {False: {}, True: compiled_options()} if graphs else {False: {}}
    one_row = f"transformers speculates only for single rows, and the batch has {batch_size}" if batch_size > 1 else ""
    contenders = [
        Contender(_mark(TRANSFORMERS, mode), decode=TransformersDecoding(target, **options), is_compiled=mode)
        for mode, options in modes.items()
    ]
    contenders.append(
        Contender(
            "transformers prompt look-up",
            decode=TransformersDecoding(target, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
            problem=one_row,
        )
    )
    if assistant is not None:
        contender = Contender("transformers assisted", problem=one_row)
        try:
            contender.decode = AssistedDecoding(target, assistant)
        except ValueError as error:
            contender.problem = str(error)
        contenders.append(contender)
    return contenders + [
        Contender(_mark(PLAIN, mode), decode=OurDecoding(target, None, is_compiled=mode and graphs), is_compiled=mode)
        for mode in modes
    ]


def _mark(name: str, is_compiled: bool) -> str:
    return f"{name}{COMPILED}" if is_compiled else name
