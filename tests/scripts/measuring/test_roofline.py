"""What a step could be: counted work against numbers made by hand, and the columns that follow from it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.heads import create_heads
from draftsmith.inference import NgramDrafter, Target, chain
from draftsmith.scripts.measuring import roofline
from draftsmith.scripts.measuring.roofline import ProductCounter, Work, count_round
from tests.tiny_targets import NUM_LAYERS, VOCAB_SIZE, random_prompt, tiny_target

# Of one layer of the tiny Llama: q and o 32 x 32, k and v 16 x 32, three of the MLP 64 x 32; then two norms.
LAYER_MATRICES = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
BACKBONE = NUM_LAYERS * (LAYER_MATRICES + 2 * 32) + 32
LM_HEAD = VOCAB_SIZE * 32
# Multiplications with one row of a pass.
MATRICES = NUM_LAYERS * LAYER_MATRICES + LM_HEAD


def count_bytes(module: nn.Module) -> int:
    return 4 * sum(weight.numel() for weight in module.parameters())


def test_a_round_of_plain_decoding_and_of_a_drafter_without_weights() -> None:
    target = Target(tiny_target("llama", initializer_range=0.3))
    plain = count_round(target, None, None, random_prompt(5))
    assert plain == Work(4 * (BACKBONE + LM_HEAD), 2 * MATRICES)
    chained = count_round(target, NgramDrafter(), chain(3), random_prompt(5))
    assert chained == Work(4 * (BACKBONE + LM_HEAD), 4 * 2 * MATRICES), "the same weights, for four nodes"


def test_a_drafter_reads_its_weights_once_for_every_level() -> None:
    """EAGLE-3 runs its layer and its LM head at every level, `fc` and its norms once; Medusa runs every head once."""
    target = Target(tiny_target("llama", initializer_range=0.3))
    eagle = create_heads("eagle3", target)
    own, fc = count_bytes(eagle), count_bytes(eagle.fc) + count_bytes(eagle.fc_norm)
    rounds = [count_round(target, eagle, chain(depth), random_prompt(5)) for depth in (1, 3)]
    plain = 4 * (BACKBONE + LM_HEAD)
    assert [work.weight_bytes - plain for work in rounds] == [own, 3 * own - 2 * fc]
    medusa = create_heads("medusa", target, num_heads=3)
    for depth in (1, 3):
        work = count_round(target, medusa, chain(depth), random_prompt(5))
        assert work.weight_bytes == plain + count_bytes(medusa)


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "best_seconds", lambda *_: 1e-3)
    assert roofline.measure_bandwidth(10**6, torch.device("cpu")) == pytest.approx(1.0)
    assert roofline.measure_copy(10**6, torch.device("cpu")) == pytest.approx(2.0)


def test_products_of_forward_and_backward_count_and_what_is_compiled_stays_so() -> None:
    """Three products of 5 x 4 x 3: the output, and the gradients of input and weight."""
    was_compiled = []

    def note(graph: Any, _: Any) -> Any:
        was_compiled.append(graph)
        return graph.forward

    @torch.compile(backend=note)
    def add_one(x: Tensor) -> Tensor:
        return x + 1

    with ProductCounter() as counter:
        nn.Linear(4, 3)(torch.randn(5, 4, requires_grad=True)).sum().backward()
        add_one(torch.ones(1))
    assert counter.flops == 3 * 2 * 5 * 4 * 3
    assert was_compiled
