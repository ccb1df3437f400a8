"""Copies between host and GPU: temporaries where torch makes them, and pinned memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem import trace
from pytest_torchmem.profile.timeline import Timeline
from tests.results import in_a_trace

ROWS, COLUMNS = 64, 128
N = ROWS * COLUMNS


def host(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=dtype)


def gpu(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=dtype, device="cuda")


def made(body: Callable[[], Any]) -> list[int]:
    """Return the bytes of everything that a program makes on the GPU, in order."""
    timeline: Timeline = trace(body, device="cuda").timeline
    return [timeline.allocations[event - 1].nbytes for event in timeline.events if event > 0]


@pytest.mark.parametrize("again", ["first", "remembered"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # From host to GPU. Contiguous and of one type: straight into the result.
        (lambda: host().cuda(), [4 * N]),
        (lambda: host().t().cuda(), [4 * N]),  # both ends lie in the same order
        (lambda: host()[:, ::2].cuda(), [2 * N]),  # gathered on the host
        (lambda: host().to("cuda", torch.bfloat16), [2 * N]),  # converted on the host
        (lambda: host().to("cuda", torch.bfloat16, non_blocking=True), [2 * N, 4 * N]),
        (lambda: host().to("cuda", torch.float64, non_blocking=True), [8 * N, 4 * N]),
        (lambda: host()[:, ::2].cuda(non_blocking=True), [2 * N]),
        (lambda: host().to("cuda", memory_format=torch.contiguous_format), [4 * N]),
        (lambda: host().t().to("cuda", memory_format=torch.contiguous_format), [4 * N]),
        # From GPU to host.
        (lambda: gpu().cpu(), [4 * N]),
        (lambda: gpu().t().cpu(), [4 * N]),
        (lambda: gpu()[:, ::2].cpu(), [4 * N, 2 * N]),  # gathered on the GPU
        (lambda: gpu().to("cpu", torch.bfloat16), [4 * N]),  # converted on the host
        (lambda: gpu().to("cpu", torch.bfloat16, non_blocking=True), [4 * N, 2 * N]),
        (lambda: gpu()[0].expand(ROWS, COLUMNS).cpu(), [4 * N, 4 * N]),
        (lambda: gpu()[0].expand(ROWS, COLUMNS).tolist(), [4 * N, 4 * N]),
        (lambda: gpu()[:, ::2].requires_grad_().tolist(), [4 * N, 2 * N]),
        # Conjugated where it lies.
        (lambda: gpu(torch.cfloat).conj().cpu(), [8 * N, 8 * N]),
        (lambda: gpu(torch.cfloat).conj().tolist(), [8 * N, 8 * N]),
        (lambda: gpu(torch.cfloat).conj().numpy(force=True), [8 * N, 8 * N]),
        (lambda: host(torch.cfloat).conj().cuda(), [8 * N]),
        # Into what is there.
        (lambda: gpu().copy_(host()), [4 * N]),
        (lambda: gpu().copy_(host(torch.float64)), [4 * N]),
        (lambda: gpu().copy_(host(torch.float64), non_blocking=True), [4 * N, 8 * N]),
        (lambda: gpu().copy_(host()[0]), [4 * N]),  # repeated on the host
        (lambda: gpu().t().copy_(host().view(COLUMNS, ROWS)), [4 * N, 4 * N]),
        (lambda: gpu()[:, ::2].copy_(host()[:, ::2]), [4 * N, 2 * N]),
        (lambda: host().copy_(gpu()[0]), [4 * N, 4 * N]),
        (lambda: host().copy_(gpu(torch.bfloat16)), [2 * N]),
        (lambda: host().t().copy_(gpu().t()), [4 * N]),
        # On one device there are none.
        (lambda: gpu().copy_(gpu(torch.float64)[0]), [4 * N, 8 * N]),
    ],
)
def test_what_the_gpu_holds_beside(body, expected, again):
    """native/cuda/Copy.cu, ``copy_kernel_cuda``."""
    if again == "remembered":
        made(body)
    assert made(body) == expected


def test_lists_are_copied_one_by_one() -> None:
    """native/cuda/ForeachBinaryOpList.cu, ``foreach_tensor_copy_list_kernel_cuda_``."""

    def body() -> None:
        onto, of = [gpu(), gpu()], [host(), host(torch.float64)]
        torch._foreach_copy_(onto, of, non_blocking=True)

    assert made(body) == [4 * N, 4 * N, 8 * N]


@in_a_trace("cuda")
def test_values_survive_a_copy_through_temporaries() -> None:
    x = torch.arange(12).view(3, 4)
    there = x.t()[::2].to("cuda", torch.int32)
    assert there.tolist() == [[0, 4, 8], [2, 6, 10]]
    back = there.t().to("cpu", torch.int64, non_blocking=True)
    assert back.tolist() == [[0, 2], [4, 6], [8, 10]]
    into = torch.zeros(4, 3, dtype=torch.int16, device="cuda").t()
    into.copy_(x)
    assert into.cpu().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_gradients_cross_as_well() -> None:
    def body() -> None:
        gpu().requires_grad_().to("cpu", torch.float64).backward(host(torch.float64))

    # The gradient is converted on the host, and is the leaf's own.
    assert made(body) == [4 * N, 4 * N]


@in_a_trace("cuda")
def test_pinned_memory_is_the_hosts() -> None:
    made = [torch.empty(N, pin_memory=True), torch.zeros(N).pin_memory()]
    made.append(gpu().to("cpu", non_blocking=True))
    assert torch.cuda.memory_allocated() == 0
    moved = made[0].to("cuda", non_blocking=True)
    assert torch.cuda.memory_allocated() == moved.nbytes
    assert all(tensor.is_pinned() for tensor in made)
    assert not any(tensor.is_pinned() for tensor in (moved, host()))


@in_a_trace("cuda")
def test_saved_tensors_on_the_host() -> None:
    """``save_on_cpu(pin_memory=True)`` holds nothing on the GPU between forward and backward."""
    x = gpu().requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        z = x.exp().sum()
    live = torch.cuda.memory_allocated()
    z.backward()
    assert [live, torch.cuda.memory_allocated()] == [4 * N + 512, 8 * N + 512]


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 2),
    dtypes=st.tuples(DTYPES, DTYPES),
    to_gpu=st.booleans(),
    non_blocking=st.booleans(),
)
def test_any_copy(shape, order, step, dtypes, to_gpu, non_blocking):
    """native/cuda/Copy.cu: what is converted or put in order on the GPU is a temporary of it."""
    axes = list(range(len(shape)))
    order.shuffle(axes)
    larger = [size * step for size in shape]
    cut = tuple(slice(None, None, step) for _ in shape)

    def source(device: str) -> torch.Tensor:
        return torch.empty(larger, dtype=dtypes[0], device=device)[cut].permute(axes)

    def body() -> None:
        places = ("cpu", "cuda") if to_gpu else ("cuda", "cpu")
        of = source(places[0])
        onto = torch.empty(of.shape, dtype=dtypes[1], device=places[1])
        before = torch.cuda.memory_allocated()
        onto.copy_(of, non_blocking)
        assert torch.cuda.memory_allocated() == before

    of, converted = source("cpu"), source("cpu").to(dtypes[1])
    other = dtypes[0] is not dtypes[1]
    expected: list[int] = []
    if to_gpu:
        expected += [of.nbytes] if other and non_blocking else []
    elif non_blocking:
        expected += [converted.nbytes] if other else []
        expected += [] if converted.is_contiguous() else [converted.nbytes]
    else:
        expected += [] if of.is_contiguous() else [of.nbytes]
    assert made(body)[1:] == expected
