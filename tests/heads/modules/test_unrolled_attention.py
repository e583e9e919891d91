"""The attention of the training-time test."""

from collections.abc import Callable
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import draftsmith.heads.modules.unrolled_attention as module
from draftsmith.heads.modules.unrolled_attention import attend_in_chunks, attend_unrolled

Attend = Callable[..., Tensor]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, is_causal: bool) -> tuple[object, ...]:
    """The CPU's kernel in the place of CUDA's, with the same arguments and results."""
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, *(repeat(x, q) for x in (k, v)), dropout, is_causal
    )
    return output, total, None, None, q.shape[2], k.shape[2], torch.tensor(1), torch.tensor(2), None


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, *rest: object
) -> list[Tensor]:
    cum_q, cum_k, max_q, max_k, dropout, is_causal, state, unused = rest
    assert (cum_q, cum_k, max_q, max_k, state, unused) == (None, None, q.shape[2], k.shape[2], 1, 2)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = kernel(grad, q, *(repeat(x, q) for x in (k, v)), output, total, dropout, is_causal)
    return [x.unflatten(1, (like.shape[1], -1)).sum(2) for x, like in zip(grads, (q, k, v), strict=True)]


def repeat(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@pytest.fixture(params=["cpu", "chunks", "cuda"])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    if request.param == "cuda":
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash_forward)
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", flash_backward)
        monkeypatch.setattr(module, "_has_flash_kernel", lambda q: True)
    return attend_in_chunks if request.param == "chunks" else attend_unrolled


def dense_mask(num_steps: int, length: int, window: int) -> Tensor:
    """[K * T, K * T]: query (k, i) sees key (0, j) for i - window < j <= i, and key (m, i) for 1 <= m <= k."""
    mask = torch.zeros(num_steps * length, num_steps * length, dtype=torch.bool)
    for k in range(num_steps):
        for i in range(length):
            for j in range(max(0, i + 1 - window), i + 1):
                mask[k * length + i, j] = True
            for m in range(1, k + 1):
                mask[k * length + i, m * length + i] = True
    return mask


def attend_densely(q: list[Tensor], k: list[Tensor], v: list[Tensor], window: int) -> list[Tensor]:
    """All steps as one softmax over all K * T keys, under an explicit mask."""
    length, repeats = q[0].shape[2], q[0].shape[1] // k[0].shape[1]
    queries = torch.cat(q, dim=2)
    keys, values = (torch.cat(x, dim=2).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = queries @ keys.transpose(-1, -2) / q[0].shape[-1] ** 0.5
    scores = scores.masked_fill(~dense_mask(len(q), length, window), float("-inf"))
    return list((scores.softmax(-1) @ values).split(length, dim=2))


def draw(
    steps: int, groups: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Large scores, so that weights are far from even."""
    torch.manual_seed(groups)
    q = [(3 * torch.randn(2, 4, length, 8)).to(dtype).requires_grad_() for _ in range(steps)]
    k, v = ([torch.randn(2, groups, length, 8).to(dtype).requires_grad_() for _ in range(steps)] for _ in range(2))
    return q, k, v


def run(attend: Attend, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    return [attend(q[step], k[: step + 1], v[: step + 1]) for step in range(len(q))]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    weighted = [(torch.randn(each.shape) * each.float()).sum() for each in outputs]
    return list(torch.autograd.grad(weighted, inputs))


@pytest.mark.parametrize(
    ("groups", "query_chunk", "window"),
    [(1, 5, None), (2, 256, None), (4, 1, None), (2, 3, 1), (2, 256, 4), (2, 3, 4), (2, 256, 20)],
)
def test_equals_dense_attention(
    attend: Attend, groups: int, query_chunk: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_CHUNK", query_chunk)
    q, k, v = draw(4, groups, 13)
    expected, found = attend_densely(q, k, v, window or 1000), run(partial(attend, window=window), q, k, v)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    inputs = [*q, *k, *v]
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_as_near_as_its_rounding(attend: Attend) -> None:
    """Longer than the kernel's own blocks."""
    q, k, v = draw(3, 2, 700, torch.bfloat16)
    wide = [[x.detach().float().requires_grad_() for x in part] for part in (q, k, v)]
    found, expected = run(attend, q, k, v), run(attend_unrolled, *wide)
    assert all(output.dtype == torch.bfloat16 for output in found)
    both = gradients(found, [*q, *k, *v]), gradients(expected, [x for part in wide for x in part])
    for one, other in (*zip(found, expected, strict=True), *zip(*both, strict=True)):
        assert (one.float() - other).norm() < 0.02 * other.norm()


def test_no_tensor_of_all_pairs_is_kept_for_the_backward_pass(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_CHUNK", 16)
    length = 512
    q = torch.randn(1, 4, length, 8, requires_grad=True)
    k, v = ([torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)] for _ in range(2))
    kept: dict[int, int] = {}  # what views share counts once

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attend(q, k, v).sum().backward()
    assert kept
    assert sum(kept.values()) < 4 * length * length / 4  # half of one causal score per head and pair


def test_the_kernel_for_cuda_takes_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registered shapes, on tensors without storage: grouped keys, an odd length, forward and backward."""
    monkeypatch.setattr(module, "_has_flash_kernel", lambda q: True)
    context = MagicMock()  # the autograd engine starts no thread for a device that is not there
    with FakeTensorMode(), torch.no_grad():
        make = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        inputs = [make(2, 8, 33, 64), *(make(2, 2, 33, 64) for _ in range(6))]
        output = module._MergedAttention.forward(context, *inputs)
        context.saved_tensors = context.save_for_backward.call_args.args
        grads = module._MergedAttention.backward(context, torch.empty_like(output))
    assert (output.shape, output.dtype, output.device.type) == (inputs[0].shape, torch.bfloat16, "cuda")
    assert [x.shape for x in grads] == [x.shape for x in inputs]
