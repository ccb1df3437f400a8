"""Outputs are laid out as kernels lay them out, whatever the layout of the inputs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import Binding, Unbindable
from pytest_torchmem.operators.workspace import CONTIGUOUS, SUGGESTED, copied, suggested_format
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.targets.host import REFERENCE
from tests.asked import workspace_of
from tests.results import in_a_trace, result_of

aten, FLOAT = torch.ops.aten, torch.float32
cross_entropy_backward = aten.binary_cross_entropy_backward
log_softmax_backward = aten._log_softmax_backward_data


def turned(*shape: int) -> Tensor:
    """Return a tensor whose first dimension is the densest."""
    return torch.rand(shape).transpose(0, -1).contiguous().transpose(0, -1)


def four(device: str) -> Tensor:
    return torch.ones(4, device=device)


def rows(*shape: int) -> Tensor:
    return torch.rand(shape)


def layer_norm_backward(gradient: Tensor, x: Tensor) -> Any:
    width = x.shape[-1]
    statistics, parameters = [rows(*x.shape[:-1], 1)] * 2, [rows(width)] * 2
    given = gradient, x, [width], *statistics, *parameters
    return aten.native_layer_norm_backward(*given, [True] * 3)


def batch_norm(x: Tensor) -> Any:
    return aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)


OPERATORS: dict[str, Callable[[], Any]] = {
    "abs": lambda: turned(4, 5).abs(),
    "isinf": lambda: turned(4, 5).isinf(),
    "add": lambda: turned(4, 5) + rows(4, 5),
    "add the other way": lambda: rows(4, 5) + turned(4, 5),
    "logical_and": lambda: torch.logical_and(turned(4, 5), rows(4, 5)),
    "logical_and broadcast": lambda: torch.logical_and(rows(5), turned(4, 5)),
    "copysign": lambda: torch.copysign(turned(4, 5), rows(4, 5)),
    "dropout backward": lambda: aten.native_dropout_backward(turned(4, 5), rows(4, 5) > 0, 2.0),
    "hardswish backward": lambda: aten.hardswish_backward(rows(4, 5), turned(4, 5)),
    "softplus backward": lambda: aten.softplus_backward(rows(4, 5), turned(4, 5), 1, 20),
    "gelu backward": lambda: aten.gelu_backward(rows(4, 5), turned(4, 5)),
    "mse_loss": lambda: aten.mse_loss(turned(4, 5), rows(4, 5), 0),
    "mse_loss backward": lambda: aten.mse_loss_backward(rows(4, 5), turned(4, 5), rows(4, 5), 0),
    "cross entropy": lambda: aten.binary_cross_entropy(turned(4, 5), rows(4, 5), None, 0),
    "its backward": lambda: cross_entropy_backward(rows(4, 5), *[turned(4, 5)] * 2, None, 0),
    "log_softmax backward": lambda: log_softmax_backward(turned(4, 5), rows(4, 5), 1, FLOAT),
    "softmax": lambda: turned(4, 5).softmax(1),
    "layer norm": lambda: aten.native_layer_norm(turned(4, 5, 6), [6], None, None, 1e-5),
    "layer norm backward": lambda: layer_norm_backward(rows(4, 5, 6), turned(4, 5, 6)),
    "layer norm backward of turned rows": lambda: layer_norm_backward(
        rows(2, 5, 6).transpose(1, 2), rows(2, 5, 6).transpose(1, 2)
    ),
    "batch norm": lambda: batch_norm(turned(4, 5, 6)),
    "batch norm of turned rows": lambda: batch_norm(rows(4, 6, 5).transpose(1, 2)),
    "batch norm backward": lambda: aten.native_batch_norm_backward(
        rows(4, 5, 6), turned(4, 5, 6), None, None, None, rows(5), rows(5), True, 1e-5, [True] * 3
    ),
}


def assert_as_for_real(function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Compare what a trace makes of a function's outputs, before it is over, with torch's own."""

    def geometries() -> list[Any]:
        made = function(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        return [(one.shape, one.stride(), one.dtype) for one in outputs if one is not None]

    assert result_of(geometries, **options) == geometries()


@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts(operator: str) -> None:
    assert_as_for_real(OPERATORS[operator])


def test_on_the_host_the_order_is_that_of_what_is_returned():
    profile = trace(lambda: torch.native_dropout(torch.ones(4096), 0.5, True), device="cpu")
    sizes = [one.nbytes for one in profile.timeline.allocations if "dropout" in one.origin.operator]
    assert sizes[:2] == [16_384, 4096]


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


@settings(max_examples=60, deadline=None)
@given(operands())
def test_where_is_laid_out_as_for_real(tensors: tuple[Tensor, ...]) -> None:
    assert_as_for_real(torch.where, *tensors, values="none")
    _, input, other = tensors
    for empty in ((0,), tuple(torch.broadcast_shapes(*(one.shape for one in tensors)))):
        dtype = torch.result_type(input, other)

        def into(condition, input, other, shape=empty, dtype=dtype) -> Tensor:
            out = torch.empty(shape, dtype=dtype)
            return torch.where(condition, input, other, out=out)

        assert_as_for_real(into, *tensors, values="none")


@pytest.mark.parametrize("number", [2, 2.5, True])
def test_where_with_a_number(number: Any) -> None:
    condition = torch.ones(3, 1, dtype=torch.bool)
    input = torch.ones(4, 3, dtype=torch.bfloat16).t()
    for order in (
        lambda c, x: torch.where(c, x, number),
        lambda c, x: torch.where(c, number, x),
        lambda c, x: x.masked_fill(c, number),
    ):
        assert_as_for_real(order, condition, input, values="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("parameters", [None, torch.float32])
def test_layer_norm_is_contiguous_with_statistics_by_row(dtype, parameters):
    if dtype is torch.float64 and parameters is not None:
        parameters = torch.float64
    x = torch.ones(5, 4, 3, dtype=dtype).permute(1, 2, 0)
    for shape in ([5], [3, 5], [4, 3, 5]):
        weight = None if parameters is None else torch.ones(shape, dtype=parameters)
        given = x, shape, weight, weight, 1e-5
        assert_as_for_real(torch.native_layer_norm, *given, values="none")


def test_wrong_arguments_are_told_as_by_torch(device: str) -> None:
    x, condition = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for function, message in (
        (lambda: torch.layer_norm(x.to(device), [5]), "normalized_shape"),
        (lambda: torch.layer_norm(x.to(device), [3], four(device)), "weight"),
        (lambda: torch.where(condition.to(device), x.to(device), four(device)), "size of tensor"),
        (lambda: torch.where(*[x.to(device)] * 3), "boolean tensor, but got a tensor with dtype F"),
    ):
        with pytest.raises(RuntimeError, match=message):
            trace(function, device=device)


@in_a_trace("cuda")
def test_dropout_on_cuda_has_a_mask_like_its_input() -> None:
    x = torch.ones(2, 3, 4, device="cuda").permute(2, 0, 1)
    for train, p, mask in (
        (True, 0.5, (1, 12, 4)),
        (False, 0.5, (6, 3, 1)),
        (True, 1.0, (6, 3, 1)),
    ):
        assert [one.stride() for one in torch.native_dropout(x, p, train)] == [(1, 12, 4), mask]


@pytest.mark.parametrize("shape", [(16, 48), (0,)])
def test_scaled_products_are_written_to_what_is_given(shape: tuple[int, ...]) -> None:
    def into(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        given = torch.empty(shape, dtype=torch.bfloat16)
        product = torch.ops.aten._scaled_mm.out
        return product(x, y.t(), scale, scale, out_dtype=torch.bfloat16, out=given)

    x, y = (torch.ones(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
    scale = torch.tensor(1.0)
    assert_as_for_real(into, x, y, scale, values="none")


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)])
@pytest.mark.parametrize("full_matrices", [False, True])
def test_singular_vectors_have_their_columns_first(shape: Any, full_matrices: bool) -> None:
    x = torch.ones(shape)
    assert_as_for_real(lambda x: torch.linalg.svd(x, full_matrices=full_matrices), x, values="none")
    assert_as_for_real(torch.linalg.svdvals, x, values="none")


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
    backward = getattr(aten, f"reflection_pad{tensor.dim() - 2}d_backward")
    found = backward(torch.zeros(tensor.shape), tensor, [0] * 2 * (tensor.dim() - 2))
    expected = torch.empty_like(tensor, memory_format=suggested_format(tensor))
    assert found.stride() == expected.stride()


def half_of_the_channels(dims: int) -> Tensor:
    """Return a slice of an image or volume in channels last, which is not contiguous in it."""
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    whole = torch.empty((2, 8, *[6] * dims), device="cuda", memory_format=last)
    return whole[:, :4]


@pytest.mark.parametrize("dims", [2, 3])
@in_a_trace("cuda")
def test_batch_norm_of_a_slice_in_channels_last_stays_so(dims: int) -> None:
    """``cudnn_batch_norm`` gets its input ``contiguous(input.suggest_memory_format())``;
    native/Normalization.cpp, ``_batch_norm_impl_index``.
    """
    input = half_of_the_channels(dims)
    weight, bias = torch.empty(2, 4, device="cuda").unbind()
    result: Any = functional.batch_norm(input, None, None, weight, bias, training=True)
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    assert result.is_contiguous(memory_format=last)


def test_rms_norm_of_a_slice_in_channels_last_is_not_fused() -> None:
    """native/layer_norm.cpp, ``rms_norm_symint``: the fused kernel knows no channels last."""

    def operators(sliced: bool) -> set[str]:
        def step() -> None:
            input = half_of_the_channels(2)
            functional.rms_norm(input if sliced else input.contiguous(), (6,))

        return {str(one.origin.operator) for one in trace(step, device="cuda").timeline.allocations}

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
@in_a_trace("cuda", gpu="a100")
def test_what_is_contiguous_whatever_the_image_is(run: Callable[[Tensor], Tensor]) -> None:
    """native/ChanelShuffle.cpp, cuda/ReflectionPad.cu, ReplicationPadding.cu, MaxUnpooling.cu."""
    x = torch.ones(2, 8, 4, 4, device="cuda").to(memory_format=LAST).requires_grad_()
    result = run(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    assert result.is_contiguous()
    assert gradient.is_contiguous()


@pytest.mark.parametrize("incoming", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize(
    ("dtype", "training"), [(BFLOAT, True), (BFLOAT, False), (torch.float32, False)]
)
@in_a_trace("cuda", gpu="a100")
def test_the_gradient_of_batch_norm_lies_as_its_input(dtype, training, layout, incoming):
    """In training; in evaluation, cuDNN's too, it is contiguous. cuda/Normalization.cu."""
    x = torch.ones(2, 8, 4, 4, dtype=dtype, device="cuda").contiguous(memory_format=layout)
    x.requires_grad_()
    y = nn.BatchNorm2d(8, device="cuda", dtype=dtype).train(training)(x)
    (gradient,) = torch.autograd.grad(y, x, y.detach().contiguous(memory_format=incoming))
    assert gradient.is_contiguous() is (not training or layout is not LAST)


def test_a_frozen_batch_norm_makes_convolutions_copy_gradients() -> None:
    """The gradient is contiguous, and cuDNN wants it as the image is."""
    copies = {}
    for training in (True, False):

        def run(training: bool = training) -> None:
            conv = nn.Conv2d(8, 8, 3, padding=1, bias=False, device="cuda", dtype=BFLOAT)
            norm = nn.BatchNorm2d(8, device="cuda", dtype=BFLOAT).train(training)
            conv.to(memory_format=LAST)
            x = torch.ones(2, 8, 32, 32, dtype=BFLOAT, device="cuda").to(memory_format=LAST)
            functional.relu(norm(conv(x))).sum().backward()

        made = trace(run, device="cuda", gpu="a100").timeline.allocations
        of_it = [one for one in made if one.origin.operator == "aten::convolution_backward"]
        copies[training] = [one.nbytes for one in of_it if not one.label].count(2 * 2 * 8 * 32 * 32)
    assert copies[False] == copies[True] + 1


GPU = find_gpu("a100")
POOL = torch.ops.aten.max_pool2d_with_indices_backward.default


def image(dtype: torch.dtype = torch.float32, **layout: Any) -> torch.Tensor:
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
