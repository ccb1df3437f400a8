"""Sparse tensors, compressed and as coordinates."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem
from tests.modules import Parts
from tests.results import as_measured, in_a_trace
from tests.tracing.programs import differences

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

ROWS, COLUMNS = [0, 2, 3, 6], [0, 3, 2, 1, 4, 5]


def csr(grad: bool = False) -> Tensor:
    """Return a matrix of three rows and six columns with six entries."""
    return torch.sparse_csr_tensor(ROWS, COLUMNS, torch.randn(6), (3, 6), requires_grad=grad)


def csc() -> Tensor:
    return torch.sparse_csc_tensor(ROWS, COLUMNS, torch.randn(6), (6, 3))


class Neighbours(Parts):
    """A layer of a graph network: a fixed sparse matrix by what a linear layer makes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.adjacency @ self.linear(x)


def neighbours() -> nn.Module:
    return Neighbours(linear=nn.Linear(8, 4), adjacency=csr())


class Product(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


class Reduced(Parts):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.sparse.mm(left, right, self.reduce)


class Sampled(nn.Module):
    def forward(self, pattern: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.sparse.sampled_addmm(pattern, left, right).sum()


def dense(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=requires_grad)


CASES: dict[str, tuple[nn.Module, Callable[[], tuple[Any, ...]]]] = {
    "a buffer": (neighbours(), lambda: (dense(6, 8, requires_grad=False),)),
    "a product": (Product(), lambda: (csr(), dense(6, 8))),
    "a product, with gradients of the entries": (Product(), lambda: (csr(True), dense(6, 8))),
    "by columns": (Product(), lambda: (csc(), dense(3, 8))),
    "from the left": (Product(), lambda: (dense(8, 3), csr())),
    "a matrix laid out otherwise": (Product(), lambda: (csr(), dense(8, 6).t())),
    "sums": (Reduced(reduce="sum"), lambda: (csr(True), dense(6, 8))),
    "means": (Reduced(reduce="mean"), lambda: (csr(True), dense(6, 8))),
    "largest": (Reduced(reduce="max"), lambda: (csr(True), dense(6, 8))),
    "sampled": (Sampled(), lambda: (csr(), dense(3, 7), dense(7, 6))),
}


@pytest.mark.parametrize("case", list(CASES))
def test_as_the_real_allocator(case: str) -> None:
    model, arguments = CASES[case]
    as_measured(model, *arguments())


def test_made_in_the_step() -> None:
    def program(values: Tensor, x: Tensor) -> None:
        (torch.sparse_csr_tensor(ROWS, COLUMNS, values, (3, 6)) @ x).sum().backward()
        torch.tensor([[1.0, 0.0, 2.0]]).to_sparse_csr()

    inputs = (torch.randn(6, requires_grad=True), torch.randn(6, 8, requires_grad=True))
    traced = torchmem.trace(program, *inputs, host="here")
    assert differences(traced, torchmem.measure(program, *inputs)) == {}


def test_a_matrix_of_unknown_values_has_at_most_an_entry_for_each() -> None:
    found: list[Tensor] = []
    x = torch.randn(40, 50)
    profile = torchmem.trace(lambda: found.append((x * 2).to_sparse_csr()), values="none")
    assert found[0].values().numel() == 2000
    assert re.match(r".*test_compressed\.py:\d+: aten::nonzero .*at most", profile.warnings[0])


def test_on_cuda_the_library_knows_its_workspace() -> None:
    profile = torchmem.trace(neighbours(), torch.randn(6, 8), device="cuda")
    assert "aten::addmm" in profile.unknown_workspaces


@in_a_trace("cuda")
def test_on_cuda_a_matrix_says_where_it_is() -> None:
    matrix = csr().cuda()
    assert matrix.device == matrix.values().device == torch.device("cuda", 0)
    assert (matrix @ torch.ones(6, 2, device="cuda")).is_cuda


def test_on_cuda_reducing_products_do_not_exist() -> None:
    with pytest.raises(NotImplementedError, match="SparseCsrCUDA"):
        torchmem.trace(Reduced(reduce="sum"), csr(), dense(6, 8), device="cuda")


def test_matrices_that_outlive_their_trace_can_be_printed(device: str) -> None:
    kept: list[Tensor] = []

    class Failing(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            kept.extend((left, left * 2.0, left.transpose(0, 1), left @ right))
            raise KeyError("outlived")

    with pytest.raises(KeyError, match="outlived"):
        torchmem.trace(Failing(), csr(True), dense(6, 8), device=device)
    assert all(repr(tensor).startswith("tensor(") for tensor in kept)


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


def edges(device: str) -> Any:
    places = torch.stack([torch.arange(60), torch.arange(60) // 2], 1).to(device).t()
    return torch.sparse_coo_tensor(places, torch.ones(60, device=device), (60, 60)).coalesce()


def entries_of(device: str = "cpu") -> Any:
    """What ``SparseAdam`` takes of its states."""
    rows = torch.sparse_coo_tensor([[0, 2, 3]], torch.ones(3, 64), (5, 64)).coalesce()
    return torch.randn(5, 64, device=device).sparse_mask(rows.to(device))


PROGRAMS: tuple[Callable[..., Any], ...] = (
    product,
    graph_convolution,
    lambda device="cpu": matrix(device).coalesce().indices(),
    lambda device="cpu": matrix(device).t().coalesce(),
    lambda device="cpu": (edges(device).to_sparse_csr(), torch.zeros(900, device=device)),
    lambda device="cpu": matrix(device) @ torch.randn(100, device=device),
    lambda device="cpu": torch.cat([matrix(device), matrix(device)]),
    lambda device="cpu": matrix(device).coalesce().abs().sin(),
    lambda device="cpu": torch.sparse.softmax(matrix(device).coalesce(), 1),
    lambda device="cpu": torch.sparse.sum(matrix(device), 0),
    entries_of,
    lambda device="cpu": torch.zeros(3, 4, layout=torch.sparse_coo, device=device),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_as_measured_and_on_fake_cuda(program: Callable[..., Any]) -> None:
    assert torchmem.trace(program, host="here").peak == torchmem.measure(program).peak
    torchmem.trace(lambda: program("cuda"), device="cuda")


def test_a_copy_takes_the_indices_and_values_of_the_other() -> None:
    def step() -> None:
        places = (torch.arange(rows).view(1, rows) for rows in (3, 5))
        made = (torch.sparse_coo_tensor(at, torch.ones(at.numel(), 3), (9, 3)) for at in places)
        three, five = made
        three.copy_(five)
        assert three.to_dense().sum() == 15

    as_measured(step)
