"""The drafter's states: every draft of a chain is the one that a fresh drafter makes from the whole text."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.inference import Drafter, GenerationStats, NgramDrafter, SmallModelDrafter, Target, chain
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.distributed.chain import DraftChain
from draftsmith.inference.distributed.drafting import ChainDrafting
from draftsmith.inference.distributed.messages import Answer
from draftsmith.inference.prefill import finish, prefill
from draftsmith.inference.request.row import Row
from draftsmith.inference.step import Step
from tests.heads.tiny_heads import tiny_heads
from tests.tiny_targets import random_prompt, target_of, tiny_target

DEPTH = 6


def read_features(target: Target, text: list[int], layers: tuple[int, ...]) -> Any:
    cache = target.new_cache(1, len(text) + DEPTH + 2)
    return target.prefill(cache, torch.tensor([text]), torch.tensor([len(text)]), feature_layers=layers).features


def reference_draft(target: Target, drafter: Drafter, text: list[int], path: list[int], step: Step) -> int | None:
    """The token after `path`, from a drafter that has read the text before it anew."""
    features = read_features(target, text[:-1], drafter.feature_layers)
    decoding = step.new_state(1, len(text) + step.num_slots_after, len(text))
    target.prefill(decoding.cache, torch.tensor([text[:-1]]), torch.tensor([len(text) - 1]))
    decoding.start_drafter()
    state = decoding.draft
    if drafter.reads_first_token:
        drafter.read_first(state, torch.tensor(text[:1]))
    counts = torch.tensor([len(text) - 1])
    draft = drafter.extend(state, features, torch.tensor([text[1:]]), counts, max_slots=len(text) - 1)
    for depth, token in enumerate(path, start=1):
        draft = drafter.expand(state, torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.long), depth)
    score, column = draft.logits[0, 0].float().max(-1)
    if score == float("-inf"):
        return None
    ids = draft.token_ids
    return int(column if ids is None else ids[column] if ids.dim() == 1 else ids[0, 0, column])


HEADS = ("eagle3", "kangaroo", "medusa", "block")
DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "n-grams": lambda target: NgramDrafter(),
    "small model": lambda target: SmallModelDrafter(tiny_target("llama", 5)),
    **{kind: partial(tiny_heads, kind) for kind in HEADS},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_a_fresh_drafter(name: str) -> None:
    """With agreement beyond the drafter's reach, disagreement anywhere, tokens that nobody drafted, and waiting drafts
    that are expanded again."""
    target, generator = target_of("llama", num_hidden_layers=2), random.Random(1)
    drafter = DRAFTERS[name](target).for_target(target)
    depth = min(DEPTH, drafter.max_depth or DEPTH)
    step = Step(target, drafter, chain(depth))
    prompt: list[int] = random_prompt(9, 3, vocab_size=20)[0].tolist()
    state = step.new_state(1, 200, 200)
    with target.without_autograd():
        read = finish(prefill(state, step, [Row(0, prompt, 0, 50)], GenerationStats()))
        drafting = ChainDrafting(step, Sampler(), state, len(prompt))
        draft_chain = DraftChain([*prompt, generator.randrange(2, 20)])
        if read.features is not None:
            draft_chain.features[len(prompt) - 1] = read.features[0, 0]
        cases = SimpleNamespace(checked=0, replayed=0, deepest=0)
        for _ in range(25):
            for _ in range(generator.randint(0, 4)):
                token = drafting.draft(draft_chain)
                is_whole = drafting.base + len(drafting.path) == draft_chain.end
                if is_whole:
                    whole = draft_chain.text + draft_chain.drafts
                    expected = reference_draft(target, drafter, whole[: drafting.base], whole[drafting.base :], step)
                    assert token == expected
                    cases.checked += 1
                    cases.replayed += drafting.base == len(draft_chain.text) and len(draft_chain.drafts) > 1
                    cases.deepest = max(cases.deepest, len(drafting.path))
                if token is None:
                    break
                draft_chain.drafts.append(token)
            root, num_asked = draft_chain.root, generator.randint(1, len(draft_chain.drafts) + 1)
            agreed = [token if generator.random() < 0.85 else token ^ 1 for token in draft_chain.drafts]
            tokens = [*agreed, generator.randrange(2, 20)][:num_asked]
            features = read_features(target, draft_chain.text + draft_chain.drafts, drafter.feature_layers)
            own = None if features is None else features[0, root : root + num_asked]
            draft_chain.take(Answer(draft_chain.version, root, tokens, own))
    assert cases.checked > 10
    assert cases.deepest == depth - 1
    assert depth < DEPTH or name == "n-grams" or cases.replayed > 0
