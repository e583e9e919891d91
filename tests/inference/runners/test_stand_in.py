"""A decode step keeps a GPU's discipline: one device, no read on the host, no shape that depends on values, no tensor
made of Python numbers. The whole step runs on a stand-in device, without the engine's one host read."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama

from draftsmith.heads import DraftHeads
from draftsmith.inference import Drafter, NgramDrafter, SmallModelDrafter, StagedDrafter, Target
from draftsmith.inference.acceptance.rules import RULES
from draftsmith.inference.acceptance.sampler import Sampler
from draftsmith.inference.engine import Engine
from draftsmith.inference.noise import row_seeds
from draftsmith.inference.prefill import finish, prefill
from draftsmith.inference.request.generate_arguments import make_request
from draftsmith.inference.request.row import Row
from draftsmith.inference.stats import GenerationStats, PhaseClock
from draftsmith.inference.step import Step
from draftsmith.inference.trees.options import resolve_policy
from tests.heads.tiny_heads import VARIANT_IDS, VARIANTS, tiny_heads
from tests.inference.runners.stand_in import DEVICE, move, stand_in_target, strict
from tests.params import slow_but
from tests.tiny_targets import pad_prompts, random_prompt, tiny_target

# torch has no autocast for the stand-in device, and RoPE of early releases asks for it.
pytestmark = pytest.mark.skipif(
    hasattr(modeling_llama, "maybe_autocast"), reason="RoPE of this release asks the stand-in device for autocast"
)
STATIC = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]]
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01}

# name -> (rule, tree, settings, batch size); None: plain decoding
STEPS: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "dynamic, sampled, batch": ("exact", "dynamic:3,2,6", SAMPLED, 4),
    "dynamic, greedy": ("exact", "dynamic:3,2,6", GREEDY, 1),
    "chain, greedy": ("exact", "chain:2", GREEDY, 1),
    "static, sampled, batch": ("exact", STATIC, SAMPLED, 4),
}
EVERY_STEP = ("medusa-0", "eagle3-1", "kangaroo-0", "ngrams")  # the others take every second one, for time
RULE_STEPS: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "rejection, batch": ("rejection", STATIC, SAMPLED, 4),
    "typical, batch": ("typical", "dynamic:3,2,6", SAMPLED, 4),
}


class StandIn:
    """A target and a drafter on the stand-in device, and the decode loop over them."""

    def __init__(self, make: Callable[[Target], Drafter | None], family: str = "llama", num_layers: int = 2) -> None:
        self.mode, self.real = FakeTensorMode(), Target(tiny_target(family, num_hidden_layers=num_layers))
        self.drafter = make(self.real)
        # A request is on the host, and is made where the model has values.
        self._requests = {
            (size, bool(settings["do_sample"])): make_request(
                self.real, **self._prompts(size), **{"max_new_tokens": 50, **settings}
            )
            for size in (1, 4)
            for settings in (GREEDY, SAMPLED)
        }
        self.target = stand_in_target(self.real, self.mode)
        for drafter in _parts(self.drafter):
            if isinstance(drafter, DraftHeads):
                assert not drafter.wants_token_counts, "asked while the vocabulary has values"
            if isinstance(drafter, SmallModelDrafter):
                drafter.small = stand_in_target(drafter.small, self.mode)
        move(self.mode, self.drafter)

    @staticmethod
    def _prompts(batch_size: int) -> dict[str, Tensor]:
        return pad_prompts([random_prompt(9 - row, seed=row) for row in range(batch_size)])

    def run(self, rule: str, tree: Any, settings: dict[str, Any], batch_size: int, *, num_steps: int = 2) -> None:
        """Reads prompts, then runs steps under the lints. The host hands over what it would have read: tokens. In a
        batch, a row ends after the first step."""
        request = self._requests[batch_size, settings["do_sample"]]
        rows = [Row(row.index, row.padded, row.num_padding, budget=50) for row in request.rows]
        with self.mode, torch.no_grad():
            drafter = self.drafter and self.drafter.for_target(self.target)
            policy = resolve_policy(tree, drafter.max_depth) if drafter else None
            step = Step(self.target, drafter, policy, rule=RULES[rule])
            state, clock = step.new_state(batch_size, 128, 128), PhaseClock(GenerationStats(), DEVICE)
            engine = Engine(step, state, clock)
            read = finish(prefill(state, step, rows, clock.stats))
            seeds = row_seeds(0, batch_size, DEVICE) if request.do_sample else None
            engine.sampler = Sampler.of_request(request, seeds, state.history, vocab_size=self.target.vocab_size)
            step.first(state, read, engine.sampler)
            for row in rows:
                row.emit([5])
            for number in range(num_steps):
                with strict() if number else nullcontext():  # the first step may make tables
                    output = step(state, policy, engine.sampler, clock)
                assert output.emitted.device == DEVICE
                if batch_size > 1 and number == 0:
                    rows[1].budget = 1
                for row in rows:
                    row.emit([5, 6])
                with strict():
                    engine.settle_rows()
            assert len(state.rows) == (batch_size if batch_size == 1 or not step.rows_may_leave else batch_size - 1)


def _parts(drafter: Any) -> list[Any]:
    inner = [*getattr(drafter, "drafters", ()), *([drafter.small] if isinstance(drafter, StagedDrafter) else [])]
    return [drafter, *(part for one in inner for part in _parts(one))]


def heads_of(kind: str, **overrides: Any) -> Callable[[Target], Drafter]:
    return lambda target: tiny_heads(kind, target, **overrides)


DRAFTERS: dict[str, Callable[[Target], Drafter | None]] = {
    **{name: heads_of(kind, **overrides) for name, (kind, overrides) in zip(VARIANT_IDS, VARIANTS, strict=True)},
    "ngrams": lambda _: NgramDrafter(),
    "small model": lambda _: SmallModelDrafter(Target(tiny_target("gemma3"))),
    "none": lambda _: None,
}


# By default heads that draft level by level. The test of rules has Medusa, the test with windows Kangaroo, and
# tests/inference/test_host_reads.py all kinds.
@pytest.mark.parametrize("name", slow_but({"eagle3-0"}, list(DRAFTERS)))
def test_steps_on_the_stand_in_device(name: str) -> None:
    stand_in = StandIn(DRAFTERS[name], num_layers=5 if name == "kangaroo-1" else 2)
    for step in [*STEPS.values()][:: 1 if name in EVERY_STEP else 2]:
        stand_in.run(*step)


@pytest.mark.parametrize("name", slow_but({"medusa-0"}, ["medusa-0", "eagle3-1", "ngrams"]))
def test_acceptance_rules_on_the_stand_in_device(name: str) -> None:
    stand_in = StandIn(DRAFTERS[name])
    for step in RULE_STEPS.values():
        stand_in.run(*step)


def test_a_target_with_windows_on_the_stand_in_device() -> None:
    StandIn(heads_of("kangaroo"), "gemma3", num_layers=6).run("exact", "dynamic:3,2,6", SAMPLED, 4)
