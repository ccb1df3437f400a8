"""Operators made of others: every call asks the allocator for the same, in the same order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem import MemoryProfile, trace

MIB = 1024**2


def cuda(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda")


def square_sum(size: int) -> None:
    torch.ops.aten._euclidean_dist(cuda(size, 64), cuda(size + 8, 64))


COMPOSITES: dict[str, Callable[[int], Any]] = {
    "_euclidean_dist": square_sum,
    "logdet": lambda n: torch.logdet(cuda(n % 64 + 2, 8, 8)),
    "select_backward": lambda n: torch.ops.aten.select_backward(cuda(n), [4, n], 0, 1),
    "std_mean": lambda n: torch.std_mean(cuda(n, 16).to(torch.complex64)),
    "cosine_embedding_loss": lambda n: torch.nn.functional.cosine_embedding_loss(
        cuda(n, 32), cuda(n, 32), torch.ones(n, device="cuda")
    ),
    "block_diag": lambda n: torch.block_diag(cuda(n, 8), cuda(8, n)),
    "linalg_pinv": lambda n: torch.linalg.pinv(cuda(n % 64 + 2, 8)),
    "roll": lambda n: torch.roll(cuda(n, 64), (1, 2), (0, 1)),
}


def told(profile: MemoryProfile) -> list[Any]:
    """Return what a timeline tells of every event."""
    allocations = profile.timeline.allocations
    return [(event > 0, allocations[abs(event) - 1]) for event in profile.timeline.events]


@pytest.mark.parametrize("name", COMPOSITES)
@settings(max_examples=12)
@given(size=st.integers(1, 5000))
def test_a_call_that_is_remembered_is_as_the_first(name: str, size: int) -> None:

    first, second = (trace(lambda: COMPOSITES[name](size), device="cuda") for _ in range(2))
    # An output is told of by the geometry that its maker gave it: the first time an inner operator.
    sizes = [[(made, found.nbytes, found.kind) for made, found in told(p)] for p in (first, second)]
    assert sizes[0] == sizes[1]
    assert first.figures() == second.figures()
    assert first.allocator_peaks() == second.allocator_peaks()


def test_the_host_sees_the_same_as_well() -> None:
    def body() -> None:
        torch.ops.aten._euclidean_dist(torch.empty(64, 8), torch.empty(32, 8))

    first, second = (trace(body) for _ in range(2))
    assert [found.nbytes for _, found in told(first)] == [found.nbytes for _, found in told(second)]


def test_out_of_memory_within_a_repeated_composite_gives_back_what_it_had() -> None:
    def body() -> tuple[int, int, int]:
        before = torch.cuda.memory_allocated()
        square_sum(4096)  # and cuBLAS's buffer stays
        rows, columns = cuda(4096, 64), cuda(4104, 64)
        hoard = cuda(18 * MIB // 4)
        allocated = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError, match="_euclidean_dist requested"):
            torch.ops.aten._euclidean_dist(rows, columns)
        after = torch.cuda.memory_allocated()
        del hoard
        torch.ops.aten._euclidean_dist(rows, columns)
        return before, allocated, after

    found: list[tuple[int, int, int]] = []
    trace(lambda: found.append(body()), device="cuda", gpu="a100", memory=110 * MIB + 490 * MIB)
    ((before, allocated, after),) = found
    assert before == 0
    assert allocated == after
