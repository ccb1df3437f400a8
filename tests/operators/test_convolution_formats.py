"""One rule for each library says the memory format of a convolution's operands and results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.operators.convolution.choice import (
    cuda_format,
    native_cpu_format,
    onednn_format,
)
from pytest_torchmem.profile.timeline import Kind

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
def test_rules_of_the_libraries(
    rule: Callable[[Tensor, Tensor], torch.memory_format],
    dtype: torch.dtype,
    dims: int,
    last: bool,
    turned: str,
) -> None:
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
def test_results_and_gradients_on_cuda_lie_as_the_library_works(
    dims: int, dtype: torch.dtype, cudnn: bool, last: bool
) -> None:
    """``cudnn_conv_suggest_memory_format``: cuDNN has no channels last for float64; ATen's own CUDA
    kernels have none at all.
    """
    wanted = LAST[dims] if last else CONTIGUOUS
    found: list[bool] = []

    def step() -> None:
        input, weight = (one.requires_grad_() for one in operands(dims, dtype, "cuda"))
        convolve = torch.nn.functional.conv2d if dims == 2 else torch.nn.functional.conv3d
        result = convolve(input, weight)
        for one in (result, *torch.autograd.grad(result.sum(), (input, weight))):
            found.append(one.is_contiguous(memory_format=wanted))

    with torch.backends.cudnn.flags(enabled=cudnn):
        trace(step, device="cuda")
    assert found == [True] * 3


def test_what_float64_copies_on_cuda_is_copied_once() -> None:
    """The first of two convolutions brings its input out of channels last, and the second gets it
    as cuDNN wants it: output and workspace follow one rule.
    """

    def step() -> None:
        input, weight = operands(2, torch.float64, "cuda")
        inner = torch.nn.functional.conv2d(input, weight)
        torch.nn.functional.conv2d(
            inner, torch.empty((4, 8, 3, 3), dtype=torch.float64, device="cuda")
        )

    profile = trace(step, device="cuda")
    copies = [one.nbytes for one in profile.timeline.allocations if one.kind is Kind.WORKSPACE]
    assert copies == [2 * 4 * 6 * 6 * 8]
