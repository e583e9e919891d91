"""The contenders of a benchmark: transformers' decoding and ours, with and without drafters, eager and compiled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from draftsmith.inference import Decoder, DistributedDecoder, Drafter, DraftLogits, Target
from draftsmith.inference.distributed.coordinator import Link
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.trees.options import TreeOption, resolve_policy
from draftsmith.scripts.measuring.measure import PLAIN, TRANSFORMERS, Batch, Contender, Prompt, Run, Settings
from draftsmith.scripts.measuring.roofline import Work, count_round
from draftsmith.scripts.shared.clock import read_clock
from draftsmith.scripts.shared.model_loading import fit_tree

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


class TimedDrafter(Drafter):
    """A drafter that notes its own time, so that drafting and growing the tree are timed apart.

    Attributes:
        extends: seconds of each `extend` since the last `reset`; those of the prompts come first.
        expand_seconds: of all calls of `expand`.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.drafter = self.__wrapped__ = drafter  # costs are kept for the wrapped drafter
        self.device = device
        self.feature_layers = drafter.feature_layers
        self.max_depth = drafter.max_depth
        self.drafts_chains_only = drafter.drafts_chains_only
        self.shares_target_cache = drafter.shares_target_cache
        self.can_copy_rows = drafter.can_copy_rows
        self.reads_first_token = drafter.reads_first_token
        self.reset(is_synchronised=False)

    def reset(self, *, is_synchronised: bool) -> None:
        self.extends: list[float] = []
        self.expand_seconds = 0.0
        self.is_synchronised = is_synchronised

    def sum_up(self, num_steps: int) -> float:
        """Seconds inside the drafter during steps, each of which calls `extend` once. Reading the prompts does not
        count."""
        return self.expand_seconds + sum(self.extends[max(0, len(self.extends) - num_steps) :])

    def start(self, batch_size: int, max_length: int, num_scratch: int) -> Any:
        return self.drafter.start(batch_size, max_length, num_scratch)

    def read_first(self, state: Any, token_ids: Tensor) -> None:
        self.drafter.read_first(state, token_ids)

    def read_source(self, state: Any, token_ids: Tensor, mask: Tensor) -> None:
        self.drafter.read_source(state, token_ids, mask)

    def share_cache(self, state: Any, cache: Any) -> None:
        self.drafter.share_cache(state, cache)

    def copy_rows(self, *args: Any, **kwargs: Any) -> None:
        self.drafter.copy_rows(*args, **kwargs)

    def keep_rows(self, *args: Any) -> None:
        self.drafter.keep_rows(*args)

    def extend(self, *args: Any, **kwargs: Any) -> DraftLogits:
        start = self._now()
        logits = self.drafter.extend(*args, **kwargs)
        self.extends.append(self._now() - start)
        return logits

    def expand(self, *args: Any) -> DraftLogits:
        start = self._now()
        logits = self.drafter.expand(*args)
        self.expand_seconds += self._now() - start
        return logits

    def _now(self) -> float:
        return read_clock(self.device) if self.is_synchronised else time.perf_counter()


class OurDecoding:
    """A `Decoder`, kept from prompt to prompt; `options` are further ones of it. A compiled or captured draft phase is
    one graph, so growing the tree counts as part of the drafter's forwards."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        tree: TreeOption | None = None,
        acceptance: str = "exact",
        is_coupled: bool = True,
        is_compiled: bool = False,
        **options: Any,
    ) -> None:
        self.drafter = drafter
        # The parts of a graph have no times of their own.
        is_timed = drafter is not None and not is_compiled and not options.get("graphs")
        self.timed = TimedDrafter(drafter, target.device) if is_timed else None
        self.decoder = Decoder(
            target,
            self.timed or drafter,
            tree=tree,
            acceptance=acceptance,
            is_coupled=is_coupled,
            compile=is_compiled,
            **options,
        )

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
        if self.timed is not None:
            self.timed.reset(is_synchronised=is_synchronised)
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
        stats = output.stats
        drafting = stats.seconds["draft"] if self.decoder.drafter is not None else 0.0
        return Run(
            _read_texts(output.sequences, batch, self.decoder.target),
            seconds,
            stats.num_target_forwards,
            stats,
            self.timed.sum_up(stats.num_verify_passes) if self.timed is not None else drafting,
        )


class DistributedDecoding:
    """Drafts on this rank, and verifies on the servers of a link."""

    def __init__(self, target: Target, drafter: Drafter, link: Link) -> None:
        self.decoder = DistributedDecoder(target, drafter, link=link)

    def __call__(
        self,
        batch: Batch,
        settings: Settings,
        *,
        max_new_tokens: int | None = None,
        is_synchronised: bool = False,
    ) -> Run:
        device = self.decoder.target.device
        seed = int(row_seeds(settings.seed + batch.prompts[0].index, 1, "cpu")) if settings.is_sampled else None
        start = read_clock(device)
        output = self.decoder.generate(
            batch.input_ids,
            batch.attention_mask,
            seed=None if seed is None else [seed],
            **settings.generate_kwargs(max_new_tokens),
        )
        seconds = read_clock(device) - start
        texts = _read_texts(output.sequences, batch, self.decoder.target)
        return Run(texts, seconds, output.stats.num_target_forwards, output.stats)


class AssistedDecoding(TransformersDecoding):
    """The target's own `generate` with a small model that drafts (arXiv 2211.17192).

    Raises:
        ValueError: when the two cannot work together.
    """

    def __init__(self, target: Target, assistant: PreTrainedModel) -> None:
        sizes = [model.get_output_embeddings().weight.shape[0] for model in (target.model, assistant)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the target has a vocabulary of {sizes[0]} tokens, the assistant one of {sizes[1]}: give an assistant "
                "with the target's tokenizer"
            )
        super().__init__(target, assistant_model=assistant)
        prompt = Prompt("probe", 0, torch.zeros((1, 4), dtype=torch.long, device=target.device))
        try:
            self(Batch.of(prompt), Settings(), max_new_tokens=4)
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:  # as each family fails
            raise ValueError(f"transformers cannot decode with this assistant: {error}") from error


def count_work(contenders: Sequence[Contender], prompts: Sequence[Prompt]) -> None:
    """Fills in the work of a round, for one row, of our own contenders. Contenders that draft alike share the count."""
    counted: dict[tuple[str, Drafter | None], Work | None] = {}
    for contender in contenders:
        if contender.problem or not isinstance(contender.decode, OurDecoding):
            continue
        decode = contender.decode
        policy = decode.decoder.policy
        if policy is not None and policy.is_chosen:  # the tree, and so the work, changes from step to step
            continue
        key = (contender.tree, decode.drafter)
        if key not in counted:
            decoder = decode.decoder
            input_ids = [prompt.input_ids for prompt in prompts]
            counted[key] = count_round(decoder.target, decode.drafter, decoder.policy, input_ids)
        contender.work = counted[key]


def make_contenders(
    target: Target,
    heads: Mapping[str, Drafter],
    trees: Sequence[str],
    settings: Settings,
    *,
    modes: Sequence[bool] = (False,),
    acceptance: Sequence[str] = ("exact",),
    assistant: PreTrainedModel | None = None,
    misfits: Mapping[str, str] | None = None,
    is_each_once: bool = False,
) -> list[Contender]:
    """The baselines, then every drafter with every tree; at temperature > 0 with every acceptance rule, the exact one
    with and without coupled drafting.

    If a tree is too deep for a drafter, or a rule refuses the tree, the contender gets a `problem`; there is no error.

    Args:
        modes: how heads run: False = eager, True = compiled. Plain decoding and transformers' `generate` always run
            eagerly, and also compiled if heads do.
        acceptance: names of rules. They make no difference in greedy decoding.
        assistant: a small causal LM; adds transformers' assisted generation as a baseline.
        misfits: heads that do not fit the target, with the reason: each becomes a contender with that `problem`.
        is_each_once: one contender for each drafter of `heads`, and for no other drafter. It runs in the last of the
            modes, with exact acceptance, coupled drafting, and trees cut to the depth that it can draft.

    Raises:
        ValueError: for an unknown tree, and for two trees of the same name.
    """
    names = _name_trees(trees)
    plain_modes = (False, True) if True in modes else (False,)
    contenders = _make_baselines(target, plain_modes, assistant, settings.batch_size)
    drafters: list[tuple[str, Drafter, Sequence[str]]] = [(name, drafter, trees) for name, drafter in heads.items()]
    ways = [("", "exact", True)]  # a name's ending, the rule, is_coupled
    if is_each_once:
        modes = modes[-1:]
    else:
        drafters.insert(0, (NGRAMS, NgramDrafter(), trees[:1]))
        if settings.is_sampled:
            ways = [(f", {rule}", rule, False) for rule in acceptance if rule != "exact"]
            if "exact" in acceptance:
                ways = [("", "exact", True), (", uncoupled", "exact", False), *ways]
    for name, drafter, own_trees in drafters:
        own_modes = modes if name in heads else (False,)  # compiling does not help n-gram look-ups
        for tree, (ending, rule, is_coupled), mode in itertools.product(own_trees, ways, own_modes):
            own_tree = fit_tree(tree, drafter.max_depth) if is_each_once else tree
            tree_name = names[tree] if own_tree == tree else own_tree
            contender = Contender(_mark(name + ending, mode), tree_name, is_compiled=mode, is_exact=rule == "exact")
            try:
                contender.decode = OurDecoding(
                    target, drafter, tree=own_tree, acceptance=rule, is_coupled=is_coupled, is_compiled=mode
                )
            except ValueError as error:
                contender.problem = str(error)
            contenders.append(contender)
    return contenders + [Contender(name, problem=problem) for name, problem in (misfits or {}).items()]


def make_distributed_contenders(
    target: Target, drafters: Mapping[str, Drafter], settings: Settings, link: Link
) -> list[Contender]:
    """Every drafter with the servers of a link."""
    servers = f"{len(link.ranks)} server{'s' * (len(link.ranks) > 1)}"
    several = f"texts are decoded one at a time, and the batch has {settings.batch_size}"
    return [
        Contender(
            f"{name}, distributed",
            servers,
            DistributedDecoding(target, drafter, link),
            problem=several if settings.batch_size > 1 else "",
            is_overlapping=True,
        )
        for name, drafter in drafters.items()
    ]


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
    target: Target, plain_modes: Sequence[bool], assistant: PreTrainedModel | None, batch_size: int
) -> list[Contender]:
    """The contenders without heads: transformers' decodings and plain decoding."""
    one_row = f"transformers speculates only for single rows, and the batch has {batch_size}" if batch_size > 1 else ""
    contenders = [
        Contender(_mark(TRANSFORMERS, mode), decode=TransformersDecoding(target, **options), is_compiled=mode)
        for mode, options in zip(plain_modes, ({}, compiled_options()), strict=False)
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
        Contender(_mark(PLAIN, mode), decode=OurDecoding(target, None, is_compiled=mode), is_compiled=mode)
        for mode in plain_modes
    ]


def _mark(name: str, is_compiled: bool) -> str:
    return f"{name}, compiled" if is_compiled else name
