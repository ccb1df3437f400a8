"""Geometry that is given here rather than by torch's Python functions is that of the kernels."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pytest_torchmem import trace

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Return a condition and two operands that broadcast, in any order of dimensions."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    tensors = []
    for dtypes in ((torch.bool,), DTYPES, DTYPES):
        own = [size if draw(st.booleans()) else 1 for size in shape]
        order = draw(st.permutations(range(len(own))))
        step = draw(st.sampled_from([1, 2]))
        made = torch.ones([own[dim] * step for dim in order], dtype=draw(st.sampled_from(dtypes)))
        for dim in range(len(own)):
            made = made.narrow(dim, 0, own[order[dim]])
        inverse = sorted(range(len(own)), key=lambda dim: order[dim])
        tensors.append(made.permute(inverse))
    return tuple(tensors)


def geometry(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype


def traced(function: Any, *inputs: Tensor) -> Any:
    """Return what a trace makes of a function's outputs, before the trace is over."""
    found: list[Any] = []

    def program() -> None:
        result = function(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        found.append([geometry(output) for output in outputs])

    trace(program, values="none")
    return found[0]


@settings(max_examples=60, deadline=None)
@given(operands())
def test_where_is_laid_out_as_for_real(tensors: tuple[Tensor, ...]) -> None:
    assert traced(torch.where, *tensors) == [geometry(torch.where(*tensors))]
    _, input, other = tensors
    for empty in ((0,), tuple(torch.broadcast_shapes(*(one.shape for one in tensors)))):
        dtype = torch.result_type(input, other)

        def into(condition, input, other, shape=empty, dtype=dtype) -> Tensor:
            out = torch.empty(shape, dtype=dtype)
            return torch.where(condition, input, other, out=out)

        assert traced(into, *tensors) == [geometry(into(*tensors))]


@pytest.mark.parametrize("number", [2, 2.5, True])
def test_where_with_a_number(number: Any) -> None:
    condition = torch.ones(3, 1, dtype=torch.bool)
    input = torch.ones(4, 3, dtype=torch.bfloat16).t()
    for order in (
        lambda c, x: torch.where(c, x, number),
        lambda c, x: torch.where(c, number, x),
        lambda c, x: x.masked_fill(c, number),
    ):
        assert traced(order, condition, input) == [geometry(order(condition, input))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("parameters", [None, torch.float32])
def test_layer_norm_is_contiguous_with_statistics_by_row(dtype, parameters):
    if dtype is torch.float64 and parameters is not None:
        parameters = torch.float64
    x = torch.ones(5, 4, 3, dtype=dtype).permute(1, 2, 0)
    for shape in ([5], [3, 5], [4, 3, 5]):
        weight = None if parameters is None else torch.ones(shape, dtype=parameters)

        def normalised(x: Tensor, shape: Any = shape, weight: Any = weight) -> Any:
            return torch.native_layer_norm(x, shape, weight, weight, 1e-5)

        real = normalised(x)
        assert traced(normalised, x) == [geometry(one) for one in real]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_wrong_arguments_are_told_as_by_torch(device: str) -> None:
    x, condition = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for function, message in (
        (lambda: torch.layer_norm(x.to(device), [5]), "normalized_shape"),
        (lambda: torch.layer_norm(x.to(device), [3], torch.ones(4, device=device)), "weight"),
        (
            lambda: torch.where(condition.to(device), x.to(device), torch.ones(4, device=device)),
            "size of tensor",
        ),
        (
            lambda: torch.where(x.to(device), x.to(device), x.to(device)),
            "boolean tensor, but got a tensor with dtype Float",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            trace(function, device=device)


def test_dropout_on_cuda_has_a_mask_like_its_input() -> None:
    found: list[Any] = []

    def program() -> None:
        x = torch.ones(2, 3, 4, device="cuda").permute(2, 0, 1)
        for train, p in ((True, 0.5), (False, 0.5), (True, 1.0)):
            found.append([one.stride() for one in torch.native_dropout(x, p, train)])

    trace(program, device="cuda")
    assert found == [[(1, 12, 4)] * 2, [(1, 12, 4), (6, 3, 1)], [(1, 12, 4), (6, 3, 1)]]


@pytest.mark.parametrize("shape", [(16, 48), (0,)])
def test_scaled_products_are_written_to_what_is_given(shape: tuple[int, ...]) -> None:
    def into(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        given = torch.empty(shape, dtype=torch.bfloat16)
        product = torch.ops.aten._scaled_mm.out
        return product(x, y.t(), scale, scale, out_dtype=torch.bfloat16, out=given)

    x, y = (torch.ones(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
    scale = torch.tensor(1.0)
    assert traced(into, x, y, scale) == [geometry(into(x, y, scale))]


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)])
@pytest.mark.parametrize("full_matrices", [False, True])
def test_singular_vectors_have_their_columns_first(shape: Any, full_matrices: bool) -> None:
    def decomposed(x: Tensor) -> Any:
        return tuple(torch.linalg.svd(x, full_matrices=full_matrices))

    x = torch.ones(shape)
    assert traced(decomposed, x) == [geometry(one) for one in decomposed(x)]
    assert traced(torch.linalg.svdvals, x) == [geometry(torch.linalg.svdvals(x))]
