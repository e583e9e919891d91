"""What this library drafts, step by step, and how one engine's drafts are compared with it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads import DraftHeads
from draftsmith.inference import Decoder, Target
from draftsmith.inference.drafters.base import PREFILL_CHUNK
from draftsmith.inference.stats import GenerationStats
from draftsmith.inference.trees.dynamic import DynamicTree
from draftsmith.inference.trees.token_tree import TokenTree
from tests.conftest import REPOSITORY

# Two logits this close may change their order between two libraries' float32 arithmetic.
NEAR_TIE = 1e-3
LEAST_STEPS = 150


class RecordedChain(DynamicTree):
    """A chain of `depth` drafts that keeps all of them."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, 1, depth + 1, root_factor=1)
        self.drafts: list[list[int]] = []

    def grow(self, *args: Any, **kwargs: Any) -> TokenTree:
        tree = super().grow(*args, **kwargs)
        self.drafts.append(tree.token_ids[0, 1:].tolist())
        return tree


@dataclass(frozen=True)
class Texts:
    """Prompts, and the target's greedy texts after them as transformers writes them."""

    prompts: list[list[int]]
    replies: list[list[int]]
    max_new_tokens: int


def read_turns(count: int) -> list[list[dict[str, str]]]:
    """The first questions of examples/prompts.jsonl, each a conversation."""
    lines = (REPOSITORY / "examples/prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]


def write_texts(target: Target, prompts: list[list[int]], max_new_tokens: int) -> Texts:
    model: Any = target.model
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    replies = [model.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts]
    return Texts(prompts, replies, max_new_tokens)


@dataclass
class Chains:
    """Texts of one drafter, with the drafts of each, and the statistics of all."""

    texts: list[list[int]] = field(default_factory=list)
    drafts: list[list[list[int]]] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.drafts))


def decode_chains(
    target: Target, heads: DraftHeads | None, prompts: list[list[int]], *, depth: int, max_new_tokens: int
) -> Chains:
    """Greedy texts after each prompt; `heads` None = plain decoding."""
    policy = RecordedChain(depth)
    decoder = Decoder(target, heads, tree=policy) if heads is not None else Decoder(target)
    chains = Chains()
    for prompt in prompts:
        policy.drafts = []
        output = decoder.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
        chains.texts.append(output.sequences[0, len(prompt) :].tolist())
        chains.drafts.append(policy.drafts)
        chains.stats += output.stats
    return chains


def compare_with_vllm(
    run_vllm: Callable[..., dict[str, Any]], heads: DraftHeads, texts: Texts, depth: int, /, *script: str, **job: Any
) -> None:
    """vLLM's texts, its drafts at every step, and its counts of accepted tokens at every position are ours.

    Args:
        *script, **job: of `run_vllm`, beside the texts.
    """
    told = {"num_drafts": depth, "prompts": texts.prompts, "max_new_tokens": texts.max_new_tokens}
    result = run_vllm(*script, **told, **job)
    ours = decode_chains(heads.target, heads, texts.prompts, depth=depth, max_new_tokens=texts.max_new_tokens)
    assert ours.texts == texts.replies
    assert [text["tokens"] for text in result["texts"]] == ours.texts
    differences = explain_differences(heads, texts.prompts, ours, [text["drafts"] for text in result["texts"]])
    print(
        f"\n{heads.config.head_type}: {ours.num_steps} steps, {len(differences)} with other drafts",
        *differences,
        sep="\n",
    )
    assert ours.num_steps >= LEAST_STEPS
    histogram = ours.stats.accepted_histogram
    per_position = [sum(histogram[position:]) for position in range(1, depth + 1)]
    theirs = result["metrics"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    print("accepted per position:", per_position, theirs)
    assert differences or theirs == per_position
    assert all(per_position), "some position is never accepted, and proves little"


def explain_differences(
    heads: DraftHeads, prompts: list[list[int]], ours: Chains, theirs: list[list[list[int]]]
) -> list[str]:
    """One line for each step at which an engine drafted another token, with our two logits and their distance.

    The engine may draft once more after a text has ended; that draft is verified by nobody and is left out.
    """
    lines = []
    for prompt, text, own, other in zip(prompts, ours.texts, ours.drafts, theirs, strict=True):
        assert len(other) >= len(own), f"{len(other)} steps where we have {len(own)}"
        place = len(prompt)
        for step, (mine, drafted) in enumerate(zip(own, other, strict=False)):
            place += 1 if step == 0 else _count_accepted(text, place - len(prompt), own[step - 1]) + 1
            if mine == drafted:
                continue
            depth = next(d for d, pair in enumerate(zip(mine, drafted, strict=True)) if pair[0] != pair[1])
            certain = [*prompt, *text][:place]
            logits = score_after(heads, certain, mine[:depth])
            one, other = logits[[mine[depth], drafted[depth]]].tolist()
            lines.append(f"step {step}, depth {depth + 1}: {mine} and {drafted}; logits {one:.6f} and {other:.6f}")
            assert abs(one - other) < NEAR_TIE, lines[-1]
    return lines


def _count_accepted(text: list[int], done: int, drafts: list[int]) -> int:
    count = 0
    while count < len(drafts) and done + count < len(text) and text[done + count] == drafts[count]:
        count += 1
    return count


@torch.no_grad()
def score_after(heads: DraftHeads, certain: list[int], drafted: list[int]) -> Tensor:
    """The heads' logits [V] after certain tokens and some drafted ones, from a state of their own."""
    target = heads.target
    view = heads.for_target(target)
    ids = torch.tensor([certain])
    cache = target.new_cache(1, len(certain) + 8)
    counts = torch.tensor([len(certain) - 1])
    output = target.prefill(cache, ids[:, :-1], counts, feature_layers=view.feature_layers)
    state = view.start(1, len(certain) + 8, len(drafted) + 1)
    for start in range(0, len(certain) - 1, PREFILL_CHUNK):
        part = slice(start, start + PREFILL_CHUNK)
        features = None if output.features is None else output.features[:, part]
        here = (counts - start).clamp(max=PREFILL_CHUNK)
        draft = view.extend(state, features, ids[:, 1:][:, part], here, max_slots=len(certain) - 1)
    for depth, token in enumerate(drafted, start=1):
        draft = view.expand(state, torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long), depth)
    scores = draft.logits[0, 0].float()
    if draft.token_ids is None:
        return scores
    return torch.full((target.vocab_size,), float("-inf")).scatter(0, draft.token_ids.flatten(), scores)
