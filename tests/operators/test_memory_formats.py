"""The memory format that a tensor's strides suggest, and what follows of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import Binding, Unbindable
from pytest_torchmem.operators.workspace import CONTIGUOUS, SUGGESTED, copied, suggested_format
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.targets.host import REFERENCE
from tests.asked import workspace_of

aten = torch.ops.aten
BFLOAT, LAST, LONG = torch.bfloat16, torch.channels_last, torch.int64


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
        result: Any = functional.batch_norm(input, None, None, weight, bias, training=True)
        last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
        found.append(result.is_contiguous(memory_format=last))

    trace(step, device="cuda")
    assert found == [True]


def test_rms_norm_of_a_slice_in_channels_last_is_not_fused() -> None:
    """native/layer_norm.cpp, ``rms_norm_symint``: the fused kernel knows no channels last."""

    def operators(sliced: bool) -> set[str]:
        def step() -> None:
            input = half_of_the_channels(2)
            functional.rms_norm(input if sliced else input.contiguous(), (6,))

        profile = trace(step, device="cuda")
        return {str(one.origin.operator) for one in profile.timeline.allocations}

    assert "aten::_fused_rms_norm" in operators(sliced=False)
    assert "aten::_fused_rms_norm" not in operators(sliced=True)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: functional.channel_shuffle(x, 2),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: functional.max_unpool2d(x, torch.zeros_like(x, dtype=LONG), 2),
    ],
    ids=["channel_shuffle", "reflect", "replicate", "max_unpool2d"],
)
def test_what_is_contiguous_whatever_the_image_is(run: Callable[[Tensor], Tensor]) -> None:
    """native/ChanelShuffle.cpp, cuda/ReflectionPad.cu, ReplicationPadding.cu, MaxUnpooling.cu."""
    dense = []

    def step() -> None:
        x = torch.ones(2, 8, 4, 4, device="cuda").to(memory_format=LAST).requires_grad_()
        result = run(x)
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
        dense.append((result.is_contiguous(), gradient.is_contiguous()))

    trace(step, device="cuda", gpu="a100")
    assert dense[0][0]
    assert dense[0][1]


@pytest.mark.parametrize("incoming", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize(
    ("dtype", "training"), [(BFLOAT, True), (BFLOAT, False), (torch.float32, False)]
)
def test_the_gradient_of_batch_norm_lies_as_its_input(dtype, training, layout, incoming):
    """In training; in evaluation, cuDNN's too, it is contiguous. cuda/Normalization.cu."""
    dense = []

    def run() -> None:
        x = torch.ones(2, 8, 4, 4, dtype=dtype, device="cuda").contiguous(memory_format=layout)
        x.requires_grad_()
        y = nn.BatchNorm2d(8, device="cuda", dtype=dtype).train(training)(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach().contiguous(memory_format=incoming))
        dense.append(gradient.is_contiguous())

    trace(run, device="cuda", gpu="a100")
    assert dense == [not training or layout is not LAST]


def test_a_frozen_batch_norm_makes_convolutions_copy_gradients() -> None:
    """The gradient is contiguous, and cuDNN wants it as the image is."""
    profile = {}
    for training in (True, False):

        def run(training: bool = training) -> None:
            conv = nn.Conv2d(8, 8, 3, padding=1, bias=False, device="cuda", dtype=BFLOAT)
            norm = nn.BatchNorm2d(8, device="cuda", dtype=BFLOAT).train(training)
            conv.to(memory_format=LAST)
            x = torch.ones(2, 8, 32, 32, dtype=BFLOAT, device="cuda").to(memory_format=LAST)
            functional.relu(norm(conv(x))).sum().backward()

        allocations = trace(run, device="cuda", gpu="a100").timeline.allocations
        profile[training] = [
            one.nbytes
            for one in allocations
            if one.origin.operator == "aten::convolution_backward" and one.label == ""
        ]
    copy = 2 * 2 * 8 * 32 * 32
    assert profile[False].count(copy) == profile[True].count(copy) + 1


GPU = find_gpu("a100")
POOL = torch.ops.aten.max_pool2d_with_indices_backward.default


def image(dtype: torch.dtype = torch.float32, **layout: Any) -> torch.Tensor:
    """Return images with 120 elements."""
    return torch.empty(2, 3, 4, 5, dtype=dtype, device="meta").contiguous(**layout)


def asked(function: Any, machine: Any, outputs: Any, gradient: Any, indices: Any) -> Any:
    """Return what a function gives for the backward of a pooling."""
    args = (gradient, image(), [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    return Binding(function, POOL)(args, {}, machine=machine, outputs=outputs)


def test_what_lies_otherwise_is_copied() -> None:
    last = image(memory_format=torch.channels_last)
    indices = image(torch.int64)
    function = copied(grad_output=SUGGESTED, indices="grad_output", outputs="grad_output")
    assert asked(function, GPU, image(), last, indices) == (0, 960, 480)
    assert asked(function, REFERENCE, image(), last, indices) == 960 + 480
    assert asked(function, GPU, image(), image(), indices) == (0, 0, 0)
    assert asked(function, GPU, (last, last), image(), indices) == (0, 0, 480, 480)


def test_only_the_cpu_goes_through_a_block_of_a_transposed_matrix() -> None:
    transposed = torch.empty(100, 80, device="meta").t()
    search = torch.ops.aten.searchsorted.Tensor
    function = copied(sorted_sequence=CONTIGUOUS, self=CONTIGUOUS)
    for machine, expected in ((REFERENCE, 32_000 + 60 * 60 * 4), (GPU, (32_000, 0))):
        found = Binding(function, search)((transposed, torch.empty(3)), {}, machine=machine)
        assert found == expected


def test_numbers_are_not_copied_and_unknown_arguments_refused() -> None:
    sequence = torch.empty(4, device="meta")
    assert not workspace_of("searchsorted", REFERENCE, sequence, sequence, 2.0).requests
    with pytest.raises(Unbindable, match="has no argument 'weight'"):
        Binding(copied(weight=CONTIGUOUS), POOL)
