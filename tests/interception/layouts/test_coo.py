"""Sparse COO tensors, against the real allocator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem


def matrix(device: str = "cpu") -> Tensor:
    places = torch.randint(0, 100, (2, 400), generator=torch.Generator().manual_seed(0))
    return torch.sparse_coo_tensor(places.to(device), torch.ones(400, device=device), (100, 100))


def product(device: str = "cpu") -> Any:
    weight = torch.randn(100, 8, device=device, requires_grad=True)
    torch.sparse.mm(matrix(device), weight).sum().backward()
    return weight.grad


def graph_convolution(device: str = "cpu") -> Any:
    edges, layer = matrix(device).coalesce(), nn.Linear(16, 8).to(device)
    layer(torch.sparse.mm(edges, torch.randn(100, 16, device=device))).relu().sum().backward()
    return layer


def entries_of(device: str = "cpu") -> Any:
    """What ``SparseAdam`` takes of its states."""
    rows = torch.sparse_coo_tensor([[0, 2, 3]], torch.ones(3, 64), (5, 64)).coalesce()
    return torch.randn(5, 64, device=device).sparse_mask(rows.to(device))


PROGRAMS: tuple[Callable[..., Any], ...] = (
    product,
    graph_convolution,
    lambda device="cpu": matrix(device).coalesce().indices(),
    lambda device="cpu": matrix(device).t().coalesce(),
    lambda device="cpu": matrix(device) @ torch.randn(100, device=device),
    lambda device="cpu": torch.cat([matrix(device), matrix(device)]),
    lambda device="cpu": matrix(device).coalesce().abs().sin(),
    lambda device="cpu": torch.sparse.softmax(matrix(device).coalesce(), 1),
    lambda device="cpu": torch.sparse.sum(matrix(device), 0),
    entries_of,
    lambda device="cpu": torch.zeros(3, 4, layout=torch.sparse_coo, device=device),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_measured(program: Callable[..., Any]) -> None:
    assert torchmem.trace(program, host="here").peak == torchmem.measure(program).peak


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_fake_cuda(program: Callable[..., Any]) -> None:

    torchmem.trace(lambda: program("cuda"), device="cuda")


def test_a_copy_takes_the_indices_and_values_of_the_other() -> None:
    def step() -> None:
        three, five = (
            torch.sparse_coo_tensor(torch.arange(rows).view(1, rows), torch.ones(rows, 3), (9, 3))
            for rows in (3, 5)
        )
        three.copy_(five)
        assert three.to_dense().sum() == 15

    assert torchmem.trace(step, host="here").figures() == torchmem.measure(step).figures()
