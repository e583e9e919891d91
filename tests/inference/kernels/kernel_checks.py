"""Checks of the Triton kernels that run interpreted, on the CPU, and on a GPU. Inputs and references are on the CPU."""

import itertools
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.kernels.packed_masks import WORDS, pack_chain, pack_tree, unpack_mask
from draftsmith.inference.targets.masks import compute_ancestors

ZERO = torch.zeros(1, dtype=torch.long)


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Tensor, device: torch.device) -> Tensor:
    """The kernels' result on a device, on the CPU."""
    from draftsmith.inference.kernels.triton_kernel import attend_packed

    query, key, value, packed = (values.to(device) for values in (query, key, value, packed))
    return attend_packed(query, key, value, packed, query.shape[-1] ** -0.5).cpu()


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
CASES: list[tuple[Any, ...]] = [
    (1, 4, 4, 1, 16, 16, 64, None),
    (4, 8, 1, 5, 32, 32, 640, None),
    (2, 16, 2, 9, 80, 48, 300, 70),
    (3, 4, 1, 16, 20, 20, 700, 5),
    (1, 8, 1, 60, 64, 64, 192, None),
    (1, 4, 1, 80, 24, 40, 300, 150),
]
LENGTHS = [0, 60, 510]


def check_numbers(case: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    batch, num_heads, num_groups, num_nodes, size, value_size, num_slots, window = case
    generator = torch.Generator().manual_seed(num_nodes)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    query = draw(batch, num_nodes, num_heads, size).transpose(1, 2)  # as layers hand it over
    capacity = num_slots + 70
    memory = [draw(batch, num_groups, capacity, width) for width in (size, value_size)]
    key, value = (rows[:, :, :num_slots] for rows in memory)
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
    found = attend(query, *(rows.to(device)[:, :, :num_slots] for rows in memory), packed, device)
    error, stock_error = (float((one.double() - expected).abs().max()) for one in (found, stock))
    print(f"{device} {dtype} {case}: error {error:.1e}, of sdpa on the CPU {stock_error:.1e}")
    bound = 2e-6 if dtype == torch.float32 else 2**-8 * float(expected.abs().max())
    if dtype == torch.bfloat16 and device.type == "cuda":  # the weights of values are rounded, too
        bound += 2**-9 * float(attend_exactly(query, key, value.abs(), packed).max())
    assert error <= bound


def check_a_wrong_ancestor(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, size, 16, generator=generator) for size in (12, 64, 64))
    lengths = torch.tensor([[30]])
    packed = pack_tree(draw_trees(1, 12, generator), lengths, lengths, origin=ZERO, window=None)
    expected = attend_exactly(query, key, value, packed)
    packed[0, 0, 7, WORDS] ^= 0b10
    wrong = (attend(query, key, value, packed, device) - expected).abs().amax((0, 2, 3)) > 1e-3
    assert wrong.nonzero().flatten().tolist() == [7]


def check_independence(length: int, dtype: torch.dtype, device: torch.device) -> None:
    """A text of 7 tokens: token by token, as a prompt, as the end of a prompt, as a chain, and scattered over a tree of
    16 nodes beside three other rows, and over one of 60 nodes. The boundaries of tiles and splits lie inside the text.
    All bits are equal."""
    generator = torch.Generator().manual_seed(length)
    num_tokens, num_slots = 7, length + 64
    draw = lambda *shape: torch.randn(*shape, 24, generator=generator).to(dtype)  # noqa: E731
    query = draw(1, 4, num_tokens)
    key, value = (draw(1, 1, num_slots) for _ in range(2))
    lengths = torch.tensor([[length]])

    def pack(parents: list[int], start: int) -> Tensor:
        return pack_tree(
            compute_ancestors(torch.tensor([parents])), lengths + start, lengths + start, origin=ZERO, window=None
        )

    chain = attend(query, key, value, pack(list(range(-1, num_tokens - 1)), 0), device)
    for token in range(num_tokens):
        view = length + token + 1
        alone = attend(query[:, :, token : token + 1], key[:, :, :view], value[:, :, :view], pack([-1], token), device)
        assert torch.equal(alone[:, 0], chain[:, token])
    prompt = attend(query, key, value, pack_chain(lengths, num_tokens, origin=ZERO, window=None), device)
    assert torch.equal(prompt, chain)
    whole = pack_chain(torch.zeros_like(lengths), length + num_tokens, origin=ZERO, window=None)
    prompt = attend(torch.cat([draw(1, 4, length), query], 2), key, value, whole, device)
    assert torch.equal(prompt[:, length:], chain)
    for num_nodes, batch in ((16, 4), (60, 1)):
        order = torch.randperm(num_nodes - 1, generator=generator)
        nodes = [0, *order[: num_tokens - 1].add(1).sort().values.tolist()]
        parents = [-1] + [0] * (num_nodes - 1)
        for parent, node in itertools.pairwise(nodes):
            parents[node] = parent
        tree = [draw(batch, rows.shape[1], num_nodes) for rows in (query, key, value)]
        for rows, own in zip(tree, (query, key[:, :, length:], value[:, :, length:]), strict=True):
            rows[:1, :, nodes] = own[:, :, :num_tokens]
        past = [torch.cat([own[:, :, :length], draw(batch - 1, 1, length)]) for own in (key, value)]
        packed = pack(parents, 0)
        if batch > 1:
            others = torch.tensor([[0], [length // 2], [length]])
            beside = pack_tree(draw_trees(3, num_nodes, generator), others, others, origin=ZERO, window=None)
            packed = torch.cat([packed, beside])
        found = attend(tree[0], *(torch.cat(pair, 2) for pair in zip(past, tree[1:], strict=True)), packed, device)
        assert torch.equal(found[:1, nodes], chain)


# Rows, inputs, outputs, whether there is a bias: not all are multiples of the tiles.
PRODUCTS: list[tuple[Any, ...]] = [
    (1, 256, 64, False),
    (7, 20, 33, True),
    (16, 300, 96, True),
    (65, 128, 40, False),
    (130, 76, 130, True),
]


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, device: torch.device) -> Tensor:
    """The kernel's product on a device, on the CPU."""
    from draftsmith.inference.kernels.triton_linear import multiply_rows

    return multiply_rows(rows.to(device), weight.to(device), None if bias is None else bias.to(device)).cpu()


def check_products(case: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    num_rows, num_inputs, num_outputs, has_bias = case
    generator = torch.Generator().manual_seed(num_rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    rows, weight, bias = draw(num_rows, num_inputs), draw(num_outputs, num_inputs), draw(num_outputs)
    found = multiply(rows, weight, bias if has_bias else None, device)
    assert found.dtype == dtype
    expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double() if has_bias else None)
    size = rows.double().abs() @ weight.double().abs().T  # of the numbers that are added
    # A sum in float32 is rounded at each addition, and then to the dtype.
    bound = num_inputs * 2**-24 * size + torch.finfo(dtype).eps / 2 * expected.abs()
    assert ((found.double() - expected).abs() <= bound * 1.01).all()


def check_product_rows(dtype: torch.dtype, device: torch.device) -> None:
    """A row's numbers are the same in every place and beside any number of rows. Inputs that cancel each other show
    another order of additions."""
    generator = torch.Generator().manual_seed(0)
    large = 2.0**15 if dtype == torch.float16 else 2.0**40
    rows = torch.randn(130, 300, generator=generator)
    rows[:, torch.randperm(300, generator=generator)[:2]] = torch.tensor([large, -large])
    rows, weight = rows.to(dtype), torch.ones(40, 300, dtype=dtype)
    expected = multiply(rows, weight, None, device)
    assert not torch.equal(multiply(rows.flip(1), weight, None, device), expected), "the order shows"
    for count in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129):
        assert torch.equal(multiply(rows[:count], weight, None, device), expected[:count])
    for start in (1, 5, 16, 60, 64, 100):
        assert torch.equal(multiply(rows[start:], weight, None, device), expected[start:])
        assert torch.equal(multiply(rows[start : start + 1], weight, None, device), expected[start : start + 1])
