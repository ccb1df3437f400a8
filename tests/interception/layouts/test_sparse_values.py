"""What operators on sparse tensors compute, where a trace knows values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_torchmem import measure, trace
from tests.results import in_a_trace, on_fake_cuda, result_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def dense() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)


QUESTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda matrix, x: matrix @ x,
    "transposed": lambda matrix, x: matrix.t() @ torch.ones(4, 2, device=x.device),
    "sum": lambda matrix, x: matrix.to_dense().sum(1),
    "scaled": lambda matrix, x: (matrix * 3.0).to_dense(),
    "negated": lambda matrix, x: matrix.neg().to_dense(),
    "chained": lambda matrix, x: torch.relu(matrix @ x) - 1.0,
}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("question", QUESTIONS)
def test_values_are_those_of_the_real_run(question: str, layout: torch.layout, device: str) -> None:
    found: list[Tensor] = []

    def ask(where: str) -> None:
        matrix = dense().to(where).to_sparse(layout=layout)
        torch.manual_seed(1)
        answer = QUESTIONS[question](matrix, torch.randn(6, 2).to(where))
        found.append(torch.tensor(answer.cpu().tolist()))

    profile = trace(ask, device, device=device, values="real")
    assert not any("unknown value" in warning for warning in profile.warnings)
    ask("cpu")
    torch.testing.assert_close(*found)


def test_the_gradient_of_a_sparse_product_is_known() -> None:
    def ask() -> list[float]:
        x = torch.ones(6, 2, requires_grad=True)
        (dense().to_sparse() @ x).sum().backward()
        return [float(one) for one in x.grad.flatten()]

    assert result_of(ask, values="real") == pytest.approx(ask())


def powers_of_a_graph(device: str) -> float:
    """Return what graph networks compute that pool: entries that meet are added or multiplied."""
    torch.manual_seed(0)
    edges = torch.randint(0, 30, (2, 90)).to(device)
    weights = torch.rand(90, device=device)
    graph = torch.sparse_coo_tensor(edges, weights, (30, 30)).coalesce()
    squared = (graph.to_sparse_csr() @ graph.to_sparse_csr()).to_sparse_coo()
    both = graph + graph.t().coalesce()
    expected = both._nnz() if device == "cuda" else 160
    assert both._nnz() == expected
    twice = graph + torch.sparse_coo_tensor(edges, weights, (30, 30))
    x = torch.randn(30, 8, device=device)
    return float((squared @ x).sum() + (both @ x).sum() + (twice.coalesce() @ x).sum())


def test_products_and_sums_of_sparse_matrices(device: str) -> None:
    found = result_of(lambda: powers_of_a_graph(device), device=device)
    assert found == pytest.approx(powers_of_a_graph("cpu"), rel=1e-5)


def test_numbers_that_a_sparse_kernel_wrote_are_not_known_as_zero() -> None:
    profile = trace(lambda: powers_of_a_graph("cpu"), values="none")
    assert any("unknown value" in warning for warning in profile.warnings)


def differences(device: str) -> list[list[float]]:
    """Return what is left of sparse matrices that are taken from others, or emptied."""
    matrix = dense().to(device).to_sparse()
    shifted = torch.roll(dense(), 1, 0).to(device).to_sparse()
    left = matrix.clone()
    left.sub_(shifted, alpha=2)
    answers = matrix - matrix, matrix.sub(shifted, alpha=2), left, matrix.clone().zero_()
    return [answer.to_dense().flatten().tolist() for answer in answers]


def test_differences_of_sparse_matrices(device: str) -> None:
    found: list[list[list[float]]] = []
    profile = trace(lambda: found.append(differences(device)), device=device, values="real")
    assert found == [differences("cpu")]
    assert not any("unknown" in warning for warning in profile.warnings)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_sparse_gradient_of_bags_has_its_indices(mode: str) -> None:
    def gradient(device: str) -> tuple[list[list[int]], float]:
        bags = torch.nn.EmbeddingBag(10, 4, mode=mode, sparse=True).to(device)
        indices, offsets = torch.tensor([1, 2, 4, 4], device=device), torch.tensor([0, 3])
        bags(indices, offsets.to(device)).sum().backward()
        found = bags.weight.grad.coalesce()
        return found.indices().tolist(), found.values().sum().item()

    assert on_fake_cuda(lambda: gradient("cuda")) == gradient("cpu")


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_bsc], ids=str)
def test_compressed_tensors_by_operators_on_their_values(layout: torch.layout) -> None:
    def program(device: str) -> list[object]:
        dense = torch.tensor([[1.5, 0.0, -2.0, 0.0], [0.0, 3.0, 0.0, 4.0]], device=device)
        blocks = None if layout is torch.sparse_csr else (1, 2)
        matrix = dense.to_sparse(layout=layout, blocksize=blocks)
        made = [matrix.neg(), matrix.clone().abs_(), matrix.clone().relu_()]
        made += [torch.empty_like(matrix).copy_(matrix), torch.zeros_like(matrix)]
        made.append(matrix.clone().zero_())
        if layout is torch.sparse_csr:
            made += [torch.sin(matrix, out=matrix.clone()), matrix[1], matrix.to_sparse_coo()]
        return [one.to_dense().tolist() for one in made]

    assert on_fake_cuda(lambda: program("cuda")) == program("cpu")
    assert trace(program, "cpu", host="here").peak == measure(program, "cpu").peak


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_are_printed_on_fake_cuda(layout: torch.layout) -> None:
    def program() -> str:
        repr(torch.sparse_coo_tensor(torch.zeros(1, 2), torch.rand(2), (4,)).cuda())
        return repr(torch.eye(2, device="cuda").to_sparse(layout=layout))

    assert f"layout={layout}" in on_fake_cuda(program, values="none")
    known = on_fake_cuda(program)
    for text in (f"layout={layout}", "values=tensor([1., 1.])", "device='cuda:0'"):
        assert text in known


def test_no_rows_are_added(device: str) -> None:
    def program() -> None:
        index = torch.empty(0, dtype=torch.int64, device=device)
        torch.zeros(16, device=device).index_add_(0, index, torch.empty(0, device=device))

    assert trace(program, device=device).peak == 64


@pytest.mark.parametrize("layout", [None, torch.sparse_csr, torch.sparse_csc])
def test_matrices_of_diagonals(layout: torch.layout | None) -> None:
    found: list[Tensor] = []

    def ask() -> list[list[float]]:
        diagonals, offsets = torch.arange(1.0, 13.0).reshape(3, 4), torch.tensor([0, -2, 1])
        matrix = torch.sparse.spdiags(diagonals, offsets, (5, 3), layout)
        return matrix.to_sparse_csr().to_dense().tolist()  # type: ignore[no-any-return]

    profile = trace(lambda: found.append(torch.tensor(ask())), values="real", host="here")
    assert found[0].tolist() == ask()
    assert profile.peak == measure(lambda: torch.tensor(ask())).peak


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@in_a_trace("cuda", values="real")
def test_sparse_gradients_are_added_on_a_gpu_entry_by_entry(dtype: torch.dtype) -> None:
    table = torch.nn.Embedding(10, 3, sparse=True, device="cuda", dtype=dtype)
    for _ in range(2):
        table(torch.tensor([7, 1, 3], device="cuda")).sum().backward()
    assert table.weight.grad._indices().tolist() == [[7, 1, 3, 7, 1, 3]]
    assert table.weight.grad.to_dense().sum().item() == 18.0


@in_a_trace("cuda")
def test_older_types_of_sparse_tensors_of_a_gpu() -> None:
    indices = torch.tensor([[0, 2]], device="cuda")
    kind = torch.cuda.sparse.FloatTensor
    made = kind(indices, torch.ones(2, device="cuda"), torch.Size([4]))
    assert isinstance(made, kind)
    assert made.to_dense().tolist() == [1, 0, 1, 0]
    assert made.is_cuda
    assert kind(3, 4).shape == (3, 4)
    assert kind(made.shape)._nnz() == 0
    assert not isinstance(made.to_dense(), kind)
