"""Whose kernels take a convolution, the shape of its output and the memory format of it all."""

import random
import re

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import (
    CudaBackend,
    cuda_backend,
    cuda_format,
    native_cpu_format,
    onednn_format,
)
from pytest_torchmem.operators.convolution.convolution import convolution_shape
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.targets.gpus import find_gpu
from tests.results import as_measured

CUDNN, DEPTHWISE, SLOW = CudaBackend.CUDNN, CudaBackend.DEPTHWISE, CudaBackend.SLOW
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
IMAGE, VOLUME = ((2, 64, 14, 14), (64, 64, 3, 3)), ((2, 8, 8, 8, 8), (16, 8, 3, 3, 3))
DEEP = ((2, 64, 14, 14), (64, 1, 3, 3))


def backend(shapes, dtype, *, gpu="a100", version=(9, 20, 0), last=False, stride=1, **settings):
    """Return whose kernels convolve tensors of two shapes."""
    input, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    if last:
        input = input.contiguous(memory_format=torch.channels_last)
    dims = input.dim() - 2
    given = ConvolutionSettings((stride,) * dims, (1,) * dims, (1,) * dims, **settings)
    return cuda_backend(find_gpu(gpu), input, weight, given, version)


@pytest.mark.parametrize(
    ("shapes", "dtype", "options", "expected"),
    [
        (IMAGE, FLOAT, {}, CUDNN),
        (IMAGE, torch.int32, {}, SLOW),
        (IMAGE, BFLOAT, {}, CUDNN),
        (IMAGE, BFLOAT, {"gpu": "t4"}, SLOW),
        (IMAGE, FLOAT, {"transposed": True, "output_padding": (1, 1), "stride": 2}, CUDNN),
        (IMAGE, FLOAT, {"transposed": True, "output_padding": (1, 1)}, SLOW),
        (VOLUME, BFLOAT, {}, CUDNN),
        (VOLUME, BFLOAT, {"version": (9, 10, 2)}, SLOW),
        (VOLUME, FLOAT, {"version": (9, 10, 2)}, CUDNN),
        (DEEP, FLOAT, {"groups": 64}, DEPTHWISE),
        (DEEP, FLOAT, {"groups": 64, "last": True}, CUDNN),
        (DEEP, HALF, {"groups": 64}, CUDNN),
        (DEEP, HALF, {"groups": 64, "stride": 2}, DEPTHWISE),
        (DEEP, BFLOAT, {"groups": 64}, DEPTHWISE),
    ],
)
def test_backends(shapes, dtype, options, expected):
    assert backend(shapes, dtype, **options) is expected


def test_it_is_that_of_the_kernel(chance: random.Random) -> None:
    compared = 0
    for _ in range(300):
        dims, groups = chance.randint(1, 3), chance.choice((1, 1, 2, 4))
        transposed = chance.random() < 0.4
        sizes = [chance.randint(1, 9) for _ in range(dims)]
        kernel = [chance.randint(1, 4) for _ in range(dims)]
        x = torch.empty(chance.randint(1, 3), chance.choice((4, 8)), *sizes)
        weight = torch.empty(chance.choice((4, 8)), chance.choice((1, 2, 4, 8)), *kernel)
        stride, padding, dilation = (
            [chance.randint(least, most) for _ in range(chance.choice((1, dims)))]
            for least, most in ((1, 3), (0, 2), (1, 2))
        )
        more = [min(stride) - 1 if transposed else 0] * dims
        try:
            given = stride, padding, dilation, transposed, more, groups
            real = torch.convolution(x, weight, None, *given)
        except RuntimeError:
            continue
        if not real.numel():  # on meta torch refuses what some of its kernels take
            continue
        made = convolution_shape(x.to("meta"), weight.to("meta"), ConvolutionSettings(*given))
        assert made.shape == real.shape
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("input", "weight", "bias", "settings"),
    [
        ((2, 3, 9, 9), (5, 4, 3, 3), None, {}),
        ((2, 3, 9, 9), (4, 5, 3, 3), None, {"transposed": True}),
        ((2, 4, 9, 9), (5, 4, 3, 3), (4,), {}),
        ((2, 4, 9, 9), (4, 5, 3, 3), (4,), {"transposed": True}),
        ((2, 4, 9, 9), (3, 2, 3, 3), None, {"groups": 2}),
        ((2, 4, 9, 9), (4, 4, 3, 3), None, {"groups": 0}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"stride": (0, 0)}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"padding": (-1, -1)}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"dilation": (-1, -1)}),
        ((2, 4, 2, 2), (5, 4, 3, 3), None, {}),
    ],
)
def test_what_torch_does_not_take_is_refused_in_its_words(input, weight, bias, settings):
    shapes = [input, weight, bias]
    real = [None if shape is None else torch.zeros(shape) for shape in shapes]
    meta = [None if shape is None else torch.zeros(shape, device="meta") for shape in shapes]
    usual = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    given = ConvolutionSettings(**usual | settings)
    with pytest.raises(RuntimeError) as expected:
        torch.convolution(*real, *given._replace(output_padding=(0, 0)))
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        convolution_shape(meta[0], meta[1], given, meta[2])


LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
CONTIGUOUS = torch.contiguous_format


def operands(dims: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return an input in channels last, and a contiguous weight."""
    input = torch.empty((2, 4, *[6] * dims), dtype=dtype, device=device, memory_format=LAST[dims])
    return input, torch.empty((8, 4, *[3] * dims), dtype=dtype, device=device)


@pytest.mark.parametrize("turned", ["input", "weight"])
@pytest.mark.parametrize(
    ("rule", "dtype", "dims", "last"),
    [
        (onednn_format, torch.float32, 2, True),
        (onednn_format, torch.float32, 3, True),
        (onednn_format, torch.float64, 2, False),
        (native_cpu_format, torch.float32, 2, True),
        (native_cpu_format, torch.float64, 2, True),
        (native_cpu_format, torch.float32, 3, False),
        (cuda_format, torch.float16, 2, True),
        (cuda_format, torch.float32, 3, True),
        (cuda_format, torch.float64, 2, False),
        (cuda_format, torch.float64, 3, False),
        (cuda_format, torch.int32, 2, False),  # not cuDNN's
    ],
)
def test_rules_of_the_libraries(rule, dtype, dims, last, turned):
    """native/ConvUtils.h: ``mkldnn_conv_use_channels_last``, ``thnn_conv_use_channels_last``,
    ``cudnn_conv_suggest_memory_format``; either operand decides.
    """
    input, weight = operands(dims, dtype)
    if turned == "weight":
        input, weight = input.contiguous(), weight.contiguous(memory_format=LAST[dims])
    assert rule(input, weight) == (LAST[dims] if last else CONTIGUOUS)


@pytest.mark.parametrize(
    ("dtype", "cudnn", "last"),
    [(torch.float32, True, True), (torch.float64, True, False), (torch.float32, False, False)],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_results_and_gradients_on_cuda_lie_as_the_library_works(dims, dtype, cudnn, last):
    """``cudnn_conv_suggest_memory_format``: cuDNN has no channels last for float64; ATen's own CUDA
    kernels have none at all.
    """
    wanted = LAST[dims] if last else CONTIGUOUS

    def step() -> None:
        input, weight = (one.requires_grad_() for one in operands(dims, dtype, "cuda"))
        convolve = torch.nn.functional.conv2d if dims == 2 else torch.nn.functional.conv3d
        result = convolve(input, weight)
        for one in (result, *torch.autograd.grad(result.sum(), (input, weight))):
            assert one.is_contiguous(memory_format=wanted)

    with torch.backends.cudnn.flags(enabled=cudnn):
        trace(step, device="cuda")


def test_what_float64_copies_on_cuda_is_copied_once() -> None:
    """The first of two convolutions brings its input out of channels last, and the second gets it
    as cuDNN wants it: output and workspace follow one rule.
    """

    def step() -> None:
        input, weight = operands(2, torch.float64, "cuda")
        inner = torch.nn.functional.conv2d(input, weight)
        torch.nn.functional.conv2d(inner, input.new_empty((4, 8, 3, 3)))

    profile = trace(step, device="cuda")
    copies = [one.nbytes for one in profile.timeline.allocations if one.kind is Kind.WORKSPACE]
    assert copies == [2 * 4 * 6 * 6 * 8]


class Lines(nn.Conv1d):
    """A convolution between layers that keep channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(x.transpose(1, 2))).transpose(1, 2)


@pytest.mark.parametrize("groups", [1, 4, 64])
@pytest.mark.parametrize("kernel", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turned_lines(groups: int, kernel: int, dtype: torch.dtype) -> None:
    model = Lines(64, 64, kernel, padding=kernel // 2, groups=groups, dtype=dtype)
    as_measured(model, torch.rand(2, 49, 64, dtype=dtype, requires_grad=True))
