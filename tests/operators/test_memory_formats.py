"""The memory format that a tensor's strides suggest, and what follows of it."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.operators.geometry import suggested_format

aten = torch.ops.aten


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Return a tensor of 3 to 5 dimensions in any layout: dense, sliced, expanded."""
    dims = draw(st.integers(3, 5))
    shape = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    order = draw(st.one_of(st.permutations(range(dims)), st.just([0, *range(2, dims), 1])))
    stride, strides = draw(st.integers(0, 2)), [0] * dims
    for dim in reversed(order):
        strides[dim] = stride
        stride *= shape[dim] + draw(st.sampled_from((0, 0, 1)))
    odd = draw(st.integers(0, 3 * dims))
    if odd < dims:  # of a dimension of one element any stride will do
        strides[odd] = draw(st.integers(0, 9))
    return torch.zeros(1 + math.prod(4 for _ in shape) * 40).as_strided(shape, strides)


@given(strided())
def test_suggested_formats_are_those_of_torch(tensor: Tensor) -> None:
    """Gradients of reflection lie as ``TensorBase::suggest_memory_format`` says of the input."""
    if tensor.dim() == 3:
        assert suggested_format(tensor) == torch.contiguous_format
        return
    backward = (
        aten.reflection_pad2d_backward if tensor.dim() == 4 else aten.reflection_pad3d_backward
    )
    found = backward(torch.zeros(tensor.shape), tensor, [0] * 2 * (tensor.dim() - 2))
    expected = torch.empty_like(tensor, memory_format=suggested_format(tensor))
    assert found.stride() == expected.stride()


def half_of_the_channels(dims: int) -> Tensor:
    """Return a slice of an image or volume in channels last, which is not contiguous in it."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    whole = torch.empty((2, 8, *[6] * dims), device="cuda", memory_format=last)
    return whole[:, :4]


@pytest.mark.parametrize("dims", [2, 3])
def test_batch_norm_of_a_slice_in_channels_last_stays_so(dims: int) -> None:
    """``cudnn_batch_norm`` gets its input ``contiguous(input.suggest_memory_format())``;
    native/Normalization.cpp, ``_batch_norm_impl_index``.
    """
    found: list[bool] = []

    def step() -> None:
        input = half_of_the_channels(dims)
        weight, bias = torch.empty(2, 4, device="cuda").unbind()
        result: Any = torch.nn.functional.batch_norm(input, None, None, weight, bias, training=True)
        last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
        found.append(result.is_contiguous(memory_format=last))

    trace(step, device="cuda")
    assert found == [True]


def test_rms_norm_of_a_slice_in_channels_last_is_not_fused() -> None:
    """native/layer_norm.cpp, ``rms_norm_symint``: the fused kernel knows no channels last."""

    def operators(sliced: bool) -> set[str]:
        def step() -> None:
            input = half_of_the_channels(2)
            torch.nn.functional.rms_norm(input if sliced else input.contiguous(), (6,))

        profile = trace(step, device="cuda")
        return {str(one.origin.operator) for one in profile.timeline.allocations}

    assert "aten::_fused_rms_norm" in operators(sliced=False)
    assert "aten::_fused_rms_norm" not in operators(sliced=True)
