"""Decoder and generate(): draft a token tree, verify it in one forward pass, accept, commit, repeat.

Legend: B batch, L prompt length, N tree nodes, P path length (tree depth + 1), V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference.acceptance import PREFIX_FREE, Sampler, accept_exact
from inference.acceptance_rules import AcceptanceRule, resolve_rule
from inference.auto_tree import AutoTree
from inference.cost_measurement import find_costs
from inference.cost_model import CostModel
from inference.drafter import Drafter
from inference.drafting import AdaptiveDrafting, Drafting, FixedDrafting
from inference.hf_request import Request, run_with_generate
from inference.kv_cache import TreeCache
from inference.noise import row_seeds
from inference.policy import TreePolicy, resolve_policy
from inference.stats import GenerationStats, PhaseClock
from inference.step import DecodeStep, NewSlots
from inference.target import Target
from inference.tree import TokenTree
from inference.tree_planner import TreePlanner

PREFILL_CHUNK = 512

StepCallback = Callable[[list[int], int], None]


@dataclass
class GenerationOutput:
    """sequences: [B, L + new] int64, as transformers' generate returns them: the prompts as given, then the new tokens,
    padded on the right; of an encoder-decoder target, what its decoder began with, then the new tokens. stats: what it
    took."""

    sequences: Tensor
    stats: GenerationStats


class Decoder:
    """Decodes with one target and one drafter; keeps its buffers from call to call.

    Args:
        target: a frozen causal LM or encoder-decoder model of transformers, or a `Target`.
        drafter: trained heads, any other `Drafter`, or None for plain decoding on the same stack.
        tree: "dynamic" (EAGLE-2, the default), "auto" (EAGLE-2's kind, of the size that pays, chosen at every
            step), "chain", "gamma" (a chain of the length that pays, chosen likewise), a tree file, a list of rank
            paths, or a `TreePolicy`.
        acceptance: "exact" (the default), "rejection" (Leviathan et al.; siblings without replacement),
            "block_verification" (of chains), "typical" (Medusa; lossy), or an `AcceptanceRule`. For a greedy target all
            are the first one. Sampled, "rejection" and "block_verification" keep the target's distribution, but their
            texts depend on what is drafted.
        is_coupled: at temperature > 0 and with exact acceptance, let the drafter read the target's own Gumbel noise
            (more is accepted; the text is the same either way).
        is_synchronised: wait for the accelerator at every phase boundary, so that `stats.seconds` splits time truly.
        compile: compile drafting, verification, acceptance and commits with torch.compile. The first steps of a process
            then take tens of seconds (`stats.seconds["compile"]`); numbers are rounded differently than in the eager
            model, so near-ties may fall otherwise. Weights, and which adapters are switched on, are read when a graph
            is made: make a new decoder after a change.

    With exact acceptance the text depends on the target and the seed alone: not on the drafter, the tree or the other
    rows of the batch.
    """

    def __init__(
        self,
        target: Target | nn.Module,
        drafter: Drafter | None = None,
        *,
        tree: TreePolicy | str | Sequence[Sequence[int]] | None = None,
        acceptance: AcceptanceRule | str = "exact",
        is_coupled: bool = True,
        is_synchronised: bool = False,
        compile: bool = False,  # noqa: A002
    ) -> None:
        self.target = target if isinstance(target, Target) else Target(target)
        self.drafter = drafter
        self.is_coupled = is_coupled
        self.is_synchronised = is_synchronised
        self.policy: TreePolicy | None = None
        if drafter is not None:
            if (bind := getattr(drafter, "bind", None)) is not None:
                bind(self.target)
            self.policy = resolve_policy(tree, drafter.max_depth)
            if getattr(drafter, "drafts_chains_only", False) and not self.policy.is_narrow:
                raise ValueError(
                    f"tree is {'dynamic, the default' if tree is None else repr(tree)}, and {type(drafter).__name__} "
                    "drafts chains only: pass tree='chain', tree='gamma' or tree=chain(n)"
                )
        elif tree is not None:
            raise ValueError(
                f"tree is {tree!r} but there is no drafter: pass heads, or leave tree out for plain decoding"
            )
        rule = resolve_rule(acceptance)
        rule.check(self.policy)
        self._step = DecodeStep(self.target, drafter, self.policy, is_coupled=is_coupled, compile=compile, rule=rule)
        self._cache: TreeCache | None = None
        self._costs: dict[tuple[Any, ...], CostModel] = {}  # by batch size and way to draw
        self._planner: TreePlanner | None = None
        if isinstance(self.policy, AutoTree):
            self._planner = TreePlanner(self.policy)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        streamer: Any = None,
        on_step: StepCallback | None = None,
        tokenizer: Any = None,
        stop_strings: str | list[str] | None = None,
        **generate_kwargs: Any,
    ) -> GenerationOutput:
        """Generates through transformers' own `generate`: its config, processors and stopping criteria mean what they
        do there.

        Args:
            input_ids: [B, L] int64; for an encoder-decoder target, the sources.
            attention_mask: [B, L], 0 on padding; without it transformers takes pad tokens for padding, but not in
                sources.
            seed: one integer (row b uses hash(seed, b)), one per row, or None to draw from torch's global generator.
            streamer: a transformers streamer (batch 1); receives every token as it is emitted.
            on_step: called after every step of a batch of 1 with the tokens kept and how many of them were drafted.
            tokenizer, stop_strings: as in transformers.
            **generate_kwargs: those of transformers' `generate` (max_new_tokens, do_sample, temperature, ...); the
                result is a `GenerationOutput` whatever `return_dict_in_generate` says.

        Raises:
            ValueError: for an empty or too long prompt, beams, and options this loop does not have, each with the cure.
        """
        stats = GenerationStats()
        clock = PhaseClock(stats, self.target.device, is_synchronised=self.is_synchronised)

        def decode(request: Request) -> Tensor:
            with self._step.active():
                return self._decode(request, seed, stats, clock, on_step)

        sequences = run_with_generate(
            self.target,
            decode,
            input_ids,
            attention_mask,
            streamer=streamer,
            tokenizer=tokenizer,
            stop_strings=stop_strings,
            generate_kwargs=generate_kwargs,
        )
        clock.finish()
        return GenerationOutput(sequences, stats)

    @torch.no_grad()
    def _decode(
        self,
        request: Request,
        seed: int | Sequence[int] | None,
        stats: GenerationStats,
        clock: PhaseClock,
        on_step: StepCallback | None,
    ) -> Tensor:
        """The loop. One host synchronisation per step: reading what was emitted."""
        target, step = self.target, self._step
        step.stats = stats
        batch = request.batch_size
        capacity = request.max_length + step.num_slots_behind
        cache = self._get_cache(batch, capacity)
        sampler = Sampler(
            request.processors,
            do_sample=request.do_sample,
            row_seeds=row_seeds(seed, batch, target.device) if request.do_sample else None,
            eos_token_ids=request.eos_token_ids,
        )

        clock.start()
        drafting = self._start_drafting(batch, cache, sampler)
        if request.source is not None:
            step.read_source(drafting.state, cache, request.source)
        if (read_first := getattr(self.drafter, "read_first", None)) is not None:
            read_first(drafting.state, request.prompt_ids[:, 0])
        clock.stop("profile")
        output = target.prefill(
            cache,
            request.prompt_ids,
            request.prompt_counts,
            feature_layers=step.feature_layers,
            chunk_size=PREFILL_CHUNK,
        )
        stats.num_target_forwards += -(-request.prompt_ids.shape[1] // PREFILL_CHUNK)
        clock.stop("prefill")

        # The first token is drawn from the prefill; its "tree" is the last prompt token, which is already committed.
        first = TokenTree.from_root(request.last_prompt_ids)
        accepted = accept_exact(
            sampler,
            first,
            output.logits,
            cache.lengths - 1,
            prefixes=None if sampler.is_prefix_free else request.prefixes(),
        )
        next_ids = _shift_in(request.prompt_ids, request.prompt_counts, accepted.next_tokens[:, 0])
        drafting.take(NewSlots(output.features, next_ids, request.prompt_counts))
        is_first, emitted, counts = True, accepted.next_tokens, accepted.counts

        while True:
            asked = drafting.open(cache, sampler)
            clock.stop("draft")
            # The step's one synchronisation: everything in one copy.
            width = emitted.shape[1]
            read = torch.cat([emitted, counts[:, None], *([] if asked is None else [asked])], dim=1).tolist()
            num_emitted = [row[width] for row in read]
            kept = request.emit([row[:width] for row in read], num_emitted)
            if not is_first:
                # The read above; with processors that read the prefix also which rows walk on, at each depth.
                stats.num_host_syncs += 1 if sampler.is_prefix_free else 1 + width
                for count in num_emitted:
                    if count:
                        stats.count_step(count - 1)
            if on_step is not None and batch == 1 and kept[0]:
                on_step(kept[0], 0 if is_first else min(len(kept[0]), num_emitted[0] - 1))
            clock.stop("accept")
            if request.is_finished:
                break
            # Host knowledge of the true lengths keeps the attention's view tight.
            cache.length_bound, cache.length_floor = request.max_committed, request.min_committed
            active = request.active_mask() if batch > 1 else None
            if active is not None:
                cache.lengths *= active  # finished rows stop growing, and give up what they overshot
                drafting.retire(active)

            tree, noise = drafting.draft(cache, sampler, [row[width + 1 :] for row in read], num_emitted)
            stats.num_drafted += (tree.num_nodes - 1) * len(request.unfinished)
            clock.stop("draft")

            output = step.verify(cache, tree)
            stats.num_target_forwards += 1
            clock.stop("verify")

            accepted = step.accept(
                sampler,
                tree,
                output.logits,
                cache.lengths,
                noise=noise,
                prefixes=None if sampler.is_prefix_free else request.prefixes(),
                max_tokens=None if sampler.is_prefix_free else request.budgets,
            )
            counts = accepted.counts if active is None else accepted.counts * active
            clock.stop("accept")

            features, counted = step.commit(cache, tree, accepted, counts, output.features)
            drafting.take(NewSlots(features, accepted.next_tokens, counts), counted)
            is_first, emitted = False, accepted.next_tokens
            clock.stop("commit")

        stats.num_new_tokens += request.num_new_tokens
        return request.sequences()

    def costs(self, batch_size: int = 1, *, do_sample: bool = False, processors: Sequence[Any] = ()) -> CostModel:
        """What `tree="auto"` decides with: measured when first asked for (see `inference.cost_model`), then kept in a
        file.

        Args:
            processors: logits processors of transformers; those that read the prefix are left out.

        Raises:
            ValueError: for a decoder with another tree.
        """
        if not isinstance(self.policy, AutoTree):
            raise ValueError(f"costs are measured for tree='auto', and this decoder's tree is {self.policy!r}")
        processors = [processor for processor in processors if type(processor) in PREFIX_FREE]
        key = (batch_size, do_sample, *map(type, processors))
        if key not in self._costs:
            seeds = row_seeds(0, batch_size, self.target.device) if do_sample else None
            sampler = Sampler(processors, do_sample=do_sample, row_seeds=seeds)
            with self._step.active():
                self._costs[key] = find_costs(self._step, self.policy, batch_size, sampler)
        return self._costs[key]

    def _start_drafting(self, batch_size: int, cache: TreeCache, sampler: Sampler) -> Drafting:
        if self._planner is None or not isinstance(self.policy, AutoTree):
            return FixedDrafting(self._step, cache)
        costs = self.costs(batch_size, do_sample=sampler.do_sample, processors=sampler.processors)
        return AdaptiveDrafting(self._step, self.policy, self._planner, costs, cache)

    def _get_cache(self, batch_size: int, capacity: int) -> TreeCache:
        cache = self._cache
        if cache is None or cache.batch_size != batch_size or cache.capacity < capacity:
            self._cache = cache = None  # free the old one first
            self._cache = cache = self._step.new_cache(batch_size, capacity)
        cache.reset()
        return cache


def _shift_in(prompt_ids: Tensor, counts: Tensor, first_ids: Tensor) -> Tensor:
    """The token one position after each prompt token: [B, L]. Row b ends, at counts[b] - 1, with first_ids[b].

    >>> _shift_in(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2]), torch.tensor([1, 2]))
    tensor([[6, 7, 1],
            [9, 2, 0]])
    """
    shifted = nn.functional.pad(prompt_ids[:, 1:], (0, 1))
    return shifted.scatter(1, (counts - 1)[:, None], first_ids[:, None])


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
