"""The Triton kernels in Triton's interpreter, on the CPU: numbers, independence of the rest of a pass, whole decodes.

The interpreter has to be chosen before Triton is imported, so `test_the_others_in_a_process_of_their_own` runs the
other tests. The interpreter does not show how a GPU rounds inside a product, nor races or speed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from inference import DynamicTree, Target, generate
from inference.kernels.packed_masks import WORDS, pack_chain, pack_tree, unpack_mask
from inference.trees.token_tree import compute_ancestors
from tests.conftest import REPOSITORY
from tests.lossless.near_tie import assert_same_text
from tests.scripted_drafter import ScriptedDrafter
from tests.tiny_targets import VOCAB_SIZE, random_prompt, tiny_target

pytest.importorskip("triton", reason="the optional extra `triton` is not installed")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="runs inside test_the_others_in_a_process_of_their_own, under TRITON_INTERPRET=1"
)
ZERO = torch.zeros(1, dtype=torch.long)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(IS_INTERPRETED, reason="it starts this process")
def test_the_others_in_a_process_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor) -> Tensor:
    from inference.kernels.triton_kernel import attend_packed

    return attend_packed(query, key, value, packed, query.shape[-1] ** -0.5)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, packed: Tensor) -> Tensor:
    """In float64: [B, N, H, v]."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (rows.double() for rows in (query, key, value))
    mask = unpack_mask(packed, key.shape[2], torch.float64)
    scores = query @ key.repeat_interleave(group, 1).mT * query.shape[-1] ** -0.5 + mask
    return (scores.softmax(-1) @ value.repeat_interleave(group, 1)).transpose(1, 2)


def draw_trees(batch: int, num_nodes: int, generator: torch.Generator) -> Tensor:
    """Ancestors of random trees, some of them deep."""
    parents = [
        [-1] + [int(torch.randint(max(0, node - 9), node, (), generator=generator)) for node in range(1, num_nodes)]
        for _ in range(batch)
    ]
    return compute_ancestors(torch.tensor(parents))


# Rows, query heads, key-value heads, nodes, sizes of keys and values, slots, window.
CASES = [
    (1, 4, 4, 1, 16, 16, 64, None),
    (4, 8, 1, 5, 32, 32, 640, None),
    (2, 16, 2, 9, 80, 48, 300, 70),
    (3, 4, 1, 16, 20, 20, 700, 5),
    (1, 8, 1, 60, 64, 64, 192, None),
    (1, 4, 1, 80, 24, 40, 1300, 600),
]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, num_heads, num_groups, num_nodes, size, value_size, num_slots, window = case
    generator = torch.Generator().manual_seed(num_nodes)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    query = draw(batch, num_nodes, num_heads, size).transpose(1, 2)  # as layers hand it over
    capacity = num_slots + 70
    key, value = (draw(batch, num_groups, capacity, width)[:, :, :num_slots] for width in (size, value_size))
    lengths = torch.randint(0, num_slots - num_nodes + 1, (batch, 1), generator=generator)
    packed = pack_tree(draw_trees(batch, num_nodes, generator), lengths, lengths, origin=ZERO, window=window)
    expected = attend_exactly(query, key, value, packed)
    group = num_heads // num_groups
    stock = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(group, 1),
        value.repeat_interleave(group, 1),
        attn_mask=unpack_mask(packed, num_slots, dtype),
    ).transpose(1, 2)
    error, stock_error = (
        float((found.double() - expected).abs().max()) for found in (attend(query, key, value, packed), stock)
    )
    print(f"{dtype} {case}: error {error:.1e}, of sdpa {stock_error:.1e}")
    assert error <= (2e-6 if dtype == torch.float32 else 2**-8 * float(expected.abs().max()))


@interpreted
def test_a_wrong_ancestor_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, size, 16, generator=generator) for size in (12, 64, 64))
    lengths = torch.tensor([[30]])
    packed = pack_tree(draw_trees(1, 12, generator), lengths, lengths, origin=ZERO, window=None)
    expected = attend_exactly(query, key, value, packed)
    packed[0, 0, 7, WORDS] ^= 0b10
    wrong = (attend(query, key, value, packed) - expected).abs().amax((0, 2, 3)) > 1e-3
    assert wrong.nonzero().flatten().tolist() == [7]


@interpreted
@pytest.mark.parametrize("length", [0, 60, 510])
def test_a_row_does_not_depend_on_the_rest_of_the_pass(length: int) -> None:
    """A text of 7 tokens: token by token, as a prompt, as a chain, and scattered over a tree of 16 nodes beside three
    other rows, and over one of 60 nodes. The boundaries of tiles and splits lie inside the text. All bits are equal."""
    generator = torch.Generator().manual_seed(length)
    num_tokens, num_slots = 7, length + 64
    query = torch.randn(1, 4, num_tokens, 24, generator=generator)
    key, value = (torch.randn(1, 1, num_slots, 24, generator=generator) for _ in range(2))
    lengths = torch.tensor([[length]])

    def pack(parents: list[int], start: int) -> Tensor:
        return pack_tree(
            compute_ancestors(torch.tensor([parents])), lengths + start, lengths + start, origin=ZERO, window=None
        )

    chain = attend(query, key, value, pack(list(range(-1, num_tokens - 1)), 0))
    for token in range(num_tokens):
        view = length + token + 1
        alone = attend(query[:, :, token : token + 1], key[:, :, :view], value[:, :, :view], pack([-1], token))
        assert torch.equal(alone[:, 0], chain[:, token])
    prompt = attend(query, key, value, pack_chain(lengths, num_tokens, origin=ZERO, window=None))
    assert torch.equal(prompt, chain)
    for num_nodes, batch in ((16, 4), (60, 1)):
        order = torch.randperm(num_nodes - 1, generator=generator)
        nodes = [0, *order[: num_tokens - 1].add(1).sort().values.tolist()]
        parents = [-1] + [0] * (num_nodes - 1)
        for parent, node in itertools.pairwise(nodes):
            parents[node] = parent
        tree = [torch.randn(batch, rows.shape[1], num_nodes, 24, generator=generator) for rows in (query, key, value)]
        for rows, own in zip(tree, (query, key[:, :, length:], value[:, :, length:]), strict=True):
            rows[:1, :, nodes] = own[:, :, :num_tokens]
        past = [
            torch.cat([own[:, :, :length], torch.randn(batch - 1, 1, length, 24, generator=generator)])
            for own in (key, value)
        ]
        packed = pack(parents, 0)
        if batch > 1:
            others = torch.tensor([[0], [length // 2], [length]])
            beside = pack_tree(draw_trees(3, num_nodes, generator), others, others, origin=ZERO, window=None)
            packed = torch.cat([packed, beside])
        found = attend(tree[0], *(torch.cat(pair, 2) for pair in zip(past, tree[1:], strict=True)), packed)
        assert torch.equal(found[:1, nodes], chain)


@interpreted
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_whole_decode(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads; Mistral has a window of 8 tokens. The text is transformers' own, with near-ties shown."""
    from inference.kernels import triton_kernel

    model = tiny_target(family, initializer_range=0.3, num_hidden_layers=2)
    target, calls = Target(model), []
    assert target.masks.packs_all
    stock = triton_kernel.attend_packed
    monkeypatch.setattr(
        triton_kernel, "attend_packed", lambda *args: calls.append(args[3].shape) or stock(*args), raising=True
    )
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    drafter = ScriptedDrafter([expected[0]], VOCAB_SIZE, feature_layers=(1,))
    output = generate(
        target, drafter, prompt, max_new_tokens=8, do_sample=False, tree=DynamicTree(depth=3, top_k=2, num_nodes=6)
    )
    assert output.stats.acceptance_length > 1
    assert {shape[-1] - WORDS for shape in calls} == {0, 1}
    assert len(calls) == 2 * output.stats.num_target_forwards
    assert_same_text(model, expected, output.sequences)


@interpreted
def test_a_verify_pass_is_one_graph() -> None:
    target = Target(tiny_target("llama", num_hidden_layers=1))
    cache = target.new_cache(1, 128)
    target.prefill(cache, random_prompt(6), torch.tensor([6]))
    cache.open_slots(4)
    from inference.trees.token_tree import TokenTree

    parents = torch.tensor([[-1, 0, 0, 1]])
    tree = TokenTree(random_prompt(4), parents, torch.tensor([[0, 1, 1, 2]]), torch.zeros(1, 4))
    expected = target.verify(cache, tree)
    compiled = torch.compile(target.verify, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(cache, tree).logits, expected.logits)
