"""The attention of drafted blocks, on a CPU and in the form for CUDA, against one softmax over a written-out mask."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import draftsmith.heads.modules.block_view as module
from draftsmith.heads.modules.block_view import BlockView

LENGTH, SIZE = 37, 4


@pytest.fixture(params=["cpu", "cuda"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The form for CUDA runs here uncompiled: torch refuses gradients on a CPU only because kernels for them lack."""
    if request.param == "cuda":
        monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(module, "_compiled", lambda: (flex.flex_attention, flex.create_block_mask))
        monkeypatch.setattr(BlockView, "attend", BlockView._attend_in_one_call)
    else:
        monkeypatch.setattr(module, "QUERY_CHUNK", 3 * SIZE)
    return str(request.param)


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], slots: Tensor, mask: Tensor
) -> Tensor:
    keys, values = (
        torch.cat(pair, dim=2).repeat_interleave(q.shape[1] // k.shape[1], 1)
        for pair in zip(context, (k, v), strict=True)
    )
    seen = torch.zeros(len(q), q.shape[2], keys.shape[2], dtype=torch.bool)
    for b in range(len(q)):
        for row in range(q.shape[2]):
            block, place = divmod(row, SIZE)
            seen[b, row, : slots[b, block] + 1] = True
            begin = LENGTH + block * SIZE
            seen[b, row, begin : begin + SIZE] = mask[place]
    scores = (q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ values


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read while torch traces
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_equals_dense_attention(way: str, groups: int, is_causal: bool) -> None:
    torch.manual_seed(groups)
    slots = torch.tensor([[5, 30, 0, 36, 5, 12, 20], [1, 2, 3, 4, 36, 0, 0]])
    rows = slots.shape[1] * SIZE
    mask = torch.ones(SIZE, SIZE, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    q = torch.randn(2, 4, rows, 16, requires_grad=True)
    k, v = (torch.randn(2, groups, rows, 16, requires_grad=True) for _ in range(2))
    context = tuple(torch.randn(2, groups, LENGTH, 16, requires_grad=True) for _ in range(2))
    view = BlockView(slots, mask, LENGTH)
    slope = torch.randn(2, 4, rows, 16)
    inputs = [q, k, v, *context]
    for _ in range(2):  # a second layer uses the same view
        found = view.attend(q, k, v, (context[0], context[1]))
        expected = attend_densely(q, k, v, (context[0], context[1]), slots, mask)
        torch.testing.assert_close(found, expected)
        both = (torch.autograd.grad((x * slope).sum(), inputs) for x in (found, expected))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
