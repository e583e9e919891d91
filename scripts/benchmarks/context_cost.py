"""What one step costs behind a context of a given length: transformers' plain step, ours, and drafting and verifying.

Nothing is committed between the measured steps, so that each of them stands behind the same context.

Legend: L context length, N tree nodes, P path length (tree depth + 1), F feature width.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from inference import Drafter, Target, TreePolicy
from inference.acceptance.exact import Sampler
from inference.cache.tree_cache import TreeCache
from inference.execution.step import DecodeStep, NewSlots
from inference.prompts import PREFILL_CHUNK
from inference.trees.token_tree import TokenTree
from scripts.benchmarks.clock import read_clock

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class ContextCost:
    """One length's costs; milliseconds are medians of the measured steps.

    Attributes:
        context: L, tokens in the cache.
        num_nodes: N, root included.
        prefill_seconds: our chunked prefill of the target. draft_prefill_seconds: the drafter taking in the prompt,
            and its first tree.
        peak_memory_mib: the largest use of memory so far, less that before the first context was measured; of the
            process on a CPU, of torch's allocator on an accelerator.
        transformers_milliseconds: one forward of one token with a filled `DynamicCache`, what its `generate` loop does.
        plain_milliseconds: our verify pass over the root alone. verify_milliseconds: over a tree. All three end when
            the host has read the most likely tokens.
        draft_milliseconds: taking in one accepted token and growing a tree.
    """

    context: int
    num_nodes: int
    prefill_seconds: float
    draft_prefill_seconds: float
    peak_memory_mib: float
    transformers_milliseconds: float
    plain_milliseconds: float
    verify_milliseconds: float
    draft_milliseconds: float

    @property
    def break_even(self) -> float:
        """Tokens a step must emit to be as fast as our plain decoding, were acceptance and commits for nothing."""
        return (self.draft_milliseconds + self.verify_milliseconds) / self.plain_milliseconds


def build_random_target(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Target:
    """A Llama of random weights, with an MLP four times as wide as its hidden states."""
    for name, whole, parts in (("hidden_size", hidden_size, num_heads), ("num_heads", num_heads, num_kv_heads)):
        if parts < 1 or whole % parts:
            raise ValueError(
                f"got {name} {whole} for {parts} {'heads' if name == 'hidden_size' else 'key-value heads'}: "
                f"{name} must be a multiple of that"
            )
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    return Target(LlamaForCausalLM(config).to(dtype).to(device).requires_grad_(False).eval())


class Speculation:
    """Drafting and verifying behind one prompt, a step at a time; the cache keeps the prompt alone.

    Attributes:
        prefill_seconds, draft_prefill_seconds: as in `ContextCost`.
        root_ids: [1] the token after the prompt.
    """

    def __init__(
        self, target: Target, drafter: Drafter, policy: TreePolicy, prompt: Tensor, *, num_steps: int, is_compiled: bool
    ) -> None:
        device, context = target.device, prompt.shape[1]
        self.step = step = DecodeStep(target, drafter, policy, is_coupled=True, compile=is_compiled)
        self.sampler = Sampler()
        counts = torch.tensor([context], device=device)
        start = read_clock(device)
        self.cache = step.new_cache(1, context + num_steps + step.num_slots_behind + step.num_depths)
        output = target.prefill(
            self.cache, prompt, counts, feature_layers=step.feature_layers, chunk_size=PREFILL_CHUNK
        )
        self.prefill_seconds = read_clock(device) - start
        self.cache.length_floor = context

        self.root_ids = output.logits[:, -1].argmax(-1)
        next_ids = torch.cat([prompt[:, 1:], self.root_ids[:, None]], dim=1)
        with step.active():
            for _ in range(2 if is_compiled else 1):  # the first compiled draft makes the graphs
                start = read_clock(device)
                self.state = step.start_drafter(self.cache)
                step.draft(self.state, self.cache, self.sampler, NewSlots(output.features, next_ids, counts))
                self.draft_prefill_seconds = read_clock(device) - start

        # What a step hands over: P slots, of which one is real.
        features = None if output.features is None else output.features[:, -1:].repeat(1, step.num_depths, 1)
        self.slots = NewSlots(features, self.root_ids[:, None].repeat(1, step.num_depths), torch.ones_like(counts))
        self.num_slots = context

    def run(self) -> list[float]:
        """Seconds of drafting and of verifying."""
        self.num_slots += 1
        device = self.cache.lengths.device
        start = read_clock(device)
        context, self.cache.length_bound = self.cache.length_bound, self.num_slots  # the drafter's slots grow
        tree, _ = self.step.draft(self.state, self.cache, self.sampler, self.slots)
        self.cache.length_bound = context  # the target's cache keeps the prompt alone
        middle = read_clock(device)
        _verify(self.step, self.cache, tree)
        return [middle - start, read_clock(device) - middle]


@torch.no_grad()
def measure_context(
    target: Target,
    drafter: Drafter,
    policy: TreePolicy,
    context: int,
    *,
    num_steps: int,
    base_memory: float,
    is_compiled: bool = False,
    seed: int = 0,
) -> ContextCost:
    """Reads a random prompt of `context` tokens and measures steps behind it, interleaved in rotating order.

    Args:
        num_steps: measured steps of each; two more warm up.
        base_memory: `read_peak_memory` before the first context.
        is_compiled: compile our steps with torch.compile (see `Decoder`); prompts are always read eagerly.
    """
    device = target.device
    prompt = torch.randint(target.vocab_size, (1, context), generator=torch.Generator().manual_seed(seed)).to(device)
    speculation = Speculation(
        target, drafter, policy, prompt, num_steps=WARM_UP_STEPS + num_steps, is_compiled=is_compiled
    )
    peak_memory = read_peak_memory(device) - base_memory
    plain = DecodeStep(target, None, None, is_coupled=True, compile=is_compiled)
    root = TokenTree.from_root(speculation.root_ids)
    with speculation.step.active():  # both steps freeze alike
        seconds = _interleave(
            {
                "transformers": _transformers_step(target, speculation.root_ids, context),
                "plain": lambda: [_seconds_of(lambda: _verify(plain, speculation.cache, root), device)],
                "speculation": speculation.run,
            },
            num_steps,
        )
    medians = {
        name: [1000 * statistics.median(part) for part in zip(*every, strict=True)] for name, every in seconds.items()
    }
    draft, verify = medians["speculation"]
    return ContextCost(
        context=context,
        num_nodes=policy.num_nodes,
        prefill_seconds=speculation.prefill_seconds,
        draft_prefill_seconds=speculation.draft_prefill_seconds,
        peak_memory_mib=peak_memory,
        transformers_milliseconds=medians["transformers"][0],
        plain_milliseconds=medians["plain"][0],
        verify_milliseconds=verify,
        draft_milliseconds=draft,
    )


def _interleave(contenders: dict[str, Callable[[], list[float]]], num_steps: int) -> dict[str, list[list[float]]]:
    """What each returned in every step after warming up; the order moves on by one from step to step."""
    names = list(contenders)
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(WARM_UP_STEPS + num_steps):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(contenders[name]())
    return {name: every[WARM_UP_STEPS:] for name, every in taken.items()}


def _verify(step: DecodeStep, cache: TreeCache, tree: TokenTree) -> list[list[int]]:
    """The most likely token after each node, on the host. The next pass overwrites what this one left in the cache."""
    tokens: list[list[int]] = step.verify(cache, tree).logits.argmax(-1).tolist()
    return tokens


def _transformers_step(target: Target, root_ids: Tensor, context: int) -> Callable[[], list[float]]:
    """A forward pass behind a cache that holds `context` tokens, of random keys and values: their content costs
    nothing. Its cache concatenates at every step, as it does in `generate`."""
    config, device = target.text_config, target.device
    cache = DynamicCache(config=config)
    shape = (1, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, device=device).to(target.dtype) for _ in range(2)), layer)
    mask = torch.ones((1, context + 1), dtype=torch.long, device=device)

    def forward() -> int:
        logits = target.model(
            input_ids=root_ids[:, None], attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return int(logits[0, -1].argmax())

    def run() -> list[float]:
        seconds = _seconds_of(forward, device)
        cache.crop(-1)
        return [seconds]

    return run


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    start = read_clock(device)
    call()
    return read_clock(device) - start


def read_peak_memory(device: torch.device) -> float:
    """MiB: the largest use so far, of torch's allocator on an accelerator, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def check_contexts(contexts: Sequence[int]) -> list[int]:
    """In rising order, so that the peak of memory belongs to the context it is told with."""
    if not contexts or min(contexts) < 2 or len(set(contexts)) < len(contexts):
        got = " ".join(map(str, contexts))
        raise ValueError(f"got --context {got}: give one or more lengths of at least 2 tokens, each once")
    return sorted(contexts)
