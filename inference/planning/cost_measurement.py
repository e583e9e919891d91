"""Measures a `CostModel` on the decoder's own functions, eager or compiled as they are."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from inference.acceptance.exact import Sampler
from inference.cache.source import SOURCE_MULTIPLE, Source
from inference.execution.step import DecodeStep, NewSlots
from inference.planning.auto_tree import AutoTree
from inference.planning.cost_model import (
    MEASURED_ROUNDS,
    WARM_UP_ROUNDS,
    CostModel,
    describe_machine,
    load_costs,
    store_costs,
    time_calls,
)
from inference.targets.target import Target
from inference.trees.policy import DynamicTree
from inference.trees.token_tree import TokenTree

MEASUREMENT = 9  # to be raised with every change that makes stored costs wrong
CONTEXTS = (64, 512, 960)  # within the smallest cache of compiled decoding, so that its graphs are measured


def find_costs(step: DecodeStep, policy: AutoTree, batch_size: int, sampler: Sampler) -> CostModel:
    """The stored costs for this machine, target, drafter, dtype, batch and way to run, or freshly measured ones.

    Args:
        sampler: as texts will be drawn, with no processor that reads the prefix.
    """
    target = step.target
    key = [
        describe_machine(target.device),
        type(target.model).__name__,
        _digest(target.text_config),
        str(target.dtype),
        str(getattr(target.text_config, "_attn_implementation", "")),
        *_describe_drafter(step.drafter),
        [policy.depths, policy.sizes, policy.widths],
        step.is_compiled,
        batch_size,
        step.is_coupled,
        sampler.do_sample,
        [type(processor).__name__ for processor in sampler.processors],
        CONTEXTS,
        MEASUREMENT,
    ]
    stored = load_costs(key)
    if stored is not None and not step.is_compiled:
        return stored
    # Compiled, one round is made all the same: it makes the graphs, which would otherwise be made within a text.
    num_rounds = WARM_UP_ROUNDS + MEASURED_ROUNDS if stored is None else 1
    costs = measure_costs(step, policy, batch_size, sampler, num_rounds=num_rounds)
    if stored is not None:
        return stored
    store_costs(key, costs)
    return costs


def _describe_drafter(drafter: Any) -> list[Any]:
    """Its name, settings and dtype; then the same of the drafters it is made of. What wraps a drafter (`__wrapped__`)
    is none itself."""
    drafter = inspect.unwrap(drafter)
    config = getattr(drafter, "config", None)
    return [
        getattr(drafter, "name", type(drafter).__name__),
        _describe_settings(drafter) if config is None else _digest(config),
        str(getattr(drafter, "dtype", "")),
        *(_describe_drafter(part) for part in getattr(drafter, "drafters", ())),
    ]


def _describe_settings(drafter: Any) -> str:
    """The plain values a drafter without a config holds."""
    values = vars(drafter).items() if hasattr(drafter, "__dict__") else ()
    plain = (bool, int, float, str, tuple)
    kept = [(name, value) for name, value in values if isinstance(value, plain) and name != "drafters"]
    return repr(sorted(kept))


def _digest(config: Any) -> str:
    """A config's shape, without where it was loaded from."""
    values = {name: value for name, value in config.to_dict().items() if not name.endswith("name_or_path")}
    return hashlib.sha256(repr(sorted(values.items(), key=lambda item: item[0])).encode()).hexdigest()


@torch.no_grad()
def measure_costs(
    step: DecodeStep, policy: AutoTree, batch_size: int, sampler: Sampler, *, num_rounds: int
) -> CostModel:
    """Nothing is generated: passes over token 0 behind contexts of zeros cost what others cost.

    Args:
        sampler: as in `find_costs`.
        num_rounds: as in `time_calls`.
    """
    target, drafter, device = step.target, step.drafter, step.target.device
    assert drafter is not None
    limit = target.max_length
    contexts = [context for context in CONTEXTS if limit is None or context <= limit] or [CONTEXTS[0]]
    sizes = (1, *policy.sizes)
    cache = step.new_cache(batch_size, contexts[-1] + step.num_slots_behind)
    state = step.start_drafter(cache)
    if target.is_encoder_decoder:
        step.read_source(state, cache, _blank_source(target, batch_size))
    trees = {size: _flat_tree(size, policy.max_depth, batch_size, device) for size in sizes}

    def verifying(size: int, context: int) -> Callable[[], Any]:
        def call() -> Any:
            cache.lengths.fill_(context)
            cache.length_bound = cache.length_floor = context
            return step.verify(cache, trees[size])

        return call

    places = [(size, context) for context in contexts for size in sizes]
    # Plain decoding makes one pass after another; a tree's pass comes after a draft.
    warm = [size == 1 for size, _ in places]
    seconds = time_calls([verifying(*place) for place in places], device, is_warm=warm, num_rounds=num_rounds)
    verify = dict(zip(places, seconds, strict=True))

    largest = policy.num_nodes
    width = step.num_depths
    output = verifying(largest, contexts[0])()
    features = None if output.features is None else output.features[:, :1].expand(-1, width, -1).contiguous()
    next_ids = torch.zeros(batch_size, width, dtype=torch.long, device=device)
    counts = torch.zeros(batch_size, dtype=torch.long, device=device)  # nothing becomes certain
    slots = NewSlots(features, next_ids, counts)

    def open_draft() -> Any:
        return step.open(state, cache, sampler, slots)

    # At another length of the cache first: graphs of the drafter that leave it open are made here.
    cache.length_bound = contexts[-1]
    for tree_width in policy.widths:
        step.grow(state, sampler, open_draft(), DynamicTree(policy.max_depth, tree_width, largest))
    cache.length_bound = contexts[0]
    opened = open_draft()

    def finishing(size: int) -> Callable[[], Any]:
        tree, output = trees[size], verifying(size, contexts[0])()

        def call() -> None:
            step.open_slots(cache, tree)
            noise = None
            if size == 1:
                _, noise = step.start_plain(cache, sampler, slots)
            elif sampler.do_sample:
                noise = opened.noise
            accepted = step.accept(sampler, tree, output.logits, cache.lengths, noise=noise)
            step.commit(cache, tree, accepted, torch.zeros_like(accepted.counts), output.features)
            cache.length_bound = contexts[0]
            accepted.next_tokens.tolist()

        return call

    for size in policy.sizes:  # the graphs of all
        finishing(size)()
    # A plain step behind another one.
    step.start_plain(cache, sampler, NewSlots(None, next_ids[:, :1].contiguous(), counts))
    rest, plain_rest = time_calls([finishing(largest), finishing(1)], device, num_rounds=num_rounds)

    def growing(depth: int, width: int) -> Callable[[], Any]:
        return lambda: step.grow(state, sampler, open_draft(), DynamicTree(depth, width, largest))

    first, last = policy.depths[0], policy.max_depth
    calls = [growing(depth, width) for width in policy.widths for depth in (first, last)]
    extend, *grown = time_calls([open_draft, *calls], device, num_rounds=num_rounds)
    level = tuple(
        max(0.0, (deep - shallow) / (last - first)) if last > first else 0.0
        for shallow, deep in zip(grown[0::2], grown[1::2], strict=True)
    )
    return CostModel(
        contexts=tuple(contexts),
        sizes=sizes,
        verify=tuple(tuple(verify[size, context] for size in sizes) for context in contexts),
        extend=extend,
        grow=max(0.0, grown[-2] - extend - (first - 1) * level[-1]),
        widths=policy.widths,
        level=level,
        rest=rest,
        plain_rest=plain_rest,
    )


def _blank_source(target: Target, batch_size: int) -> Source:
    """A source of `SOURCE_MULTIPLE` tokens, for encoder-decoder targets: what a longer one costs is not measured."""
    length = min(SOURCE_MULTIPLE, target.max_length or SOURCE_MULTIPLE)
    token_ids = torch.zeros(batch_size, length, dtype=torch.long, device=target.device)
    return target.encode_source(token_ids, torch.ones_like(token_ids))


def _flat_tree(size: int, max_depth: int, batch_size: int, device: torch.device) -> TokenTree:
    """A root and its children: any tree of a size costs the same."""
    zeros = torch.zeros(batch_size, size, dtype=torch.long, device=device)
    is_root = torch.arange(size, device=device).expand(batch_size, -1) == 0
    if size == 1:
        return TokenTree.from_root(zeros[:, 0])
    parents, depths, widths = torch.where(is_root, -1, 0), torch.where(is_root, 0, 1), torch.ones_like(zeros)
    return TokenTree(zeros, parents, depths, zeros.float(), max_depth=max_depth, widths=widths)
